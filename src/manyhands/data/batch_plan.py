"""Which samples make batch k: the same for every strategy and every number of workers.

Epoch e visits each sample once, in an order drawn from (seed, e). The order is the stable argsort of one raw
64-bit Philox output per sample, seeded by `SeedSequence(seed, spawn_key=(e,))`: numpy promises the raw
streams of its bit generators to stay the same for ever, and does not promise that of `Generator.permutation`,
so a run resumed under a later numpy still sees the same batches.

    epoch 0                              epoch 1
    [ batch 0  | batch 1  | batch 2 ]    [ batch 3  | batch 4  | batch 5 ]     an epoch's last may be short
      w0 w1 w2                           split in order over the workers, sizes differ by at most one
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import UserError

__all__ = ["MAX_SEED", "BatchPlan", "permutation", "split"]

MAX_SEED = 2**64 - 1  # what torch.manual_seed takes, so that one seed serves both


def permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which `epoch` visits the samples: a pure, version-stable function of its arguments."""
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    keys = bits.random_raw(num_samples)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def split(count: int, worker_rank: int, num_workers: int) -> range:
    """One worker's contiguous part of `range(count)`; the first `count % num_workers` ranks have one more."""
    if num_workers < 1:
        raise UserError(f"num_workers is {num_workers}; it must be at least 1")
    if not 0 <= worker_rank < num_workers:
        raise UserError(f"worker_rank is {worker_rank}; it must be in 0..{num_workers - 1}")
    base, extra = divmod(count, num_workers)
    start = worker_rank * base + min(worker_rank, extra)
    return range(start, start + base + (worker_rank < extra))


class BatchPlan:
    """Global batches numbered by step, for ever: step k belongs to epoch k // `batches_per_epoch`.

    Nothing is stored but the order of the epoch asked for last, so steps that go forward cost one sort per
    epoch.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int) -> None:
        for field, value in (("num_samples", num_samples), ("batch_size", batch_size)):
            if value < 1:
                raise UserError(f"{field} is {value}; it must be at least 1")
        if not 0 <= seed <= MAX_SEED:
            raise UserError(f"seed is {seed}; it must be in 0..{MAX_SEED}")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def batches_per_epoch(self) -> int:
        """Batches that visit every sample once; the last may be short."""
        return -(-self.num_samples // self.batch_size)

    def epoch(self, step: int) -> int:
        if step < 0:
            raise UserError(f"step is {step}; it must be at least 0")
        return step // self.batches_per_epoch

    def size(self, step: int) -> int:
        return len(self._span(step))

    def indices(self, step: int) -> NDArray[np.int64]:
        """The samples of batch `step`, in order; the array is read-only."""
        span = self._span(step)
        epoch = self.epoch(step)
        if epoch != self._epoch:
            self._order = permutation(self.num_samples, self.seed, epoch)
            self._order.flags.writeable = False
            self._epoch = epoch
        return self._order[span.start : span.stop]

    def share(self, step: int, worker_rank: int, num_workers: int) -> NDArray[np.int64]:
        """One worker's part of batch `step`; empty where there are too few samples to reach it."""
        part = split(self.size(step), worker_rank, num_workers)
        return self.indices(step)[part.start : part.stop]

    def _span(self, step: int) -> range:
        """Where batch `step` lies in the order of its epoch."""
        start = (step - self.epoch(step) * self.batches_per_epoch) * self.batch_size
        return range(start, min(start + self.batch_size, self.num_samples))
