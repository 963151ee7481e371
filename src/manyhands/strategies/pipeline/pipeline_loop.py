"""`pipeline` in a loop of the user's own: a batch and its loss go through the schedule in one call.

No worker has the whole model, so nobody can call it. The user's `loss(model, batch)` meets a stand-in, as in `fit`:
the first stage learns the input from it, and the last one the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.data.randomness import mix, preserved, seed_all
from manyhands.engine.chain import ChainCall, chain_of
from manyhands.engine.exchange import BatchPiece, BatchRunner, CutModel, LocalStep, Resources, SharedStep
from manyhands.errors import UserError
from manyhands.strategies.common.grid.loop_gradients import LoopGradients
from manyhands.strategies.pipeline.cuts import balanced
from manyhands.strategies.pipeline.ends import NamesGiven, StandIn, call_of
from manyhands.strategies.pipeline.exchange import PipelineExchange, check_model
from manyhands.strategies.pipeline.strategy import Pipeline

_WHAT = "the loss given to group.step"
_LOSS = -1  # the place of a module that seeds what the loss draws


class PipelineLoop(PipelineExchange):
    """One stage of a pipeline replica; layers are cut by their numbers of parameters where `cuts` are not given."""

    cuts_model = True
    hooks: LoopGradients | None = None

    def __init__(self, strategy: Pipeline, resources: Resources) -> None:
        super().__init__(strategy, resources, None, lambda *_, **__: None)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        check_model(self._strategy, model)
        self._chain = chain_of(model)
        self._device = next((one.device for one in model.parameters()), torch.device("cpu"))
        super().attach(model, optimizer)
        self._refusal = model.register_forward_pre_hook(_refuse)
        self._seed = int(self._all.broadcast(torch.tensor([torch.initial_seed() & (2**62 - 1)])))
        self._batches = 0
        self.hooks = LoopGradients([one.local for one in self._held.held])
        self.runner = BatchRunner(
            pieces=1 if self.table.over_time else self.table.microbatches, run=self._run
        )
        self.cut = CutModel(
            begin_load=self._held.cut_state,
            end_load=lambda: None,
            optimizer_part=self._held.optimizer_part,
            make_whole=self._make_whole,
        )

    def agree(self, local: LocalStep) -> SharedStep:
        assert self.hooks is not None, "set by attach"
        with self.hooks.pending():
            return super().agree(local)

    def close(self) -> None:
        super().close()
        if self.hooks is not None:
            self.hooks.close()
            self._refusal.remove()

    def _run(self, pieces: Sequence[BatchPiece], loss: Callable[..., Tensor | float]) -> float:
        """Collective: forward and, where gradients are enabled, backward of the pieces; the loss on the last stage."""
        ends = LoopEnds(
            pieces, loss, mix(self._seed, self._batches, self.part.index), NamesGiven(self._chain)
        )
        self._batches += 1
        with preserved():  # layers draw by seeds of their own
            if torch.is_grad_enabled():
                self.stage.run(ends, len(pieces), lambda _: None)
                return ends.mean_loss()
            self._post.begin(checked=False)
            for number in range(len(pieces)):
                call, named = partial(ends.call, number), partial(ends.named, number)
                begin, measure = partial(ends.begin, number), partial(ends.loss, number)
                self._forward_only(number, call, named, begin, measure)
            return ends.mean_loss()

    def _find_device(self) -> torch.device:
        return self._device

    def _agree_on_cuts(self, model: nn.Module, chain: Sequence[nn.Module]) -> tuple[int, ...]:
        del model
        if self._strategy.memory:
            raise UserError(
                "memory: no batch is known before the first step of your own loop; give cuts=… instead"
            )
        if self._strategy.cuts:
            return self._strategy.cuts
        sizes = [1.0 + sum(one.numel() for one in module.parameters()) for module in chain]
        found = balanced(sizes, self.table.parts)
        assert found is not None, "there are enough layers"
        return found

    def _make_whole(self, state: Mapping[str, Tensor]) -> None:
        self._sliced.undo()
        self._held.make_whole(state)
        self._model.load_state_dict(state)
        self._model.to(self._device)


class LoopEnds:
    """Both ends of the chain for one batch: the input of each of its pieces, and the loss of what comes out."""

    computing: Callable[[], AbstractContextManager[object]] = nullcontext

    def __init__(
        self,
        pieces: Sequence[BatchPiece],
        loss: Callable[..., Tensor | float],
        seed: int,
        names: NamesGiven,
    ) -> None:
        self._pieces, self._loss, self._seed, self._names = pieces, loss, seed, names
        self._calls: dict[int, ChainCall] = {}
        self._mean = 0.0

    def begin(self, microbatch: int, place: int) -> None:
        seed_all(mix(self._seed, microbatch, place + 1))

    def prepare(self, microbatch: int) -> None:
        """Nothing to do: the batch is here."""

    def call(self, microbatch: int) -> ChainCall:
        if microbatch not in self._calls:
            self.begin(microbatch, _LOSS)
            batch = self._pieces[microbatch].batch
            self._calls[microbatch] = call_of(self._loss, batch, _WHAT, self._names)
        return self._calls[microbatch]

    def input(self, microbatch: int) -> Any:
        return self.call(microbatch).x

    def named(self, microbatch: int) -> Mapping[str, Any]:
        return self.call(microbatch).named

    def loss(self, microbatch: int, output: Any) -> Tensor:
        """The user's loss for this output, times the piece's weight in the batch."""
        piece, model = self._pieces[microbatch], StandIn(_WHAT, output)
        self.begin(microbatch, _LOSS)
        weighted = torch.as_tensor(self._loss(model, piece.batch)) * piece.weight
        model.require_call()
        self._mean += float(weighted.detach())
        return weighted

    def mean_loss(self) -> float:
        return self._mean


def _refuse(*_: Any) -> NoReturn:
    raise UserError(
        "under pipeline no worker has the whole model, so it cannot be called; give a batch and a function "
        "loss(model, batch) to group.step(batch, loss), inside torch.no_grad() to evaluate"
    )
