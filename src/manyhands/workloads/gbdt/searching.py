"""Who sums which histograms, and finds the best split of a leaf: data-parallel and voting-parallel.

* Data-parallel: each worker sums the histograms of its own features over all workers and finds their best split; the
  best of all workers' is the leaf's. A sibling's histogram is the parent's less the other child's. What is found is
  what one worker would find, to the last bit.
* Voting-parallel (Meng et al., "A communication-efficient parallel algorithm for decision tree", 2016): each worker
  votes for the `top_k` features that gain most on its own rows, and only the histograms of the 2 · `top_k` with most
  votes are summed. Where there are no more features than that, it is the same as data-parallel.

Workers share two kinds of memory while they grow a tree: an area of each, as large as a histogram, and a row of a few
words. Both are written before a barrier and read after it; there are two rows, used alternately, so that one barrier
each is enough.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import CACHE_LINE, Segment, round_up
from manyhands.workloads.gbdt import histogram_kernels, split_kernels
from manyhands.workloads.gbdt.binning import ByteLayout
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.split_kernels import RECORD_WORDS

Words = NDArray[np.int64]
RowIds = NDArray[np.int32]
_HISTOGRAM_WORDS = 2


class SharedHistograms:
    """One worker's side; `areas` are those of all workers, a row each, of whole cache lines."""

    def __init__(self, rank: int, areas: Words, gathered: Words, barrier: Callable[[], None]) -> None:
        self.rank, self.world, self.areas = rank, len(areas), areas
        self.area: Words = areas[rank]  # this worker's: written before `barrier`, read by all after it
        self._gathered, self._barrier = gathered, barrier
        self._next = self.bytes_sent = 0

    @classmethod
    def alone(cls, options: GbdtOptions, offsets: Words) -> SharedHistograms:
        areas = np.zeros((1, _whole_lines(area_words(options, offsets))), np.int64)
        return cls(0, areas, np.zeros((2, 1, gathered_words(options)), np.int64), lambda: None)

    @classmethod
    def shared(
        cls, group: SharedGroup, control_bytes: int, options: GbdtOptions, offsets: Words
    ) -> tuple[SharedHistograms, Segment]:
        wide, narrow = _whole_lines(area_words(options, offsets)), _whole_lines(gathered_words(options))
        begin, world = round_up(control_bytes, CACHE_LINE), group.world
        segment = group.share(begin + 8 * world * (wide + 2 * narrow), "histograms")
        areas = segment.array(begin, world * wide, np.int64).reshape(world, wide)
        gathered = segment.array(begin + 8 * world * wide, 2 * world * narrow, np.int64)
        return cls(group.rank, areas, gathered.reshape(2, world, narrow), group.barrier), segment

    def barrier(self, words: int) -> None:
        """Collective: all have written their areas, of which the others read `words`."""
        self.bytes_sent += 8 * words * (self.world - 1)
        self._barrier()

    def gather(self, words: Words) -> Words:
        """Collective: the words of each worker, a row each; to be read before the next but one."""
        gathered = self._gathered[self._next]
        self._next = 1 - self._next
        gathered[self.rank, : len(words)] = words
        self.barrier(len(words))
        return gathered[:, : len(words)]  # type: ignore[no-any-return]

    def largest(self, value: float) -> float:
        return float(self.gather(np.array([value]).view(np.int64)).copy().view(np.float64).max())

    def total(self, value: int) -> int:
        return int(self.gather(np.array([value], np.int64)).sum())


def _whole_lines(words: int) -> int:
    return round_up(8 * words, CACHE_LINE) // 8


def area_words(options: GbdtOptions, offsets: Words) -> int:
    """How large an area has to be: a histogram, or the elected parts of two."""
    whole = _HISTOGRAM_WORDS * (int(offsets[-1]) + 1)
    return whole if options.parallel == "data" else 2 * whole


def gathered_words(options: GbdtOptions) -> int:
    return max(2 * RECORD_WORDS, 2 * options.top_k, 4)


@dataclass(kw_only=True, slots=True, eq=False)
class LocalRows:
    """What a search sees of this worker's rows: bins, the words of this tree, and units that turn words into sums."""

    tiles: NDArray[np.uint8]
    layout: ByteLayout
    words: Words
    first: int  # the number of the first row here; `words` begin with it
    rule: NDArray[np.float64]  # as `split_kernels.best_split` takes it; the units change from tree to tree
    ordered: Words
    _packed: Words = field(init=False)
    _parts: tuple[Words, ...] | None = field(init=False)

    def __post_init__(self) -> None:
        layout = self.layout
        self._packed = np.zeros(2 * (int(layout.offsets[-1]) + 1), np.int64)
        parts = layout.columns, layout.firsts, layout.zeros, layout.offsets
        self._parts = parts if layout.firsts.any() else None

    def histogram(self, rows: RowIds, offsets: Words, out: Words) -> None:
        found = out if self._parts is None else self._packed
        given = self.words, self.first, self.layout.offsets, self.ordered
        histogram_kernels.histogram(self.tiles, rows, *given, found)
        if self._parts is not None:
            histogram_kernels.spread(found, self._parts, offsets, out)


@dataclass(eq=False)
class SplitSearch(ABC):
    """Finds splits of leaves; `_places` are the rows of its pool with their histograms, by the leaf's number."""

    _rendezvous: SharedHistograms
    _offsets: Words
    _kinds: Words
    _options: GbdtOptions

    def __post_init__(self) -> None:
        self._records = np.zeros((2, RECORD_WORDS), np.int64)
        self._places = list(range(self._options.num_leaves))

    @abstractmethod
    def root(self, local: LocalRows, rows: RowIds) -> tuple[Words, Words]:
        """Collective: the two sums of all rows, and the best split of leaf 0, which they are."""

    @abstractmethod
    def children(self, local: LocalRows, parent: int, new: int, smaller: RowIds, totals: Words) -> Words:
        """Collective: the best splits of the two children of a leaf, a row each, the one with fewer rows first.

        `parent` is split into itself and `new`: the histogram of the smaller is kept as that of `new`, which `swap` may
        put right afterwards. `smaller` are its rows here, `totals` the sums of both, a row each.
        """

    def swap(self, one: int, other: int) -> None:
        self._places[one], self._places[other] = self._places[other], self._places[one]

    def _best(self, count: int) -> Words:
        """Collective: of each worker's best splits of `count` leaves, in `_records`, the best, a row each."""
        rendezvous = self._rendezvous
        if rendezvous.world == 1:
            return self._records[:count].copy()
        gathered = np.ascontiguousarray(rendezvous.gather(self._records[:count].reshape(-1)))
        gathered = gathered.reshape(rendezvous.world, count, RECORD_WORDS)
        best = np.empty((count, RECORD_WORDS), np.int64)
        split_kernels.best_of_all(gathered, gathered.view(np.float64), best)
        return best


class DataSearch(SplitSearch):
    """Every worker has the whole sums of some features."""

    def __post_init__(self) -> None:
        super().__post_init__()
        offsets, rendezvous = self._offsets, self._rendezvous
        begin, end = _share_of_features(offsets, rendezvous.rank, rendezvous.world)
        self._features = np.arange(begin, end)
        self._starts = offsets[begin : end + 1] - offsets[begin]
        self._span = 2 * int(offsets[begin]), 2 * int(offsets[end])
        self._pool = np.zeros((self._options.num_leaves, self._span[1] - self._span[0]), np.int64)

    def root(self, local: LocalRows, rows: RowIds) -> tuple[Words, Words]:
        self._count(local, rows)
        histogram_kernels.reduce_areas(self._rendezvous.areas, *self._span, self._pool[self._places[0]])
        totals = self._rendezvous.areas[:, -2:].sum(axis=0)
        return totals, self._found([0], totals.reshape(1, 2), local)[0]

    def children(self, local: LocalRows, parent: int, new: int, smaller: RowIds, totals: Words) -> Words:
        """The larger child is what the smaller leaves of its parent."""
        self._count(local, smaller)
        areas, rows = self._rendezvous.areas, (self._places[new], self._places[parent])
        histogram_kernels.take_from_parent(areas, *self._span, self._pool, *rows)
        return self._found([new, parent], totals, local)

    def _count(self, local: LocalRows, rows: RowIds) -> None:
        rendezvous = self._rendezvous
        local.histogram(rows, self._offsets, rendezvous.area)
        rendezvous.barrier(rendezvous.area.size - (self._span[1] - self._span[0]))

    def _found(self, leaves: Sequence[int], totals: Words, local: LocalRows) -> Words:
        places = np.array([self._places[leaf] for leaf in leaves], np.int64)
        features, records = (self._features, self._starts, self._kinds), self._records
        gains = records.view(np.float64)
        split_kernels.best_pair(self._pool, places, *features, totals, local.rule, records, gains)
        return self._best(len(leaves))


class VotingSearch(SplitSearch):
    """Every worker has the histograms of its own rows; those of features that were elected are summed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pool = np.zeros((self._options.num_leaves, 2 * (int(self._offsets[-1]) + 1)), np.int64)
        self._gains = np.zeros(len(self._kinds))

    def root(self, local: LocalRows, rows: RowIds) -> tuple[Words, Words]:
        local.histogram(rows, self._offsets, self._pool[self._places[0]])
        totals = self._rendezvous.gather(self._pool[self._places[0]][-2:]).sum(axis=0)
        return totals, self._elected(local, [0], totals.reshape(1, 2))[0]

    def children(self, local: LocalRows, parent: int, new: int, smaller: RowIds, totals: Words) -> Words:
        """Both have histograms here, by subtraction, and an election each."""
        local.histogram(smaller, self._offsets, self._pool[self._places[new]])
        histogram_kernels.subtract(self._pool[self._places[parent]], self._pool[self._places[new]])
        return self._elected(local, [new, parent], totals)

    def _elected(self, local: LocalRows, leaves: Sequence[int], totals: Words) -> Words:
        rendezvous, elected, begins = self._rendezvous, self._election(local, leaves), [0]
        for leaf, features in zip(leaves, elected, strict=True):
            whole, at = self._pool[self._places[leaf]], begins[-1]
            for feature in features:
                own = whole[2 * self._offsets[feature] : 2 * self._offsets[feature + 1]]
                rendezvous.area[at : at + own.size] = own
                at += own.size
            begins.append(at)
        rendezvous.barrier(begins[-1])
        for number, features in enumerate(elected):
            self._find(features, begins[number], totals[number], local, self._records[number])
        return self._best(len(leaves))

    def _election(self, local: LocalRows, leaves: Sequence[int]) -> list[Words]:
        """Collective: the features of each leaf whose histograms are summed."""
        most, world = 2 * self._options.top_k, self._rendezvous.world
        if len(self._kinds) <= most:
            return [np.arange(len(self._kinds)) for _ in leaves]
        votes = np.concatenate([self._votes(local, leaf) for leaf in leaves])
        gathered = self._rendezvous.gather(votes).reshape(world, len(leaves), -1)
        elected = []
        for number in range(len(leaves)):  # those with most votes, of equal ones the first; ascending
            names, counts = np.unique(gathered[:, number][gathered[:, number] >= 0], return_counts=True)
            elected.append(np.sort(names[np.lexsort((names, -counts))[:most]]))
        return elected

    def _votes(self, local: LocalRows, leaf: int) -> Words:
        """The features that gain most on the rows that are here; -1 for a vote that is not cast."""
        whole, rule = self._pool[self._places[leaf]], local.rule.copy()
        rule[1] = max(1.0, rule[1] // self._rendezvous.world)  # a leaf has fewer rows here than in all
        rule[2] /= self._rendezvous.world
        split_kernels.feature_gains(whole, self._offsets, self._kinds, whole[-2:], rule, self._gains)
        order = np.lexsort((np.arange(len(self._gains)), -self._gains))[: self._options.top_k]
        votes = np.full(self._options.top_k, -1, np.int64)
        cast = order[self._gains[order] > 0]
        votes[: len(cast)] = cast
        return votes

    def _find(self, features: Words, begins: int, totals: Words, local: LocalRows, record: Words) -> None:
        """The best split among this worker's part of the elected features."""
        rendezvous = self._rendezvous
        starts = np.cumsum([0, *np.diff(self._offsets)[features]]).astype(np.int64)
        begin, end = _share_of_features(starts, rendezvous.rank, rendezvous.world)
        words = begins + 2 * int(starts[begin]), begins + 2 * int(starts[end])
        summed = np.zeros(words[1] - words[0], np.int64)
        histogram_kernels.reduce_areas(rendezvous.areas, *words, summed)
        mine = features[begin:end], starts[begin : end + 1] - starts[begin], self._kinds
        split_kernels.best_split(summed, *mine, totals, local.rule, record, record.view(np.float64))


def _share_of_features(offsets: Words, rank: int, world: int) -> tuple[int, int]:
    """A worker's features: contiguous, with about as many bins as the others' have."""
    cuts = np.searchsorted(offsets, np.arange(world + 1) * int(offsets[-1]) // world)
    return int(cuts[rank]), int(cuts[rank + 1])


SEARCHES: dict[str, type[SplitSearch]] = {"data": DataSearch, "voting": VotingSearch}
"""By the name in the options."""
