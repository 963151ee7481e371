"""`allreduce` and `mirrored`: every worker holds the model, and all take the same step from the summed gradient.

Each worker's loss is weighted by its share of the global batch before backward, so the sum over workers is the gradient
of the mean over the batch, whatever the split.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.allreduce.collective import Collective
from manyhands.allreduce.reducer import Reducer
from manyhands.exchange import Exchange, LocalStep, SharedStep, Times, Traffic

__all__ = ["AllReduceExchange"]


class AllReduceExchange(Exchange):
    """One worker's end of a synchronous all-reduce over the given collective."""

    def __init__(self, collective: Collective, bucket_bytes: int) -> None:
        self.rank = collective.rank
        self.world = collective.world
        self._collective = collective
        self._bucket_bytes = bucket_bytes
        self._optimizer: Optimizer | None = None
        self._reducer: Reducer | None = None

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: lay the gradients into buckets and give every worker worker 0's weights and buffers."""
        self._optimizer = optimizer
        self._reducer = Reducer(model, self._collective, self._bucket_bytes)
        self._reducer.broadcast([*model.parameters(), *model.buffers()])

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Backward of this worker's weighted loss; full buckets leave while it runs."""
        (loss * share).backward()  # type: ignore[no-untyped-call]

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: finish the sums; every worker's gradients are now the same."""
        assert self._reducer is not None, "attach comes before agree"
        return self._reducer.finish(local)

    def apply(self) -> None:
        """The same optimizer step on every worker."""
        assert self._optimizer is not None, "attach comes before apply"
        self._optimizer.step()
        self._optimizer.zero_grad()

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

    def close(self) -> None:
        """Release gradients, memory and links."""
        if self._reducer is not None:
            self._reducer.close()
        self._collective.close()
