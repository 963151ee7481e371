"""`state_dict()` and `load_state_dict()` of a model and an optimizer in parts on the workers: as in one process.

Reading a state is then collective: every worker gets the whole. So a script that saves and loads is the same under
every strategy, and a checkpoint shows no trace of how the model was cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.data.store.state_tree import pack_tree, restore_optimizer, unpack_tree
from manyhands.engine.exchange import CutModel, Exchange
from manyhands.interop.own_loop.small_sums import Call, Words


class WholeStates:
    """Hooks on `models`, which `model` holds, and on the `optimizer`, from construction to `close`."""

    def __init__(
        self,
        words: Words,
        exchange: Exchange,
        model: nn.Module,
        models: Sequence[nn.Module],
        optimizer: Optimizer,
    ) -> None:
        assert exchange.cut is not None, "only where the model is cut"
        self._words, self._exchange, self._model = words, exchange, model
        self._cut: CutModel = exchange.cut
        self._passing = False  # parts go in and out as they are
        self._hooks = ExitStack()
        untyped: list[Any] = list(models)
        for number, one in enumerate(untyped):
            start = f"{number}." if len(models) > 1 else ""  # of its names in the whole
            for hook in (
                one.register_state_dict_post_hook(partial(self._replace, start)),
                one.register_load_state_dict_pre_hook(partial(self._begin_load, start)),
                one.register_load_state_dict_post_hook(lambda *_: self._cut.end_load()),
            ):
                self._hooks.callback(hook.remove)
        of_optimizer = (
            optimizer.register_state_dict_post_hook(
                lambda *_: None if self._passing else self._whole_optimizer()
            ),
            optimizer.register_load_state_dict_pre_hook(
                lambda _, given: None if self._passing else self._cut.optimizer_part(given)
            ),
        )
        for handle in of_optimizer:
            self._hooks.callback(handle.remove)

    def model_state(self) -> Mapping[str, torch.Tensor]:
        """Collective: the whole model's state, on every worker."""
        self._words.meet(Call.STATE)
        state: Mapping[str, torch.Tensor] = self._spread(self._exchange.model_state(self._model))
        return state

    def optimizer_state(self) -> dict[str, Any] | None:
        """Collective: the whole optimizer's state, on worker 0."""
        before, self._passing = self._passing, True
        try:
            return self._exchange.optimizer_state()
        finally:
            self._passing = before

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Have the optimizer continue where a whole `state` stopped."""
        part = self._cut.optimizer_part(state)
        before, self._passing = self._passing, True
        try:
            restore_optimizer(optimizer, part)
        finally:
            self._passing = before

    def close(self) -> None:
        self._hooks.close()

    def _whole_optimizer(self) -> dict[str, Any]:
        self._words.meet(Call.STATE)
        state: dict[str, Any] = self._spread(self.optimizer_state())
        return state

    def _replace(self, start: str, _model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, value in self.model_state().items():
            if name.startswith(start):
                key = prefix + name[len(start) :]
                state[key] = value.to(state[key].device)

    def _begin_load(self, start: str, _model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        own = {start + key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
        self._cut.begin_load(own)
        state.update({prefix + name[len(start) :]: value for name, value in own.items()})

    def _spread(self, tree: Any) -> Any:
        """Collective: worker 0's tree, on every worker."""
        packed = b"".join(pack_tree(tree)) if self._words.rank == 0 else b""
        size = torch.tensor([len(packed)])
        self._words.broadcast(size.view(torch.uint8))
        content = torch.empty(int(size), dtype=torch.uint8)
        if packed:
            content = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self._words.broadcast(content)
        return tree if self._words.rank == 0 else unpack_tree(bytearray(content.numpy().tobytes()))
