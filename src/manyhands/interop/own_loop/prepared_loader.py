"""Loaders of a group: batch k of the user's loader is the global batch, and each worker reads its share of it.

    user's loader   [ batch 0 | batch 1 | ... ]     the same batches on every worker, in worker 0's order
    worker r reads    its part of each, through the user's own dataset, collate_fn and worker processes

A worker whose part is empty gets a sample or two of the batch all the same, so that user code never meets an empty
batch; they weigh nothing. Data that can only be iterated is split, too, but read whole by every worker: see `streams`.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from manyhands.data.batch_plan import split
from manyhands.errors import UserError
from manyhands.interop.own_loop.readings import END, FILLERS, LoaderPart, Move, Reader, remade
from manyhands.interop.own_loop.streams import OwnStreamLoader, SharedStreamLoader

__all__ = ["SplitLoader", "prepare_loader"]


def prepare_loader(
    loader: Iterable[Any], reader: Reader, move: Move, *, to_split: bool = True
) -> SplitLoader | SharedStreamLoader | OwnStreamLoader:
    """The user's loader, as a worker of a group reads it; every batch goes through `move`.

    Without `to_split` it is a stream of this worker's own, whatever it is.
    """
    if not to_split:
        return OwnStreamLoader(loader, reader, move)
    if not isinstance(loader, DataLoader):
        return SharedStreamLoader(loader, reader, move)
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise UserError(
                "the loader has a DistributedSampler, which would split the data a second time; leave it out: "
                "prepare splits every batch of the loader over the workers (shuffle=True gives a random order); or "
                "keep it, with prepare(loader, split=False)"
            )
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return SharedStreamLoader(loader, reader, move)
    return SplitLoader(loader, reader, move)


class SplitLoader:
    """Reads this worker's share of every batch of `loader`, and is as long as that; iterating is collective."""

    def __init__(self, loader: DataLoader[Any], reader: Reader, move: Move) -> None:
        self._loader = loader
        self._move = move
        self._readings = reader.readings
        self._shares = _Shares(loader, reader)
        self.is_stopped = False
        self._inner = remade(loader, batch_sampler=self._shares)

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
            yield batch[span.start : span.stop] if span else batch[:FILLERS]
            batch = next(batches, None)
