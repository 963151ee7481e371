"""`allreduce` and `mirrored`: every worker holds the model, and all apply the same step from the summed gradient.

Each worker weights its loss by its share of the global batch before backward. The sum over workers is therefore the
gradient of the mean over the batch, however the batch is split.
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
        """Extra entries for the summary at the end of a run, added to those of the collective."""

    @property
    def wire(self) -> int:  # type: ignore[override]
        """The wire of the collective, which may change during a run."""
        return self._collective.wire

    @property
    def copies(self) -> Sequence[Sequence[int]]:
        """Every worker holds the whole model."""
        return (range(self.world),)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: lay the gradients into buckets and give every worker worker 0's weights and buffers."""
        self.lay_out(model, optimizer)
        self.spread()

    def lay_out(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: lay the gradients out in buckets, without exchanging weights."""
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
        """Forward and backward of this worker's part; full buckets are sent while backward runs."""
        self.begin(step)
        return super().compute(computer, model, step)

    def begin(self, step: int) -> None:
        """Begin a step: from here on buckets may be sent as soon as they are full."""
        self._collective.begin(step)

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Backward of this worker's weighted loss; full buckets are sent while it runs."""
        (loss * share).backward()  # type: ignore[no-untyped-call]

    def weigh(self, share: float) -> None:
        """Set the factor by which gradients are multiplied as they are copied into their buckets."""
        assert self._reducer is not None, "attach comes before weigh"
        self._reducer.weight = share

    def on_next_gradient(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, from the hook that sees the next gradient."""
        assert self._reducer is not None, "attach comes before on_next_gradient"
        self._reducer.on_next_gradient = listener

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context in which gradients add up in their buckets and nothing is sent."""
        assert self._reducer is not None, "attach comes before accumulate"
        return self._reducer.holding()

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: finish the sums. Afterwards every worker has the same gradients."""
        assert self._reducer is not None, "attach comes before agree"
        return self._reducer.finish(local)

    def clip(self, max_norm: float) -> float:
        """Clip by the global norm; gradients are equal on all workers, so the result is bit-identical."""
        assert self._model is not None, "attach comes before clip"
        return float(nn.utils.clip_grad_norm_(clippable(self._model.parameters()), max_norm))

    def apply(self) -> None:
        """Take the optimizer step, which is the same on every worker."""
        assert self._optimizer is not None, "attach comes before apply"
        self._optimizer.step()
        self._optimizer.zero_grad()

    def optimizer_state(self) -> dict[str, Any] | None:
        """Return the optimizer state on worker 0 and None elsewhere; every worker holds all of it."""
        assert self._optimizer is not None, "attach comes before optimizer_state"
        self._collective.settle()
        return self._optimizer.state_dict() if self.rank == 0 else None

    def model_state(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        """Collective: return the model state on worker 0.

        Afterwards no worker needs another to finish a pending sum.
        """
        if self._collective.settle():
            self.total(torch.zeros(1, dtype=torch.float64))
        return super().model_state(model)

    def memory(self) -> Mapping[str, Any]:
        """Collective: return the codec residuals of all workers, for a checkpoint."""
        assert self._reducer is not None, "attach comes before memory"
        owed = self._reducer.owed()
        return {"codec": owed} if owed else {}

    def load_state(self, memory: Mapping[str, Any]) -> None:
        """Restore this worker's codec residuals from a checkpoint."""
        remember_kept(self._collective, memory.get("codec"))

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over workers."""
        assert self._reducer is not None, "attach comes before total"
        return self._reducer.total(values)

    def take_times(self) -> Times:
        """Return the times that the collective measured since the last call."""
        return self._collective.take_times()

    def traffic(self) -> Traffic:
        """Return what the collective has sent so far."""
        return self._collective.traffic()

    def summary(self) -> Mapping[str, Any]:
        """Return the summary of the collective and the extra entries of `besides`."""
        return {**self._collective.summary(), **self.besides}

    def close(self) -> None:
        """Release gradients, memory and links."""
        if self._reducer is not None:
            self._reducer.close()
        self._collective.close()
