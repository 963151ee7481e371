"""Loaders of a group: batch k of the user's loader is the global batch, and each worker reads its share of it.

    user's loader   [ batch 0 | batch 1 | ... ]     the same batches on every worker, in worker 0's order
    worker r reads    its part of each, through the user's own dataset, collate_fn and worker processes

A worker whose part is empty gets a sample or two of the batch all the same, so that user code never meets an empty
batch; they weigh nothing. What cannot be split (iterable datasets, `batch_size=None`, any other iterable) is a stream
of each worker's own: every batch weighs 1/world, and all leave the loop when the shortest stream ends.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from manyhands.data.plan import split
from manyhands.errors import UserError

__all__ = [
    "END",
    "Loader",
    "LoaderPart",
    "LoaderReading",
    "Reader",
    "Readings",
    "SplitLoader",
    "StreamLoader",
    "prepare_loader",
]

_FILLERS = 2  # samples for a worker without a share: batch norm needs two
END = object()
"""What comes after the last batch."""


Move = Callable[[Any], Any]
"""Takes a batch to where the worker computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPart:
    """What one worker has of a global batch."""

    share: float
    """Of the whole batch."""

    samples: int = 0
    mark: int = 0
    """A checksum of the whole batch: the same on all workers, or they do not read the same."""

    last: bool = False
    """This worker's stream has no other batch after this one."""


class Loader(Protocol):
    """What can be stopped for good."""

    is_stopped: bool
    """It gives no batch any more: a worker asked to stop while it was being read."""


@dataclass(slots=True)
class LoaderReading:
    """One loader being read, from its first batch to its last."""

    loader: Loader
    part: LoaderPart
    is_over: bool = False
    """The loop over the loader ends after the batch at hand."""


class Readings:
    """The loaders that a worker reads at the moment, an inner loop's last; `weigh` is told each batch's share."""

    def __init__(self, world: int, weigh: Callable[[float], None]) -> None:
        self._whole = LoaderPart(share=1 / world)
        self._weigh = weigh
        self._open: list[LoaderReading] = []
        self._input_ns = 0

    def read(self, batches: Iterator[Any]) -> Any:
        """The next of `batches`, or END; the time counts as input."""
        begin = time.monotonic_ns()
        batch = next(batches, END)
        self._input_ns += time.monotonic_ns() - begin
        return batch

    def take_input_ns(self) -> int:
        """What reading took since the last call."""
        spent, self._input_ns = self._input_ns, 0
        return spent

    @property
    def part(self) -> LoaderPart:
        """What is being worked on: of an even split where no loader is being read."""
        return self._open[-1].part if self._open else self._whole

    @contextmanager
    def open(self, loader: Loader) -> Iterator[LoaderReading]:
        """While a loader is being read."""
        reading = LoaderReading(loader, self.part)
        self._open.append(reading)
        try:
            yield reading
        finally:
            self._open.remove(reading)
            self._weigh(self.part.share)

    def begin(self, reading: LoaderReading, part: LoaderPart) -> None:
        """The next batch of a loader is handed out."""
        reading.part = part
        self._weigh(self.part.share)

    def end_stream(self) -> None:
        """Another worker's stream has no batch after this one."""
        for reading in self._open[-1:]:
            reading.is_over = True

    def stop(self) -> None:
        """All loaders being read end here, for good."""
        for reading in self._open:
            reading.is_over = reading.loader.is_stopped = True


class Reader(Protocol):
    """The group, as a loader sees it."""

    rank: int
    world: int
    readings: Readings

    def in_worker_0s_order(self, draw: Callable[[], Any], generators: Sequence[torch.Generator]) -> Any:
        """Collective: call `draw` as if torch's random numbers, and these generators, were worker 0's."""

    def all_have_a_batch(self, mine: bool) -> bool:
        """Collective: whether every worker's stream has one."""


def prepare_loader(loader: Iterable[Any], reader: Reader, move: Move) -> SplitLoader | StreamLoader:
    """The user's loader, as a worker of a group reads it; every batch goes through `move`."""
    if not isinstance(loader, DataLoader):
        return StreamLoader(loader, reader, move)
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise UserError(
                "the loader has a DistributedSampler, which would split the data a second time; leave it out: "
                "prepare splits every batch of the loader over the workers (shuffle=True gives a random order)"
            )
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return StreamLoader(loader, reader, move)
    return SplitLoader(loader, reader, move)


class SplitLoader:
    """Reads this worker's share of every batch of `loader`, and is as long as that; iterating is collective."""

    def __init__(self, loader: DataLoader[Any], reader: Reader, move: Move) -> None:
        self._loader = loader
        self._move = move
        self._readings = reader.readings
        self._shares = _Shares(loader, reader)
        self.is_stopped = False
        workers = loader.num_workers
        self._inner: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self._shares,
            num_workers=workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context if workers else None,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self.is_stopped:
            return
        with self._readings.open(self) as reading:
            batches = iter(self._inner)
            parts = self._shares.parts
            while (batch := self._readings.read(batches)) is not END:
                self._readings.begin(reading, parts.popleft())
                yield self._move(batch)
                if reading.is_over:
                    return

    def __getattr__(self, name: str) -> Any:
        """`dataset`, `batch_size` and the like are the user's loader's."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class StreamLoader:
    """Reads all of this worker's own stream, one batch ahead, until the shortest of the workers' streams ends.

    Where a loop over it has no backward, workers do not meet, and each reads to its own end.
    """

    def __init__(self, loader: Iterable[Any], reader: Reader, move: Move) -> None:
        self._loader = loader
        self._move = move
        self._reader = reader
        self.is_stopped = False

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self.is_stopped:
            return
        readings = self._reader.readings
        with readings.open(self) as reading:
            batches = iter(self._loader)
            upcoming = readings.read(batches)
            if not self._reader.all_have_a_batch(upcoming is not END):
                return
            while upcoming is not END and not reading.is_over:
                batch, upcoming = upcoming, readings.read(batches)
                readings.begin(reading, LoaderPart(share=1 / self._reader.world, last=upcoming is END))
                yield self._move(batch)

    def __getattr__(self, name: str) -> Any:
        """`dataset` and the like are the user's loader's."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class _Shares:
    """A batch sampler: this worker's part of each batch of the user's, in worker 0's order.

    `parts` are those of the latest iteration that were drawn and not yet handed out: worker processes of the loader
    draw ahead.
    """

    def __init__(self, loader: DataLoader[Any], reader: Reader) -> None:
        self._batches: Any = loader.batch_sampler
        self._reader = reader
        holders = (loader, self._batches, getattr(self._batches, "sampler", None))
        found = (getattr(holder, "generator", None) for holder in holders)
        self._generators = list(dict.fromkeys(one for one in found if isinstance(one, torch.Generator)))
        self.parts: deque[LoaderPart] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        self.parts = deque()
        return self._split(self.parts)

    def _split(self, parts: deque[LoaderPart]) -> Iterator[list[Any]]:
        batches = iter(self._batches)
        # Samplers draw their order when the first batch is asked for.
        batch = self._reader.in_worker_0s_order(lambda: next(batches, None), self._generators)
        while batch is not None:
            span = split(len(batch), self._reader.rank, self._reader.world)
            mark = zlib.crc32(repr(list(batch)).encode()) or 1
            parts.append(LoaderPart(share=len(span) / len(batch), samples=len(span), mark=mark))
            yield batch[span.start : span.stop] if span else batch[:_FILLERS]
            batch = next(batches, None)
