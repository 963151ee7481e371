"""`central`: one copy of the parameters per host; each worker reduces, owns and updates its slice of them.

A step, for P workers and S bytes of parameters:

    backward    fills this worker's gradient buckets; slices that everyone has filled are reduced on the way
    agree       the last slices are reduced: P·S bytes read, and only S written, where an all-reduce writes P·S
    (barrier)   agreeing needs every worker, so every backward has ended: from here on nobody reads the parameters
    apply       each worker updates its slice of the shared copy, with its slice of the optimizer's state
    (barrier)   all slices are written: the next forward may begin

So there is one copy of the parameters and one of the optimizer's state on the host, whatever the number of workers, and
each optimizer does 1/P of the work. Gradients are still one copy per worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.allreduce.collective import SharedCollective
from manyhands.allreduce.reducer import Reducer, gradient_layouts
from manyhands.central.gather import Carrier, gather_state
from manyhands.central.home import ParameterHome
from manyhands.central.ownership import cut, keep_whole
from manyhands.errors import UserError
from manyhands.group.shared import SharedGroup
from manyhands.link.wire import Wire
from manyhands.memory.heap import keep_freed_memory
from manyhands.sharding.optimizers import is_elementwise
from manyhands.sharding.slices import SlicedOptimizer
from manyhands.training.clipping import scale_down, squares_of
from manyhands.training.exchange import Exchange, LocalStep, SharedStep, Times, Traffic

__all__ = ["CentralExchange"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Attached:
    """What a worker works with once the model is known."""

    optimizer: Optimizer
    home: ParameterHome
    collective: SharedCollective
    reducer: Reducer
    slices: SlicedOptimizer


class CentralExchange(Exchange):
    """One worker's end: the gradients are its own, the parameters everyone's. Takes over `group`."""

    steps_itself = True
    wire = Wire.MEMORY

    def __init__(self, group: SharedGroup, bucket_bytes: int) -> None:
        self.rank = group.rank
        self.world = group.world
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._attached: _Attached | None = None

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: move worker 0's parameters into shared memory and share out who updates what.

        A UserError names an optimizer that cannot be shared out. Buffers stay each worker's own, from worker 0's.
        """
        share_out = cut if is_elementwise(optimizer) else keep_whole
        owned = share_out(gradient_layouts(model, self._bucket_bytes), self.world)
        # The model's own memory goes before that of the gradients comes: the two never need room at the same time.
        home = ParameterHome(self._group, model, owned.layouts)
        collective = SharedCollective(self._group, owned.ranges)
        reducer = Reducer(model, collective, owned.layouts, bring_back=False)
        reducer.broadcast(list(model.buffers()))
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        slices = SlicedOptimizer(
            optimizer, owned.pieces[self.rank], trainable, home.values, reducer.gradients
        )
        self._attached = _Attached(
            optimizer=optimizer, home=home, collective=collective, reducer=reducer, slices=slices
        )
        keep_freed_memory()  # every step frees what the next one takes

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Backward of this worker's weighted loss; slices are reduced while it runs."""
        (loss * share).backward()  # type: ignore[no-untyped-call]

    def weigh(self, share: float) -> None:
        """Gradients are weighted as they enter their buckets."""
        self._need().reducer.weight = share

    def on_next_gradient(self, listener: Callable[[], None]) -> None:
        """From the hook that sees it."""
        self._need().reducer.on_next_gradient = listener

    def accumulate(self) -> AbstractContextManager[None]:
        """Gradients add up in their buckets, which stay here."""
        return self._need().reducer.holding()

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: this worker's slices of the gradient are now the sum; every backward has ended."""
        return self._need().reducer.finish(local)

    def clip(self, max_norm: float) -> float:
        """Collective: the norm from every worker's slices; each scales its own."""
        attached = self._need()
        gradients = self.held_gradients()
        squares = squares_of(gradients)
        total = attached.reducer.total(torch.tensor([squares], dtype=torch.float64))
        norm = math.sqrt(total.item())
        scale_down(gradients, norm, max_norm)
        return norm

    def held_gradients(self) -> Sequence[torch.Tensor]:
        """The summed gradient of this worker's slices."""
        return self._need().slices.reached()

    def apply(self) -> None:
        """Collective: update this worker's slices of the shared copy, and wait until all are written."""
        attached = self._need()
        attached.slices.step()
        attached.optimizer.zero_grad()
        self._group.barrier()
        attached.home.refresh()

    def optimizer_state(self) -> dict[str, Any] | None:
        """Collective: gathered at worker 0 through the memory of a gradient bucket."""
        attached = self._need()
        if not attached.reducer.is_idle:
            raise UserError(
                "the optimizer's state can be had between steps; a gradient waits for its step here"
            )
        carrier = Carrier(
            rank=self.rank,
            parts=[part.view(torch.uint8) for part in attached.collective.parts(attached.reducer.carrier)],
            barrier=self._group.barrier,
            total=attached.reducer.total,
        )
        shapes = [p.shape for group in attached.optimizer.param_groups for p in group["params"]]
        state = gather_state(carrier, attached.slices.state(), shapes)
        if state is None:
            return None
        settings = attached.slices.settings()
        return {**settings, "state": {**settings["state"], **state}}

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over workers."""
        return self._need().reducer.total(values)

    def take_times(self) -> Times:
        """Measured inside the compiled code."""
        return self._attached.collective.take_times() if self._attached is not None else Times()

    def traffic(self) -> Traffic:
        """The bytes of others' gradients that this worker read."""
        return self._attached.collective.traffic() if self._attached is not None else Traffic()

    def close(self) -> None:
        """Release gradients and memory; the model keeps the shared parameters as long as it lives."""
        if self._attached is not None:
            self._attached.slices.close()
            self._attached.reducer.close()
            self._attached.home.close()
        self._group.close()

    def _need(self) -> _Attached:
        assert self._attached is not None, "attach comes first"
        return self._attached
