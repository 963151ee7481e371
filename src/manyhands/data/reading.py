"""What a worker reads of a task's data, in a form that also runs in a loader process.

What is drawn by chance while a batch is made (an augmentation in `__getitem__`, say) follows from (seed, step, part,
piece), whatever the model draws between. So a loader process draws what the worker itself would have drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from manyhands.data.batches import BatchPlan, BatchShares, BatchSource, IndexedShares, Share
from manyhands.data.loading import Key
from manyhands.data.own import own_data
from manyhands.data.randomness import drawn_apart, mix, seed_all, seed_host
from manyhands.data.shares import OwnShares, StreamShares, sample_weights

__all__ = ["BatchReading", "ReadShare", "ShareReader"]

# What a stream draws is not what its model draws, nor what is drawn while a batch is made.
_READING, _MAKING = 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReading:
    """The data of a task, and how its batches are made of them."""

    data: Any
    streams: bool  # whether the data can only be iterated
    collate: Callable[[list[Any]], Any] | None
    batch_size: int
    microbatches: int
    weights: Any | None
    seed: int

    def shares(self) -> BatchShares:
        """The shares of every global batch."""
        shares = self._shares()
        return shares if shares.gathers else _DrawnApart(shares, self.seed)

    def _shares(self) -> BatchShares:
        seed, own = self.seed, own_data(self.data)
        if own is not None:
            return OwnShares(
                own,
                self.collate,
                self.batch_size,
                self.microbatches,
                seeded=lambda step, part: seed_all(mix(seed, step, part, _READING)),
            )
        if self.streams:
            return StreamShares(
                self.data,
                self.collate,
                self.batch_size,
                self.microbatches,
                seeded=lambda step: seed_all(mix(seed, step)),
            )
        source = BatchSource(self.data, self.collate)
        weights = sample_weights(self.weights, len(source)) if self.weights is not None else None
        return IndexedShares(
            source, BatchPlan(len(source), self.batch_size, seed), self.microbatches, weights
        )


class _DrawnApart(BatchShares):
    """Shares whose pieces are made with separate random numbers.

    Who fetches the first piece sets the generators afterwards; a later one leaves them as they were, which takes longer
    than to set them.
    """

    def __init__(self, shares: BatchShares, seed: int) -> None:
        self._shares, self._seed = shares, seed

    def batch_samples(self, step: int) -> int:
        return self._shares.batch_samples(step)

    def keep_from(self, step: int) -> None:
        self._shares.keep_from(step)

    def share(self, step: int, part: int, parts: int) -> Share:
        share = self._shares.share(step, part, parts)
        pieces = tuple(
            replace(
                piece,
                fetch=partial(
                    _apart if number else _seeded, mix(self._seed, step, part, _MAKING, number), piece.fetch
                ),
            )
            for number, piece in enumerate(share.pieces)
        )
        return replace(share, pieces=pieces)


def _seeded(seed: int, fetch: Callable[[], Any]) -> Any:
    seed_host(seed)
    return fetch()


def _apart(seed: int, fetch: Callable[[], Any]) -> Any:
    with drawn_apart(seed):
        return fetch()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadShare:
    """One worker's share of a global batch, as a loader process delivers it."""

    batch_samples: int  # in the global batch
    share: Share  # whose pieces fetch nothing any more: see `batches`
    batches: list[Any]  # of each piece


class ShareReader:
    """Reads shares in a loader process."""

    def __init__(self, reading: BatchReading) -> None:
        self._shares = reading.shares()

    def read(self, key: Key, kept_from: int) -> ReadShare:
        """One share; none of a step before `kept_from` is asked for any more."""
        self._shares.keep_from(kept_from)
        share = self._shares.share(*key)
        batches = [piece.fetch() for piece in share.pieces]
        bare = tuple(replace(piece, fetch=_fetched) for piece in share.pieces)
        return ReadShare(
            batch_samples=self._shares.batch_samples(key[0]),
            share=replace(share, pieces=bare),
            batches=batches,
        )


def _fetched() -> Any:
    raise AssertionError("the batches of a share that was read lie beside it")
