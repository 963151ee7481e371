"""Loaders of a group: batch k of the user's loader is the global batch, and each worker reads its share of it.

    user's loader   [ batch 0 | batch 1 | ... ]     the same batches on every worker, in worker 0's order
    worker r reads    its part of each, through the user's own dataset, collate_fn and worker processes

A worker whose part is empty gets a sample or two of the batch all the same, so that user code never meets an empty
batch; they weigh nothing. Data that can only be iterated is one stream for all workers, or a stream of each one's own:

    shared   every worker reads the same batches, and keeps its part of each: batch k stays the global batch
    own      every worker reads what it alone has: each batch weighs 1/world, and all end with the shortest stream

What is shared must come in the same order everywhere. So random numbers that a dataset draws are worker 0's, on all
workers, and batches are compared by their marks.
"""

from __future__ import annotations

import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from manyhands.data.batches import split
from manyhands.engine.exchange import BatchPiece
from manyhands.errors import UserError
from manyhands.interop.own_loop.backward_rounds import Rounds
from manyhands.interop.own_loop.readings import END, FILLERS, Draws, LoaderPart, Move, Turn, remade

_MARKED: Final = 4096  # bytes of a tensor that go into the mark of a batch, at each of its ends


class BatchShare(NamedTuple):
    """What one worker has of a batch; a tuple, so that a DataLoader pins the memory of what is inside."""

    batch: Any
    part: LoaderPart


class SharedCollate:
    """The user's `collate_fn`, given this worker's samples of every batch; runs where that runs."""

    def __init__(self, collate: Any, rank: int, world: int) -> None:
        self._collate, self._rank, self._world = collate, rank, world

    def __call__(self, samples: list[Any]) -> BatchShare:
        span = split(len(samples), self._rank, self._world)
        mine = samples[span.start : span.stop] if span else samples[:FILLERS]
        mark = mark_of((len(samples), samples[0], samples[-1]))
        part = LoaderPart(share=len(span) / len(samples), samples=len(span), mark=mark)
        return BatchShare(self._collate(mine), part)


class _GroupLoader:
    """The user's loader, as a worker of a group reads it: as long as that, and with its `dataset`, `batch_size`, …"""

    def __init__(self, loader: Iterable[Any], reader: Rounds, move: Move) -> None:
        self._loader, self._reader, self._move = loader, reader, move
        self.is_stopped = False  # it gives no batch any more: a worker asked to stop while it was being read

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def _begin(self) -> bool:
        """Whether there is anything to read; counts, so that a worker that has stopped is in the loop of the others."""
        self._reader.count_reading()
        return not self.is_stopped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class SharedStreamLoader(_GroupLoader):
    """Reads the stream that all workers read, and gives this worker's part of every batch; iterating is collective.

    Where samples are collated by a DataLoader, each worker collates its own. A batch that comes whole is cut along the
    first dimension of its tensors; one that cannot be cut is given to everyone, with a warning: the result is that of
    the plain loop, computed `world` times.
    """

    def __init__(self, loader: Iterable[Any], reader: Rounds, move: Move) -> None:
        super().__init__(loader, reader, move)
        self._collates, self._draws_here, self._inner = False, True, loader
        self._has_warned = reader.world == 1 or reader.rank != 0
        if isinstance(loader, DataLoader):
            self._draws_here = loader.num_workers == 0
            if (
                isinstance(loader.dataset, IterableDataset)
                and loader.batch_size is not None
                and reader.synchronous
            ):
                self._collates, size = True, loader.batch_size
                collate = SharedCollate(loader.collate_fn, reader.part.index, reader.part.count)
                self._inner = remade(loader, batch_size=size, drop_last=loader.drop_last, collate_fn=collate)

    def __iter__(self) -> Iterator[Any]:
        if not self._begin():
            return
        reader, readings = self._reader, self._reader.readings
        draws = reader.worker_0s_draws() if reader.world > 1 else None
        with readings.open(self) as reading:
            try:
                with draws.lent() if draws is not None else nullcontext():
                    batches = iter(self._inner)
                turn_of = reader.sharing()
                found = self._read(batches, draws, turn_of)
                if draws is not None:
                    draws.leave_out_unused()
                reader.require_one_batch(0 if found is None else found.part.mark)
                while found is not None:
                    readings.begin(reading, found.part)
                    yield self._move(found.batch)
                    if reading.is_over:
                        return
                    found = self._read(batches, draws, turn_of)
            finally:
                if draws is not None and reader.rank == 0:
                    draws.keep()  # the next reading continues where this one ended

    def _read(
        self, batches: Iterator[Any], draws: Draws | None, turn_of: Callable[[int], Turn | None]
    ) -> BatchShare | None:
        turn: Turn | None = None
        batch: Any = None
        while turn is None:
            with draws.lent() if draws is not None and self._draws_here else nullcontext():
                batch = self._reader.readings.read(batches)
            if batch is END:
                return None
            turn = turn_of(1 if self._collates else rows_of(batch))
        if self._collates:
            return BatchShare(batch.batch, replace(batch.part, index=turn.batch))
        mark, rows = mark_of(batch), rows_of(batch)
        if not rows:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"batches of this loader ({type(batch).__name__}) have no common first dimension to split, so "
                    "every worker computes every batch completely; give each worker every n-th batch: "
                    "stream = itertools.islice(stream, group.rank, None, group.world); "
                    "loader = group.prepare(stream, split=False)",
                    stacklevel=3,
                )
            share = 1 / self._reader.part.count if self._reader.synchronous else 1.0
            return BatchShare(batch, LoaderPart(share=share, mark=mark, index=turn.batch))
        span = turn.span
        part = LoaderPart(share=len(span) / rows, samples=len(span), mark=mark, index=turn.batch)
        return BatchShare(narrowed(batch, span if span else range(min(rows, FILLERS))), part)


class OwnStreamLoader(_GroupLoader):
    """Reads all of this worker's own stream, one batch ahead, until the shortest of the workers' streams ends.

    Where a loop over it has no backward, workers do not meet, and each reads to its own end.
    """

    def __iter__(self) -> Iterator[Any]:
        if not self._begin():
            return
        readings = self._reader.readings
        with readings.open(self) as reading:
            batches = iter(self._loader)
            upcoming = readings.read(batches)
            if not self._reader.all_have_a_batch(upcoming is not END):
                return
            while upcoming is not END and not reading.is_over:
                batch, upcoming = upcoming, readings.read(batches)
                share = 1 / self._reader.world if self._reader.synchronous else 1.0
                readings.begin(reading, LoaderPart(share=share, last=upcoming is END))
                yield self._move(batch)


def rows_of(batch: Any) -> int:
    """The common length of all tensors and arrays of a batch; 0 where there is none, or something else is inside."""
    sizes = set(_sizes(batch))
    return sizes.pop() if len(sizes) == 1 else 0


def _sizes(batch: Any) -> list[int]:
    if _is_dense(batch):
        return [int(batch.shape[0]) if batch.ndim else 0]
    values = batch.values() if isinstance(batch, Mapping) else batch
    return (
        [n for value in values for n in _sizes(value)] if isinstance(batch, Mapping | list | tuple) else [0]
    )


def _is_dense(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided
    return isinstance(value, np.ndarray)


def narrowed(batch: Any, span: range) -> Any:
    if _is_dense(batch):
        return batch[span.start : span.stop]
    if isinstance(batch, Mapping):
        return {key: narrowed(value, span) for key, value in batch.items()}
    values = [narrowed(value, span) for value in batch]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def pieces_of(batch: Any, count: int) -> list[BatchPiece]:
    """A batch in so many pieces, or in one for each of its rows, or in one where it has no common rows."""
    rows = rows_of(batch)
    spans = [span for number in range(count) if (span := split(rows, number, count))]
    found = [BatchPiece(batch=narrowed(batch, span), weight=len(span) / rows) for span in spans]
    return found or [BatchPiece(batch=batch)]


def mark_of(batch: Any) -> int:
    """A checksum of (the ends of) what a batch holds, never 0; alike on all workers, or they do not read the same."""
    return _crc(batch, 0) or 1


def _crc(value: Any, so_far: int) -> int:
    if isinstance(value, torch.Tensor) and _is_dense(value):
        flat = value.detach().cpu().contiguous().view(-1)
        flat = flat.view(torch.uint8) if value.numel() else flat
        ends = (flat[:_MARKED].numpy().tobytes(), flat[-_MARKED:].numpy().tobytes())
        return zlib.crc32(repr((value.dtype, tuple(value.shape), *ends)).encode(), so_far)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:  # its bytes are addresses, which are each worker's own
            return _crc(value.tolist(), so_far)
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        ends = (raw[:_MARKED].tobytes(), raw[-_MARKED:].tobytes())
        return zlib.crc32(repr((value.dtype, value.shape, *ends)).encode(), so_far)
    if isinstance(value, Mapping):
        return _crc(list(value.items()), so_far)
    if isinstance(value, list | tuple):
        for one in value:
            so_far = _crc(one, so_far)
        return so_far
    text = value if isinstance(value, str | bytes | int | float | bool | None) else type(value).__name__
    return zlib.crc32(repr(text).encode(), so_far)


def prepare_loader(
    loader: Iterable[Any], reader: Rounds, move: Move, *, to_split: bool = True
) -> SplitLoader | SharedStreamLoader | OwnStreamLoader:
    """The user's loader as a worker reads it, batches through `move`; without `to_split`, its own stream."""
    if not to_split:
        reader.require_own_streams()
        return OwnStreamLoader(loader, reader, move)
    if not isinstance(loader, DataLoader):
        return SharedStreamLoader(loader, reader, move)
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise UserError(
                "the loader has a DistributedSampler, which would split the data twice; leave it out "
                "(prepare splits every batch over the workers; shuffle=True gives a random order), or keep it with "
                "prepare(loader, split=False)"
            )
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return SharedStreamLoader(loader, reader, move)
    return SplitLoader(loader, reader, move)


class SplitLoader(_GroupLoader):
    """Reads this worker's share of every batch of `loader`; iterating is collective."""

    def __init__(self, loader: DataLoader[Any], reader: Rounds, move: Move) -> None:
        super().__init__(loader, reader, move)
        self._readings = reader.readings
        self._shares = _Shares(loader, reader)
        # Where a batch is given out when it is asked for, none can be read ahead.
        ahead = (
            {}
            if reader.synchronous
            else {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
        )
        self._inner = remade(loader, batch_sampler=self._shares, **ahead)

    def __iter__(self) -> Iterator[Any]:
        if not self._begin():
            return
        with self._readings.open(self) as reading:
            batches = iter(self._inner)
            parts = self._shares.parts
            while (batch := self._readings.read(batches)) is not END:
                self._readings.begin(reading, parts.popleft())
                yield self._move(batch)
                if reading.is_over:
                    return


class _Shares:
    """A batch sampler: this worker's part of each batch of the user's, in worker 0's order.

    `parts` are those of the latest iteration that were drawn and not yet handed out: worker processes of the loader
    draw ahead.
    """

    def __init__(self, loader: DataLoader[Any], reader: Rounds) -> None:
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
        turn_of = self._reader.sharing()
        while batch is not None:
            turn = turn_of(len(batch))
            if turn is not None:
                span, share = turn.span, len(turn.span) / len(batch)
                mark = zlib.crc32(repr(list(batch)).encode()) or 1
                parts.append(LoaderPart(share=share, samples=len(span), mark=mark, index=turn.batch))
                yield batch[span.start : span.stop] if span else batch[:FILLERS]
            batch = next(batches, None)
