"""What a worker reads of a task's data, in a form that also runs in a loader process.

What is drawn by chance while a batch is made (an augmentation in `__getitem__`, say) follows from (seed, step, part,
piece), whatever the model draws between. So a loader process draws what the worker itself would have drawn.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import WeightedRandomSampler, default_collate

from manyhands.data.batches import (
    BatchPlan,
    BatchShares,
    BatchSource,
    IndexedShares,
    Share,
    share_of,
    split,
    weighted_draw,
)
from manyhands.data.own import WorkerData, own_data
from manyhands.data.randomness import drawn_apart, mix, seed_all, seed_host
from manyhands.errors import UserError

# What a stream draws is not what its model draws, nor what is drawn while a batch is made.
_READING, _MAKING = 1, 2


def batch_shares(
    data: Any,
    collate: Callable[[list[Any]], Any] | None,
    batch_size: int,
    microbatches: int,
    weights: Any | None,
    seed: int,
    *,
    streams: bool,
    sampler: WeightedRandomSampler | None = None,
) -> BatchShares:
    """The batches of a task's data, which can only be iterated where it `streams`; `sampler` draws them by weight."""
    own, sizes = own_data(data), (batch_size, microbatches)
    shares: BatchShares | None = None
    if own is not None:
        shares = OwnShares(own, collate, *sizes, lambda step, part: seed_all(mix(seed, step, part, _READING)))
    elif streams:
        shares = StreamShares(data, collate, *sizes, lambda step: seed_all(mix(seed, step)))
    if shares is not None:
        return _DrawnApart(shares, seed)
    source = BatchSource(data, collate)
    found = sample_weights(weights, len(source)) if weights is not None else None
    plan = BatchPlan(len(source), batch_size, seed)
    if sampler is not None:
        drawn = sample_weights(sampler.weights, len(source), "sampler.weights")
        order = partial(weighted_draw, drawn, sampler.num_samples, seed, replacement=sampler.replacement)
        plan = BatchPlan(sampler.num_samples, batch_size, seed, order)
    indexed = IndexedShares(source, plan, microbatches, found)
    return indexed if source.gathers else _DrawnApart(indexed, seed)


class _DrawnApart(BatchShares):
    """Shares whose pieces are made with separate random numbers; the first sets the generators, which is faster."""

    def __init__(self, shares: BatchShares, seed: int) -> None:
        self._shares, self._seed = shares, seed

    def keep_from(self, step: int) -> None:
        self._shares.keep_from(step)

    def share(self, step: int, part: int, parts: int) -> Share:
        def fetched(number: int, fetch: Callable[[], Any]) -> Any:
            seed = mix(self._seed, step, part, _MAKING, number)
            if number:
                with drawn_apart(seed):
                    return fetch()
            seed_host(seed)
            return fetch()

        share = self._shares.share(step, part, parts)
        pieces = enumerate(share.pieces)
        drawn = (replace(piece, fetch=partial(fetched, number, piece.fetch)) for number, piece in pieces)
        return replace(share, pieces=tuple(drawn))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadShare:
    """One worker's share of a global batch, as a loader process delivers it."""

    share: Share  # whose pieces fetch nothing any more: see `batches`
    batches: list[Any]  # of each piece


class ShareReader:
    """Reads shares in a loader process."""

    def __init__(self, shares: Callable[[], BatchShares]) -> None:
        self._shares = shares()

    def read(self, key: Key, kept_from: int) -> ReadShare:
        """One share; none of a step before `kept_from` is asked for any more."""
        self._shares.keep_from(kept_from)
        share = self._shares.share(*key)
        batches = [piece.fetch() for piece in share.pieces]
        # The batches of a share that was read lie beside it; what fetches them is not sent.
        bare = replace(share, pieces=tuple(replace(piece, fetch=tuple) for piece in share.pieces))
        return ReadShare(share=bare, batches=batches)


class StreamShares(BatchShares):
    """Shares of batches of samples that can only be iterated.

    Everybody draws the whole stream, batch after batch, and keeps its own part of each. Batches are those of a
    `DataLoader` of the stream which is gone through again and again, so the last one of a pass may be short. Before a
    batch is drawn `seeded(step)` is called: what the stream draws by chance is the same for all.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        collate: Callable[[list[Any]], Any] | None,
        batch_size: int,
        microbatches: int,
        seeded: Callable[[int], None],
    ) -> None:
        self._drawing = _Drawing(stream, batch_size, seeded, across=False)
        self._collate, self._microbatches = collate or default_collate, microbatches

    def keep_from(self, step: int) -> None:
        self._drawing.kept_from = step

    def share(self, step: int, part: int, parts: int) -> Share:
        batch = self._drawing.batch(step)
        mine = split(len(batch), part, parts)
        return share_of(batch[mine.start : mine.stop], len(batch), self._microbatches, self._collate)


class OwnShares(BatchShares):
    """Shares drawn from a stream per part, each always full; before one is drawn `seeded(step, part)` is called."""

    def __init__(
        self,
        data: WorkerData,
        collate: Callable[[list[Any]], Any] | None,
        batch_size: int,
        microbatches: int,
        seeded: Callable[[int, int], None],
    ) -> None:
        self._data, self._seeded, self._collate = data, seeded, collate or default_collate
        self._batch_size, self._microbatches = batch_size, microbatches
        self._drawings: dict[tuple[int, int], _Drawing] = {}
        self._kept_from: int | None = None

    def keep_from(self, step: int) -> None:
        self._kept_from = step

    def share(self, step: int, part: int, parts: int) -> Share:
        drawing = self._drawings.get((part, parts))
        if drawing is None:
            drawing = _Drawing(
                self._data.stream(part, parts),
                len(split(self._batch_size, part, parts)),
                seeded=lambda step: self._seeded(step, part),
                across=True,
                whose=f"data of worker {part}" if parts > 1 else "data",
            )
            self._drawings[part, parts] = drawing
        drawing.kept_from = self._kept_from
        return share_of(drawing.batch(step), self._batch_size, self._microbatches, self._collate)


class _Drawing:
    """Batches of a stream that is gone through again and again; with `across` none is short at the end of a pass."""

    def __init__(
        self,
        stream: Iterable[Any],
        size: int,
        seeded: Callable[[int], None],
        *,
        across: bool,
        whose: str = "data",
    ) -> None:
        self._stream, self._size, self._seeded = stream, size, seeded
        self._across, self._whose = across, whose
        # From which batch on those that were drawn are remembered; None: the last one alone
        self.kept_from: int | None = None
        self._drawn: dict[int, list[Any]] = {}
        self._passes = self._next = 0
        self._iterator: Iterator[Any] | None = None

    def batch(self, step: int) -> list[Any]:
        if step < self._next and step not in self._drawn:  # an earlier one: from the beginning of the stream
            self._passes, self._next, self._iterator, self._drawn = 0, 0, None, {}
        while self._next <= step:
            self._seeded(self._next)
            drawn = self._draw(self._size)
            while not drawn or (self._across and len(drawn) < self._size):  # a pass is over
                is_empty = not (self._next or drawn)
                self._passes, self._iterator = self._passes + 1, None
                more = self._draw(self._size - len(drawn))
                if not more:
                    what = f"{self._whose}, a {type(self._stream).__name__}, gave no sample"
                    again = f"in pass {self._passes + 1}; it must start again each time it is iterated"
                    raise UserError(f"{what}; give at least one" if is_empty else f"{what} {again}")
                drawn += more
            first = self._next if self.kept_from is None else min(self.kept_from, step)
            self._drawn = {number: kept for number, kept in self._drawn.items() if number >= first}
            self._drawn[self._next] = drawn
            self._next += 1
        return self._drawn[step]

    def _draw(self, count: int) -> list[Any]:
        if self._iterator is None:
            if hasattr(self._stream, "set_epoch"):  # of those that draw every pass in another order
                self._stream.set_epoch(self._passes)
            self._iterator = iter(self._stream)
        return list(islice(self._iterator, count))


def sample_weights(weights: Any, samples: int, name: str = "weights") -> NDArray[np.float64]:
    """One number of at least 0 for each sample, some of them above; a UserError says what they are instead."""
    allowed = f"{name} must be one number of at least 0 for each of the {samples} samples of data"
    try:
        found = torch.as_tensor(weights).detach().cpu().to(torch.float64).numpy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name} is a {type(weights).__name__}; {allowed}") from error
    if found.shape != (samples,):
        raise UserError(f"{name} has the shape {found.shape}; {allowed}")
    if not (np.isfinite(found).all() and (found >= 0).all()):
        wrong = int(np.argmin(np.isfinite(found) & (found >= 0)))
        raise UserError(f"{name}[{wrong}] is {found[wrong]:g}; {allowed}")
    if not found.any():
        raise UserError(f"{name} are all 0; some must be above 0")
    return found


Key: TypeAlias = tuple[int, int, int]
"""A step, a part and the number of parts: one worker's share of one global batch."""

_REMEMBERED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """Loader processes of each worker, which read and collate its next batches while it computes.

    The batches are the same, in the same order, with and without them. Data that are arrays in memory need none: there
    a batch is gathered at once, and this setting changes nothing.
    """

    workers: int = 0
    """Loader processes for each worker of the run, as `num_workers` of torch's DataLoader; 0: the worker loads each
    batch itself, when it needs it. A stream of samples is read by one process, however many are given."""
    ahead: int = 2
    """Batches that each loader process has ready or in work beyond the one that is computed, as `prefetch_factor`."""
    pinned: bool = False
    """Copy batches to page-locked memory, from which a GPU fetches them while it computes; without a GPU, no effect."""
    timeout_s: float = 300.0
    """How long a worker waits for a batch before the run fails; the error names the loader process and where it is."""

    def __post_init__(self) -> None:
        for name, value, least in (("workers", self.workers, 0), ("ahead", self.ahead, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"loading: {name} is {value!r}; it must be an integer of at least {least}")
        if not isinstance(self.pinned, bool):
            raise UserError(f"loading: pinned is {self.pinned!r}; it must be True or False")
        if not (isinstance(self.timeout_s, int | float) and self.timeout_s > 0):
            raise UserError(f"loading: timeout_s is {self.timeout_s!r}; it must be a number above 0")


class Upcoming:
    """Predicts the shares that a worker will request next from those it requested; none beyond `steps`.

    Steps come as far apart as they mostly came lately: 1 where all workers share each batch, n where n workers take
    batches in order. A guess may be wrong: then the right batch is loaded, and the time of the wrong one was wasted.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._last: int | None = None
        self._distances: deque[int] = deque(maxlen=_REMEMBERED)

    def after(self, key: Key, count: int) -> list[Key]:
        """The next `count` after `key`, which is asked for now."""
        step, part, parts = key
        if self._last is not None and step > self._last:
            self._distances.append(step - self._last)
        self._last = step
        seen = Counter(reversed(self._distances))  # of several that came as often, the latest
        distance = seen.most_common(1)[0][0] if seen else 1
        following = range(step + distance, self._steps, distance)
        return [(later, part, parts) for later in following[:count]]
