"""`sharded` in a loop of the user's own, which runs forward and backward whenever it likes.

A unit comes when it is used, in a forward, in a backward or by whoever reads a parameter, and stays no longer than to
the end of that backward or step. The gradient of a backward is summed to the owners of its pieces, of which the user's
optimizer is made; so its `step` is the whole step, and `zero_grad`, schedulers and hooks are simply the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.engine.exchange import CutModel, GradientParts, LocalStep, Resources, SharedStep
from manyhands.errors import UserError
from manyhands.strategies.common.sharding.layer_units import Action, LentMemory
from manyhands.strategies.sharded.exchange import ShardedExchange


class ShardedLoop(ShardedExchange):
    """One worker's end; the loop's backwards are found by the gradients that come."""

    steps_itself, cuts_model = False, True
    _memory = LentMemory

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        self.on_next_gradient: Callable[[], None] | None = None
        self._open = ExitStack()
        self._forwards, self._in_backward = 0, False
        self._marked: set[nn.Parameter] = set()  # those whose `grad` stands for one in pieces

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._device = next((one.device for one in model.parameters()), self._device)
        super().attach(model, optimizer)
        self.hooks = self
        held = self._whole.gradients
        self.parts = GradientParts(held=held, counted=held, total=self.total)
        self.cut = CutModel(
            begin_load=lambda _: None,
            end_load=self._keep_loaded,
            optimizer_part=self._whole.optimizer_part,
            make_whole=self._whole.make_whole,
            arrive=self._meet,
        )
        self._open.enter_context(self._visits.watching())
        roots: list[Any] = list(model) if isinstance(model, nn.ModuleList) else [model]
        for root in roots:
            for hook in (
                root.register_forward_pre_hook(self._begin_forward),
                root.register_forward_hook(self._end_forward, always_call=True),
                # What it lists of the parameters is replaced by the whole, so that nothing need come.
                root.register_state_dict_pre_hook(lambda *_: self._watch(False)),
                root.register_state_dict_post_hook(lambda *_: self._watch(True)),
            ):
                self._open.callback(hook.remove)
        self._open.callback(optimizer.register_step_post_hook(lambda *_: self._begin_step()).remove)

    def begin_step(self, step: int) -> None:
        """Nothing to do: sums are asked for one by one."""

    def holding(self) -> AbstractContextManager[None]:
        return (
            nullcontext()
        )  # every backward is summed, or each worker would need the memory of a whole gradient

    def agree(self, local: LocalStep) -> SharedStep:
        shared = super().agree(local)
        for held, gradient in zip(self._held, self._summed(), strict=True):
            if gradient is not None:
                total, earlier = gradient.view(held.local.shape), held.local.grad
                held.local.grad = total if earlier is None else earlier.add_(total)
        for (pieces, number), reached in zip(self._places, self._reached, strict=True):
            if reached:
                parameter = pieces.unit.parameters[number]
                parameter.grad = GradientInPieces(parameter)
                self._marked.add(parameter)
        self._forget_sums()
        return shared

    def close(self) -> None:
        self._open.close()
        super().close()

    def _carry_out(self, actions: Iterable[Action]) -> None:
        self._notice_backward()
        super()._carry_out(actions)

    def _notice_backward(self) -> None:
        if self._in_backward or torch._C._current_graph_task_id() == -1:
            return
        self._in_backward = True
        self._drop_zeroed()
        self._flow.backward()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        super()._end_backward()
        self._in_backward = False

    def _before_gradient(self, index: int) -> None:
        self._notice_backward()
        pieces, number = self._places[index]
        parameter = pieces.unit.parameters[number]
        parameter.grad = None
        self._marked.discard(parameter)
        if self.on_next_gradient is not None:
            listener, self.on_next_gradient = self.on_next_gradient, None
            listener()

    def _begin_forward(self, *_of_hook: Any) -> None:
        if not self._forwards and not self._in_backward:
            self._flow.begin("training" if torch.is_grad_enabled() else "evaluation")
        self._forwards += 1

    def _end_forward(self, *_of_hook: Any) -> None:
        self._forwards -= 1
        if not self._forwards and not self._in_backward and not torch.is_grad_enabled():
            self._carry_out(self._flow.end())

    def _begin_step(self) -> None:
        """The optimizer has stepped: what is here of any unit is old."""
        self._carry_out(self._flow.end())
        self._flow.begin("training")

    def _drop_zeroed(self) -> None:
        """Whoever has taken the mark of a gradient from a parameter, as `model.zero_grad()` does, means its pieces."""
        for held in self._held:
            if held.whole in self._marked and held.whole.grad is None:
                held.local.grad = None
        self._marked = {one for one in self._marked if one.grad is not None}

    def _watch(self, watching: bool) -> None:
        self._visits.is_watching = watching

    def _keep_loaded(self) -> None:
        for pieces in self._pieces:
            if pieces.memory.is_here:
                pieces.keep_values()
        self._carry_out(self._flow.end())


class GradientInPieces(Tensor):
    """Stands for the gradient of a parameter whose pieces lie on all workers: UserError to whoever computes with it."""

    @staticmethod
    def __new__(cls, parameter: nn.Parameter) -> GradientInPieces:
        kind: Any = {"dtype": parameter.dtype, "device": parameter.device}
        made: GradientInPieces = Tensor._make_wrapper_subclass(cls, parameter.shape, **kind)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"a gradient in pieces on all workers, of shape {tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise UserError(
            f"{function} needs a gradient that lies in pieces on all workers under sharded; clip with "
            "group.clip_grad_norm_, and give a GradScaler to group.prepare; strategy=mirrored has whole gradients"
        )
