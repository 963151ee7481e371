"""`allreduce` and `mirrored`: every worker holds the model, and all take the same step from the summed gradient.

Each worker's loss is weighted by its share of the global batch before backward, so the sum over workers is the gradient
of the mean over the batch, whatever the split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.engine.computing import Computed, Computer
from manyhands.engine.exchange import Exchange, LocalStep, SharedStep, Times, Traffic
from manyhands.engine.row_gradients import clippable
from manyhands.native.heap import keep_freed_memory
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.strategies.common.collectives.piggyback import remember_kept
from manyhands.strategies.common.collectives.reducer import Reducer, gradient_layouts
from manyhands.wire.codec import check_optimizer

__all__ = ["AllReduceExchange"]


class AllReduceExchange(Exchange):
    """One worker's end of a synchronous all-reduce over the given collective."""

    def __init__(self, collective: Collective, bucket_bytes: int) -> None:
        self.rank = collective.rank
        self.world = collective.world
        self._collective = collective
        self._bucket_bytes = bucket_bytes
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._reducer: Reducer | None = None
        self.besides: Mapping[str, Any] = {}
        """What it tells at the end of a run, besides what the collective does."""

    @property
    def wire(self) -> int:  # type: ignore[override]
        """As the collective has it, which may change."""
        return self._collective.wire

    @property
    def copies(self) -> Sequence[Sequence[int]]:
        """Everybody holds the model."""
        return (range(self.world),)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: lay the gradients into buckets and give every worker worker 0's weights and buffers."""
        self.lay_out(model, optimizer)
        self.spread()

    def lay_out(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: lay the gradients into buckets."""
        check_optimizer(self._collective.codec, optimizer)
        self._model, self._optimizer = model, optimizer
        layouts = gradient_layouts(model, self._bucket_bytes, rows=self._collective.sums_rows)
        self._reducer = Reducer(model, self._collective, layouts)
        keep_freed_memory()  # every step frees what the next one takes

    def spread(self) -> None:
        """Collective, after `lay_out`: give every worker worker 0's weights and buffers."""
        assert self._reducer is not None, "lay_out comes before spread"
        assert self._model is not None, "lay_out comes before spread"
        self._reducer.broadcast([*self._model.parameters(), *self._model.buffers()])

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        """Full buckets leave while it runs."""
        self.begin(step)
        return super().compute(computer, model, step)

    def begin(self, step: int) -> None:
        """Buckets may leave as they are full."""
        self._collective.begin(step)

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Backward of this worker's weighted loss; full buckets leave while it runs."""
        (loss * share).backward()  # type: ignore[no-untyped-call]

    def weigh(self, share: float) -> None:
        """Gradients are weighted as they enter their buckets."""
        assert self._reducer is not None, "attach comes before weigh"
        self._reducer.weight = share

    def on_next_gradient(self, listener: Callable[[], None]) -> None:
        """From the hook that sees it."""
        assert self._reducer is not None, "attach comes before on_next_gradient"
        self._reducer.on_next_gradient = listener

    def accumulate(self) -> AbstractContextManager[None]:
        """Gradients add up in their buckets, which stay here."""
        assert self._reducer is not None, "attach comes before accumulate"
        return self._reducer.holding()

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: finish the sums; every worker's gradients are now the same."""
        assert self._reducer is not None, "attach comes before agree"
        return self._reducer.finish(local)

    def clip(self, max_norm: float) -> float:
        """The same bits on every worker, because the gradients are."""
        assert self._model is not None, "attach comes before clip"
        return float(nn.utils.clip_grad_norm_(clippable(self._model.parameters()), max_norm))

    def apply(self) -> None:
        """The same optimizer step on every worker."""
        assert self._optimizer is not None, "attach comes before apply"
        self._optimizer.step()
        self._optimizer.zero_grad()

    def optimizer_state(self) -> dict[str, Any] | None:
        """Every worker has all of it; worker 0 tells."""
        assert self._optimizer is not None, "attach comes before optimizer_state"
        self._collective.settle()
        return self._optimizer.state_dict() if self.rank == 0 else None

    def model_state(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        """Every worker has all of it; and after this nobody needs another to end what was begun."""
        if self._collective.settle():
            self.total(torch.zeros(1, dtype=torch.float64))
        return super().model_state(model)

    def memory(self) -> Mapping[str, Any]:
        """What the codec has left out so far, of every worker."""
        assert self._reducer is not None, "attach comes before memory"
        owed = self._reducer.owed()
        return {"codec": owed} if owed else {}

    def load_state(self, memory: Mapping[str, Any]) -> None:
        """Each its own."""
        remember_kept(self._collective, memory.get("codec"))

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over workers."""
        assert self._reducer is not None, "attach comes before total"
        return self._reducer.total(values)

    def take_times(self) -> Times:
        """What the collective measured."""
        return self._collective.take_times()

    def traffic(self) -> Traffic:
        """What the collective sent."""
        return self._collective.traffic()

    def summary(self) -> Mapping[str, Any]:
        """What the collective tells, and what it was chosen for."""
        return {**self._collective.summary(), **self.besides}

    def close(self) -> None:
        """Release gradients, memory and links."""
        if self._reducer is not None:
            self._reducer.close()
        self._collective.close()
