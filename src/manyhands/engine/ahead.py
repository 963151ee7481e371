"""Prefetching: loader processes read a worker's share of the next batches, so that the worker does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from manyhands.data.loading import Key, Upcoming
from manyhands.data.reading import BatchReading, ReadShare, ShareReader
from manyhands.data.shares import BatchShares, Share
from manyhands.places.local.loaders import Loaders
from manyhands.task import Task

__all__ = ["loaded_ahead"]


@contextmanager
def loaded_ahead(
    reading: BatchReading, task: Task, shares: BatchShares, *, steps: int, owner: str, device: torch.device
) -> Iterator[BatchShares]:
    """Yield `shares` of `reading` as the task's loader processes read them; the processes end on exit."""
    loading = task.loading
    prepare = _pinned if loading.pinned and device.type == "cuda" else None
    with Loaders[Key](partial(ShareReader, reading), loading, task.loaders, owner, prepare) as loaders:
        kind = _StreamAhead if reading.streams else _IndexedAhead
        yield kind(shares, loaders, Upcoming(steps))


class _Ahead(BatchShares):
    """Requests shares from a loader process and keeps the one that was requested last."""

    def __init__(self, shares: BatchShares, loaders: Loaders[Key], upcoming: Upcoming) -> None:
        self._shares = shares
        self._loaders = loaders
        self._upcoming = upcoming
        self._key: Key | None = None
        self._held: ReadShare | None = None

    def _read(self, key: Key) -> ReadShare:
        if self._held is None or key != self._key:
            self._held = None  # capacity for the next
            upcoming = self._upcoming.after(key, self._loaders.window)
            self._held, self._key = self._loaders.get(key, upcoming, kept_from=key[0]), key
        return self._held

    def _batch(self, key: Key, number: int) -> Any:
        return self._read(key).batches[number]


class _IndexedAhead(_Ahead):
    """Prefetch of indexed samples: share sizes are known here, and only what is fetched is loaded."""

    def batch_samples(self, step: int) -> int:
        """The size of global batch `step`, from the batch plan."""
        return self._shares.batch_samples(step)

    def share(self, step: int, part: int, parts: int) -> Share:
        """The same share, with samples that come from a loader process."""
        share = self._shares.share(step, part, parts)
        pieces = tuple(
            replace(piece, fetch=partial(self._batch, (step, part, parts), number))
            for number, piece in enumerate(share.pieces)
        )
        return replace(share, pieces=pieces)


class _StreamAhead(_Ahead):
    """Prefetch of a stream: only the loader process draws from it."""

    def batch_samples(self, step: int) -> int:
        """The size of the current batch, as the loader process reports it."""
        held = self._held
        assert held is not None, "the share of a batch comes first"
        assert self._key is not None and self._key[0] == step, "the last batch is the one at hand"  # noqa: PT018
        return held.batch_samples

    def share(self, step: int, part: int, parts: int) -> Share:
        """The share that the loader process drew from the stream."""
        key = step, part, parts
        share = self._read(key).share
        pieces = tuple(
            replace(piece, fetch=partial(self._batch, key, number))
            for number, piece in enumerate(share.pieces)
        )
        return replace(share, pieces=pieces)


def _pinned(found: ReadShare) -> ReadShare:
    """The same share with its batches in pinned memory."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return replace(found, batches=pin_memory(found.batches))  # type: ignore[no-untyped-call]
