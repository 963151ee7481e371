"""Which samples make batch k: the same for every strategy and every number of workers.

Epoch e visits each sample once, in an order drawn from (seed, e). The order is the stable argsort of one raw
64-bit Philox output per sample, seeded by `SeedSequence(seed, spawn_key=(e,))`: numpy promises the raw
streams of its bit generators to stay the same for ever, and does not promise that of `Generator.permutation`,
so a run resumed under a later numpy still sees the same batches.

    epoch 0                              epoch 1
    [ batch 0  | batch 1  | batch 2 ]    [ batch 3  | batch 4  | batch 5 ]     an epoch's last may be short
      w0 w1 w2                           split in order over the workers, sizes differ by at most one

What the shares of a batch weigh adds up to 1, and so does what the pieces of a share weigh in it: the sum of the
gradients of their mean losses, with these weights, is the gradient of the whole batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import UserError

if TYPE_CHECKING:
    from manyhands.data.batches import BatchSource

__all__ = [
    "MAX_SEED",
    "BatchPlan",
    "BatchShares",
    "IndexedShares",
    "Microbatch",
    "Share",
    "cut",
    "permutation",
    "share_of",
    "split",
]

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """Samples that are computed at once."""

    samples: int
    weight: float  # in the share
    fetch: Callable[[], Any]  # gives them collated
    sample_weights: NDArray[np.float64] | None = None
    """Of each sample in the piece, of which the sum is 1; None: all weigh the same."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """One worker's part of one global batch."""

    samples: int
    weight: float  # in the batch
    pieces: tuple[Microbatch, ...]  # none where there is nothing to compute


class BatchShares(ABC):
    """The shares of every global batch; `batch_samples` refers to the batch that was shared out last."""

    @property
    def gathers(self) -> bool:
        """Whether batches are gathered from arrays in memory: that draws nothing, and takes no time to speak of."""
        return False

    @abstractmethod
    def batch_samples(self, step: int) -> int:
        """The number of samples in global batch `step`."""

    @abstractmethod
    def share(self, step: int, part: int, parts: int) -> Share:
        """Part `part` of `parts` of global batch `step`."""

    def keep_from(self, step: int) -> None:  # noqa: B027 - what is looked up by number needs no memory
        """Remember what is drawn of `step` and later ones: they may be asked for in any order."""


class IndexedShares(BatchShares):
    """Shares of batches whose samples are looked up by number, each in at most `microbatches` pieces.

    With `weights`, one for each sample of the source, shares and pieces weigh what their samples do, and those that
    weigh nothing are not computed.
    """

    def __init__(
        self,
        source: BatchSource,
        plan: BatchPlan,
        microbatches: int = 1,
        weights: NDArray[np.float64] | None = None,
    ) -> None:
        self._source = source
        self._plan = plan
        self._microbatches = microbatches
        self._weights = weights

    @property
    def gathers(self) -> bool:
        """Whether the source gathers."""
        return self._source.gathers

    def batch_samples(self, step: int) -> int:
        """The size of global batch `step`, from the batch plan."""
        return self._plan.size(step)

    def share(self, step: int, part: int, parts: int) -> Share:
        """By number."""
        indices = self._plan.share(step, part, parts)
        if self._weights is None:
            return share_of(indices, self._plan.size(step), self._microbatches, self._source.fetch)
        whole = float(self._weights[self._plan.indices(step)].sum())
        if not whole > 0:
            raise UserError(
                f"weights: no sample of batch {step} weighs more than 0, so it has no mean; leave such samples "
                "out of data"
            )
        mine = self._weights[indices]
        total = float(mine.sum())
        pieces = []
        for piece in cut(len(indices), self._microbatches):
            weights = mine[piece.start : piece.stop]
            weight = float(weights.sum())
            if weight > 0:
                fetch = partial(self._source.fetch, indices[piece.start : piece.stop])
                pieces.append(
                    Microbatch(
                        samples=len(piece),
                        weight=weight / total,
                        fetch=fetch,
                        sample_weights=weights / weight,
                    )
                )
        return Share(samples=len(indices), weight=total / whole, pieces=tuple(pieces))


def share_of(mine: Any, count: int, microbatches: int, fetch: Callable[[Any], Any]) -> Share:
    """This worker's share of a batch of `count` samples; `fetch` makes a batch of some of them."""
    pieces = [
        Microbatch(
            samples=len(piece),
            weight=len(piece) / len(mine),
            fetch=partial(fetch, mine[piece.start : piece.stop]),
        )
        for piece in cut(len(mine), microbatches)
    ]
    return Share(samples=len(mine), weight=len(mine) / count, pieces=tuple(pieces))


def cut(count: int, most: int) -> list[range]:
    """`range(count)` in at most `most` pieces, none of them empty, whose sizes differ by at most one."""
    pieces = min(count, most)
    return [split(count, number, pieces) for number in range(pieces)]
