"""`allreduce`: every worker holds the model, and all apply the same step from the summed gradient.

Each worker weights its loss by its share of the global batch before backward. The sum over workers is therefore the
gradient of the mean over the batch, however the batch is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.engine.exchange import Exchange, ExchangeState, LocalStep, Meter, SharedStep, WorkerPart
from manyhands.native.heap import keep_freed_memory
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.strategies.common.collectives.piggyback import remember_kept
from manyhands.strategies.common.collectives.reducer import Reducer, gradient_layouts
from manyhands.wire.codec import check_optimizer

__all__ = ["AllReduceExchange"]


class AllReduceExchange(Exchange):
    """One worker's end of a synchronous all-reduce over the given collective."""

    hooks: Reducer | None = None
    _optimizer: Optimizer

    def __init__(self, collective: Collective, bucket_bytes: int) -> None:
        self.rank, self.world = collective.rank, collective.world
        self.part = WorkerPart(index=self.rank, count=self.world, copies=(range(self.world),))
        self.meter = Meter(take_times=collective.take_times, traffic=collective.traffic)
        self._collective = collective
        self._bucket_bytes = bucket_bytes
        self.besides: Mapping[str, Any] = {}
        """Extra entries for the summary at the end of a run, added to those of the collective."""

    @property
    def wire(self) -> int:  # type: ignore[override]
        """The wire of the collective, which may change during a run."""
        return self._collective.wire

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: lay the gradients into buckets and give every worker worker 0's weights and buffers."""
        self.lay_out(model, optimizer).broadcast([*model.parameters(), *model.buffers()])

    def lay_out(self, model: nn.Module, optimizer: Optimizer) -> Reducer:
        """Collective: lay the gradients out in buckets, without exchanging weights."""
        check_optimizer(self._collective.codec, optimizer)
        self._optimizer = optimizer
        layouts = gradient_layouts(model, self._bucket_bytes, rows=self._collective.sums_rows)
        self.hooks = Reducer(model, self._collective, layouts)
        self.kept = ExchangeState(gather=self.hooks.residuals, load=partial(remember_kept, self._collective))
        keep_freed_memory()  # every step frees what the next one takes
        return self.hooks

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: finish the sums. Afterwards every worker has the same gradients."""
        return self._reducer.finish(local)

    def apply(self) -> None:
        """Take the optimizer step, which is the same on every worker."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def optimizer_state(self) -> dict[str, Any] | None:
        """Return the optimizer state on worker 0 and None elsewhere; every worker holds all of it."""
        self._collective.settle()
        return self._optimizer.state_dict() if self.rank == 0 else None

    def model_state(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        """Collective: return the model state on worker 0; no worker needs another afterwards for a pending sum."""
        if self._collective.settle():
            self.total(torch.zeros(1, dtype=torch.float64))
        return super().model_state(model)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over workers."""
        return self._reducer.total(values)

    def summary(self) -> Mapping[str, Any]:
        """Return the summary of the collective and the extra entries of `besides`."""
        return {**self._collective.summary(), **self.besides}

    def close(self) -> None:
        """Release gradients, memory and links."""
        if self.hooks is not None:
            self.hooks.close()
        self._collective.close()

    @property
    def _reducer(self) -> Reducer:
        assert self.hooks is not None, "attach comes first"
        return self.hooks
