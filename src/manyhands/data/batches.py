"""Which samples make batch k, the same for every strategy and number of workers; and the batch that they make.

Epoch e visits each sample once, in the order of the stable argsort of one raw 64-bit Philox output per sample, seeded
by (seed, e). Numpy promises the raw streams of its bit generators to stay the same for ever, which it does not of
`Generator.permutation`: a run resumed under a later numpy still sees the same batches.

    epoch 0                              epoch 1
    [ batch 0  | batch 1  | batch 2 ]    [ batch 3  | batch 4  | batch 5 ]     an epoch's last may be short
      w0 w1 w2                           split in order over the workers, sizes differ by at most one

The weights of a batch's shares add up to 1, and so do those of the pieces of a share: the sum of the gradients of their
mean losses, with these weights, is the gradient of the whole batch.

Data comes as a map-style dataset or as arrays: one array, a tuple or list of arrays (columns, as TensorDataset has
them), or a dict of arrays by name. `BatchSource.fetch(indices)` equals what `DataLoader(data, batch_sampler=[indices])`
yields, dtype and strides included; of arrays, a batch is gathered at once instead of sample by sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from manyhands.errors import UserError

Indices: TypeAlias = NDArray[np.int64]
Gather: TypeAlias = Callable[[Indices, int], Any]
"""(samples, epoch) -> their batch."""
_ALLOWED = (
    "a map-style dataset (with __len__ and __getitem__), a tensor or array, or a tuple, list or dict of them"
)


class BatchedDataset(ABC):
    """Map-style data that make a batch at once, and may make it anew in each epoch: a pure function of both."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: Indices, epoch: int) -> Tensor | dict[str, Tensor]:
        """The batch of these samples, as `epoch` sees them."""

    def __getitem__(self, index: int) -> Tensor | dict[str, Tensor]:
        """One sample, as the first epoch sees it."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        found = self.batch(np.array([index % len(self)]), 0)
        return {name: one[0] for name, one in found.items()} if isinstance(found, dict) else found[0]


class BatchSource:
    """Assembles batches of `data`, called `field` in errors; UserError where it cannot be indexed or columns differ."""

    def __init__(
        self, data: Any, collate: Callable[[list[Any]], Any] | None = None, *, field: str = "data"
    ) -> None:
        self._samples = samples = as_dataset(data, field)
        try:
            self._length = len(samples)
        except (
            TypeError,
            NotImplementedError,
        ) as error:  # a tensor without dimensions, an unfinished dataset
            raise UserError(
                f"{field} is {_kind(samples)} without a length ({error}); give {_ALLOWED}"
            ) from error
        if self._length == 0:
            raise UserError(f"{field} is empty; give at least one sample")
        if collate is not None and isinstance(samples, BatchedDataset):
            raise UserError(
                f"collate is not called for {field}, a {type(samples).__name__}: it makes its batches; leave it out"
            )
        self._collate = default_collate if collate is None else collate
        self._gather = _gatherer(samples) if collate is None else None
        # Whether the data are arrays, of which a batch is gathered at once and nothing is drawn by chance
        self.gathers = self._gather is not None

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Sequence[int] | Indices, epoch: int = 0) -> Any:
        """The collated batch of these samples, at least one: a worker with an empty share has no batch."""
        if len(indices) == 0:
            raise ValueError("fetch needs at least one index; a worker with an empty share takes no batch")
        if self._gather is not None:
            return self._gather(np.asarray(indices, dtype=np.int64), epoch)
        wanted = [int(index) for index in indices]
        if getattr(self._samples, "__getitems__", None):
            return self._collate(self._samples.__getitems__(wanted))
        samples = []
        for index in wanted:
            try:
                samples.append(self._samples[index])
            except Exception as error:
                error.add_note(f"raised for sample {index} of data")
                raise
        return self._collate(samples)


def as_dataset(data: Any, field: str) -> Any:
    """`data` as something with `__len__` and `__getitem__`, or a UserError that says what to give instead."""
    if isinstance(data, DataLoader):
        raise UserError(
            f"{field} is a DataLoader; give {field}=loader.dataset, with batch_size= and collate="
        )
    if isinstance(data, str | bytes):
        raise UserError(f"{field} is {data[:40]!r}; read the file first and give {_ALLOWED}")
    if isinstance(data, IterableDataset | Iterator):
        raise UserError(
            f"{field} is {_kind(data)}, which can only be iterated, so samples of batch k cannot be "
            f"looked up; give {_ALLOWED}: if the samples fit in memory, use list(...); training data may also be an "
            "IterableDataset"
        )
    if isinstance(data, tuple | list) and any(isinstance(one, Tensor | np.ndarray) for one in data):
        _check_columns({f"{field}[{position}]": column for position, column in enumerate(data)})
        return StackDataset(*data)
    if isinstance(data, dict) and data and all(isinstance(key, str) for key in data):
        _check_columns({f"{field}[{key!r}]": column for key, column in data.items()})
        return StackDataset(**data)
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        missing = " and ".join(name for name in ("__len__", "__getitem__") if not hasattr(data, name))
        raise UserError(f"{field} is {_kind(data)}, which has no {missing}; give {_ALLOWED}")
    return data


def _check_columns(columns: Mapping[str, Any]) -> None:
    for name, column in columns.items():
        if not isinstance(column, Tensor | np.ndarray):
            raise UserError(f"{name} is {_kind(column)}; beside tensors it must be a tensor or a numpy array")
        if column.ndim == 0:
            raise UserError(f"{name} is a single number; it must have one entry per sample")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UserError(f"tensors of different lengths: {listed}; each must have one entry per sample")


def _gatherer(samples: Any) -> Gather | None:
    """Whole-batch indexing for samples held as arrays; None where they must be asked for one by one.

    Exact types only: a subclass may have its own `__getitem__`. A batch is laid out as a stack of single rows:
    contiguous, whatever the source's strides.
    """
    if isinstance(samples, BatchedDataset):
        return samples.batch
    if isinstance(samples, Tensor):
        if type(samples) is not Tensor or samples.layout != torch.strided or samples.is_nested:
            return None
        return lambda indices, _: samples.index_select(
            0, torch.from_numpy(np.where(indices < 0, indices + len(samples), indices)).to(samples.device)
        )
    if isinstance(samples, np.ndarray):
        if samples.dtype.kind not in "biufc" or not samples.dtype.isnative:
            return None
        # Not `np.take`, which copies all of a view, such as windows over a text, before it takes a few rows of it.
        return lambda indices, _: torch.from_numpy(np.ascontiguousarray(samples[indices]))
    if type(samples) is TensorDataset:
        return _column_gatherer(samples.tensors)
    if type(samples) is StackDataset:
        columns = samples.datasets
        if isinstance(columns, tuple):
            return _column_gatherer(columns)
        gather_values = _column_gatherer(tuple(columns.values()))
        if gather_values is None:
            return None
        return lambda indices, epoch: dict(zip(columns, gather_values(indices, epoch), strict=True))
    if type(samples) is Subset:
        gather = _gatherer(samples.dataset)
        if gather is None:
            return None
        positions = np.fromiter(map(int, samples.indices), np.int64)
        return lambda indices, epoch: gather(positions[indices], epoch)
    return None


def _column_gatherer(columns: Sequence[Any]) -> Gather | None:
    gathers = [gather for gather in map(_gatherer, columns) if gather is not None]
    if len(gathers) < len(columns):
        return None
    return lambda indices, epoch: [gather(indices, epoch) for gather in gathers]


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


_WEIGHTED = 1  # draws by weight are apart from the orders of epochs
MAX_SEED = 2**64 - 1  # what torch.manual_seed takes, so that one seed serves both


def permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which `epoch` visits the samples: a pure, version-stable function of its arguments."""
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.argsort(bits.random_raw(num_samples), kind="stable").astype(np.int64, copy=False)


def weighted_draw(
    weights: NDArray[np.float64], count: int, seed: int, epoch: int, *, replacement: bool
) -> NDArray[np.int64]:
    """`count` samples in proportion to their weights, as `torch.utils.data.WeightedRandomSampler` draws them.

    A pure function of its arguments. Without replacement, by the least of exponential times with the weights as rates.
    """
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch, _WEIGHTED)))
    drawn = ((bits.random_raw(count if replacement else len(weights)) >> np.uint64(11)) + 0.5) * 2.0**-53
    if replacement:
        ends = np.cumsum(weights)
        found = np.searchsorted(ends, drawn * ends[-1], side="right")
        last = int(np.flatnonzero(weights)[-1])  # where rounding leads beyond it
        return np.asarray(np.minimum(found, last), dtype=np.int64)
    with np.errstate(divide="ignore"):
        times = -np.log(drawn) / weights  # a weight of 0 never comes
    return np.argsort(times, kind="stable")[:count].astype(np.int64, copy=False)


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
    """Global batches numbered by step, for ever; only the order of the epoch asked for last is kept.

    `order` gives the samples of an epoch, `num_samples` of them; by default all, shuffled.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        order: Callable[[int], NDArray[np.int64]] | None = None,
    ) -> None:
        for field, value in (("num_samples", num_samples), ("batch_size", batch_size)):
            if value < 1:
                raise UserError(f"{field} is {value}; it must be at least 1")
        if not 0 <= seed <= MAX_SEED:
            raise UserError(f"seed is {seed}; it must be in 0..{MAX_SEED}")
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self._order_of = order or partial(permutation, num_samples, seed)
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def batches_per_epoch(self) -> int:
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
            self._order = self._order_of(epoch)
            self._order.flags.writeable = False
            self._epoch = epoch
        return self._order[span.start : span.stop]

    def share(self, step: int, worker_rank: int, num_workers: int) -> NDArray[np.int64]:
        """One worker's part of batch `step`; empty where there are too few samples to reach it."""
        part = split(self.size(step), worker_rank, num_workers)
        return self.indices(step)[part.start : part.stop]

    def _span(self, step: int) -> range:
        start = (step - self.epoch(step) * self.batches_per_epoch) * self.batch_size
        return range(start, min(start + self.batch_size, self.num_samples))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """Samples that are computed at once."""

    samples: int
    weight: float  # in the share
    fetch: Callable[[], Any]  # gives them collated
    # Of each sample in the piece, of which the sum is 1; None: all weigh the same
    sample_weights: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """One worker's part of one global batch."""

    samples: int
    batch_samples: int  # of the whole batch
    weight: float  # in the batch
    pieces: tuple[Microbatch, ...]  # none where there is nothing to compute


class BatchShares(ABC):
    """The shares of every global batch."""

    @abstractmethod
    def share(self, step: int, part: int, parts: int) -> Share:
        """Part `part` of `parts` of global batch `step`."""

    def keep_from(self, step: int) -> None:  # noqa: B027 - what is looked up by number needs no memory
        """Remember what is drawn of `step` and later ones: they may be asked for in any order."""


class IndexedShares(BatchShares):
    """Shares of samples that are looked up, in at most `microbatches` pieces; those that weigh nothing are left out."""

    def __init__(
        self,
        source: BatchSource,
        plan: BatchPlan,
        microbatches: int = 1,
        weights: NDArray[np.float64] | None = None,
    ) -> None:
        self._source, self._plan = source, plan
        self._microbatches, self._weights = microbatches, weights

    def share(self, step: int, part: int, parts: int) -> Share:
        indices, count = self._plan.share(step, part, parts), self._plan.size(step)
        fetch_now = partial(self._source.fetch, epoch=self._plan.epoch(step))
        if self._weights is None:
            return share_of(indices, count, self._microbatches, fetch_now)
        whole = float(self._weights[self._plan.indices(step)].sum())
        if not whole > 0:
            raise UserError(
                f"weights: all samples of batch {step} have weight 0; leave such samples out of data"
            )
        mine = self._weights[indices]
        total = float(mine.sum())
        pieces = []
        for piece in cut(len(indices), self._microbatches):
            weights = mine[piece.start : piece.stop]
            weight = float(weights.sum())
            if weight > 0:
                fetch = partial(fetch_now, indices[piece.start : piece.stop])
                own = weights / weight
                pieces.append(
                    Microbatch(samples=len(piece), weight=weight / total, fetch=fetch, sample_weights=own)
                )
        return Share(samples=len(indices), batch_samples=count, weight=total / whole, pieces=tuple(pieces))


def share_of(mine: Any, count: int, microbatches: int, fetch: Callable[[Any], Any]) -> Share:
    """This worker's share of a batch of `count` samples; `fetch` makes a batch of some of them."""
    samples = len(mine)
    taken = [mine[span.start : span.stop] for span in cut(samples, microbatches)]
    pieces = tuple(
        Microbatch(samples=len(one), weight=len(one) / samples, fetch=partial(fetch, one)) for one in taken
    )
    return Share(samples=samples, batch_samples=count, weight=samples / count, pieces=pieces)


def cut(count: int, most: int) -> list[range]:
    """`range(count)` in at most `most` pieces, none of them empty, whose sizes differ by at most one."""
    pieces = min(count, most)
    return [split(count, number, pieces) for number in range(pieces)]
