"""Which workers compute slowly and since when, and which are waited for although they do not.

*Over a run* (`find_slow`): a change point in compute times, which no barrier equalises. Time is cut into windows that
hold equally many steps of all workers together. In each, a worker's pace is the median of its compute times, held
against the median pace of the others. The longest stretch of windows in which it is more than 1.3 times that (one
window in between may be an exception) is when the worker was slow; the steps in which that began and ended are then
looked for around the stretch's two ends. Times that jitter have such stretches by chance: one counts only if its long
steps are more than the jitter elsewhere in the run would ever put there (Chernoff's bound on the binomial, for all the
stretches that might have been found).

*Now* (`slow_now`), from the newest steps backwards: each step that is long speaks for a stretch, each that is not
against it, and where most has been said for it the stretch began. That needs no windows to fill: five steps of three
times the usual length are enough. The others' pace is that of the same moment (windows of five steps), so that a
machine which slows for everybody names nobody, and a stretch must have lasted for a while.

*While a run continues* (`Slowness`) the steps of every worker are kept in bounded memory: the newest in full, older
ones increasingly thinned, and equally for all workers, so that shares of time stay correct. A worker may also hold the
others up without computing longer: it loads data, evaluates or saves. That is reported where the others wait for it in
the median step. The mean would not do: one long step of ten, often the first, is not a pattern.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from manyhands.observe.analyse.recent import WINDOW_NS
from manyhands.observe.record.events import NOBODY, EventKind, Records

SLOW_FACTOR = 1.3  # A worker that computes this many times the median of the others is slow

_MS = 1e-6
_STEP_MASK = (1 << 40) - 1  # the bits of a step key that hold the step
_MIN_WINDOW, _MAX_WINDOW, _WINDOWS = 5, 50, 100  # steps per worker, minimum and maximum; target count
_MIN_JITTER = 0.02  # share of long steps that any run may have
_DOUBT = 1000  # probability bound for naming a worker by chance: one run in so many
_RECENT_WINDOWS = 100  # windows of the smallest size, before now
_FIRST_STEPS = 3  # warm-up: a worker that is slow since then counts as slow from the start
_LONGER = (SLOW_FACTOR, SLOW_FACTOR**2, SLOW_FACTOR**3)  # the longer the steps, the fewer are needed
_FEWEST_STEPS = 4
_LASTING_NS = 2_000_000_000  # a shorter stretch is ignored,
_LASTING_SHARE = 0.25  # except in a run that was short itself
_DOUBTFUL, _DOUBTFUL_SHARE = 5, 0.1  # steps against a stretch, and of those for it, that end it
_Floats = npt.NDArray[np.float64]
_Windows = list[npt.NDArray[np.int64]]  # by worker, the window of each of its steps


class Pace(NamedTuple):
    """The compute time of every step of one worker, in nanoseconds."""

    worker: int
    name: str
    keys: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    compute: _Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A worker that computed longer than the others, and the period in which it did."""

    worker: int
    name: str
    since_step: int
    until_step: int | None  # None: until the end
    from_the_start: bool
    ratio: float
    compute_ms: float
    others_ms: float
    step_before_ms: float | None  # the run's median step before and since, where the run is synchronous
    step_since_ms: float | None


def find_slow(paces: Sequence[Pace], step_ms: Mapping[int, float] | None) -> tuple[Slow, ...]:
    """Return every worker that is or was slow for a while, slowest first; `step_ms` is each step's time by key."""
    if len(paces) < 2:
        return ()
    paces = [_by_start(pace) for pace in paces]
    windows = _windows_of(paces)
    medians, others = _paces_in(paces, windows)
    is_long = [
        pace.compute > SLOW_FACTOR * theirs[window]
        for pace, theirs, window in zip(paces, others, windows, strict=True)
    ]
    found = []
    for index, pace in enumerate(paces):
        windowed = _longest(medians[:, index] > SLOW_FACTOR * others[index])
        if windowed is None:
            continue
        score, window = np.where(is_long[index], 1, -1), windows[index]
        end = len(score) if windowed.stop == len(medians) else _change(-score, window, windowed.stop)
        begin = min(_change(score, window, windowed.start), end - 1)
        stretch = range(max(0, begin), max(1, end))
        theirs_ns = float(np.median(others[index][windowed.start : windowed.stop]))
        slow = _slow(pace, stretch, theirs_ns, step_ms)
        if slow.ratio > SLOW_FACTOR and _is_no_chance(is_long, index, stretch, len(medians) ** 2):
            found.append(slow)
    named = {slow.worker for slow in found}
    found += [slow for slow in slow_now(paces, step_ms, is_all=True) if slow.worker not in named]
    return tuple(sorted(found, key=lambda slow: -slow.ratio))


def slow_now(
    paces: Sequence[Pace], step_ms: Mapping[int, float] | None = None, *, is_all: bool = False
) -> tuple[Slow, ...]:
    """Return who is slow now, slowest first, for 2 s or more; where `is_all`, for a quarter of a shorter run."""
    paces = [_by_start(pace) for pace in paces if len(pace.start) >= _FIRST_STEPS]
    if len(paces) < 2:
        return ()
    windows = _windows_before_now(paces)
    medians, others = _paces_in(paces, windows)
    theirs = [others[index][window] for index, window in enumerate(windows)]
    times = [
        np.divide(pace.compute, their, out=np.ones(len(their)), where=their > 0)
        for pace, their in zip(paces, theirs, strict=True)
    ]
    began_ns = min(int(pace.start[0]) for pace in paces)
    found = []
    for index, pace in enumerate(paces):
        is_long = times[index] > SLOW_FACTOR
        # The stretch with the best score that ends at the newest step, where the newest steps are slow.
        gained = np.cumsum(np.where(is_long[::-1], 1, -1))
        most = np.maximum(np.maximum.accumulate(gained), 0)
        ended = np.flatnonzero(most - gained > _DOUBTFUL + _DOUBTFUL_SHARE * most)
        gained = gained[: ended[0]] if len(ended) else gained
        if not len(gained) or gained.max() <= 0 or gained.argmax() + 1 < _FEWEST_STEPS:
            continue
        stretch = range(len(is_long) - 1 - int(gained.argmax()), len(is_long))
        now_ns = int(pace.start[-1] + pace.compute[-1])
        lasted_ns = now_ns - int(pace.start[stretch.start])
        if lasted_ns < (min(_LASTING_NS, _LASTING_SHARE * (now_ns - began_ns)) if is_all else _LASTING_NS):
            continue
        slow = _slow(pace, stretch, float(np.median(theirs[index][stretch.start :])), step_ms)
        is_real = any(
            _is_no_chance([ratios > longer for ratios in times], index, stretch, len(medians))
            for longer in _LONGER
        )
        if slow.ratio > SLOW_FACTOR and is_real:
            found.append(slow)
    return tuple(sorted(found, key=lambda slow: -slow.ratio))


def _by_start(pace: Pace) -> Pace:
    order = np.argsort(pace.start, kind="stable")
    return pace._replace(keys=pace.keys[order], start=pace.start[order], compute=pace.compute[order])


def _windows_of(paces: Sequence[Pace]) -> _Windows:
    starts = np.concatenate([pace.start for pace in paces])
    per_worker = max(1, len(starts) // len(paces))
    size = min(max(per_worker // _WINDOWS, _MIN_WINDOW), _MAX_WINDOW) * len(paces)
    # The remainder at the end joins the last full window.
    window = np.minimum(_ranks(starts) // size, max(0, len(starts) // size - 1))
    return np.split(window, np.cumsum([len(pace.start) for pace in paces])[:-1])


def _windows_before_now(paces: Sequence[Pace]) -> _Windows:
    """Return windows as `_windows_of` does, with the smallest ones before now and larger ones further back."""
    age = _ranks(-np.concatenate([pace.start for pace in paces]))
    small, large = _MIN_WINDOW * len(paces), _MAX_WINDOW * len(paces)
    recent = _RECENT_WINDOWS * small
    back = np.where(age < recent, age // small, _RECENT_WINDOWS + (age - recent) // large)
    return np.split(back.max() - back, np.cumsum([len(pace.start) for pace in paces])[:-1])


def _ranks(starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.argsort(np.argsort(starts, kind="stable"), kind="stable")


def _paces_in(paces: Sequence[Pace], windows: _Windows) -> tuple[_Floats, list[_Floats]]:
    """Return each worker's pace in each window, and that of the others; without a step it keeps its previous pace."""
    count = 1 + max(int(window.max()) for window in windows)
    medians = np.full((count, len(paces)), np.nan)
    for column, (pace, window) in enumerate(zip(paces, windows, strict=True)):
        ordered = pace.compute[np.lexsort((pace.compute, window))]
        rows, first, num = np.unique(np.sort(window), return_index=True, return_counts=True)
        medians[rows, column] = (ordered[first + (num - 1) // 2] + ordered[first + num // 2]) / 2
        known = np.flatnonzero(~np.isnan(medians[:, column]))
        nearest = np.maximum(np.searchsorted(known, np.arange(count), side="right") - 1, 0)
        medians[:, column] = medians[known[nearest], column]
    return medians, [np.median(np.delete(medians, index, axis=1), axis=1) for index in range(len(paces))]


def _longest(flags: npt.NDArray[np.bool_]) -> range | None:
    """Return the longest run of true windows, with one-window gaps filled; None below two windows."""
    filled = flags.copy()
    filled[1:-1] |= flags[:-2] & flags[2:]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], filled, [False]]).astype(np.int8)))
    stretches = [range(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]
    longest = max(stretches, key=len, default=range(0))
    return longest if len(longest) >= min(2, len(flags)) else None


def _change(score: npt.NDArray[np.int_], window: npt.NDArray[np.int64], at: int) -> int:
    """Return the first step of the stretch: the best split of the steps of window `at` and the one before."""
    near = np.flatnonzero((window == at) | (window == at - 1))
    if not len(near):  # the worker has no step in this window
        return int(np.searchsorted(window, at))
    gained = np.cumsum(score[near][::-1])  # backwards, so that the latest of equal splits is taken
    return int(near[-1] - gained.argmax())


def _is_no_chance(
    is_long: Sequence[npt.NDArray[np.bool_]], worker: int, stretch: range, stretches: int
) -> bool:
    """Whether jitter, as frequent as elsewhere, would not make as many steps long, of so many `stretches`."""
    inside = int(is_long[worker][stretch.start : stretch.stop].sum())
    long = sum(int(flags.sum()) for flags in is_long) - inside
    steps = sum(len(flags) for flags in is_long) - len(stretch)
    # Two standard deviations above the observed rate: a short run has not yet shown how much it jitters.
    expected = min(1.0, max(_MIN_JITTER, (long + 2 * math.sqrt(long + 1)) / max(1, steps)))
    share = inside / len(stretch)
    if share <= expected:
        return False
    surprise = share * math.log(share / expected)
    if share < 1:
        surprise += (1 - share) * math.log((1 - share) / (1 - expected))
    return len(stretch) * surprise > math.log(_DOUBT * stretches * len(is_long))


def _slow(pace: Pace, stretch: range, theirs_ns: float, step_ms: Mapping[int, float] | None) -> Slow:
    own = float(np.median(pace.compute[stretch.start : stretch.stop]))
    first = int(pace.keys[stretch.start])
    last = int(pace.keys[stretch.stop - 1]) if stretch.stop < len(pace.keys) else None
    times = step_ms or {}
    before = [ms for key, ms in times.items() if key < first]
    since = [ms for key, ms in times.items() if key >= first and (last is None or key <= last)]
    return Slow(
        worker=pace.worker,
        name=pace.name,
        since_step=first & _STEP_MASK,
        until_step=None if last is None else last & _STEP_MASK,
        from_the_start=stretch.start < _FIRST_STEPS,
        ratio=own / theirs_ns if theirs_ns > 0 else 1.0,
        compute_ms=own * _MS,
        others_ms=theirs_ns * _MS,
        step_before_ms=float(np.median(before)) if before else None,
        step_since_ms=float(np.median(since)) if since else None,
    )


_ROW = np.dtype(
    [
        (name, np.int64)
        for name in ("step", "start_ns", "compute_ns", "wait_ns", "accounted_ns", "peer", "peer_ns")
    ]
)
_Rows = npt.NDArray[np.void]
_KINDS = np.zeros(256, np.bool_)  # indexed by the number of a kind
_KINDS[[EventKind.COMPUTE, EventKind.EXCHANGE, EventKind.WAIT]] = True
_MAX_ROWS = 4096  # per worker
_IN_FULL = 1536  # the newest of these, which are not thinned: more than 5 s of steps of 5 ms
_PORTION = _MAX_ROWS - _IN_FULL  # rows that are added between two checks whether to thin
_ENOUGH = 8  # steps per worker before a median is meaningful
_LATE_SHARE = 0.25  # share of the median step that the others must spend waiting
_NAMED_FACTOR = 1.5  # ratio of compute times above which a worker is mentioned

Found = TypeVar("Found", "Straggler", "Late")


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A worker that computes longer per step than the others, and the cost to them."""

    worker: int
    ratio: float  # of its compute time per step to the median of the others
    since_step: int
    until_step: int | None  # None: it still is
    from_the_start: bool
    others_wait: float  # the share of their time that the others spent waiting meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A worker that the others wait for although its compute time is no longer than theirs."""

    worker: int
    others_wait: float  # the share of their median step that the others wait for it


def from_summary(kind: type[Found], row: Mapping[str, Any]) -> Found:
    """Read what a summary says of a worker; unknown fields are ignored."""
    return kind(**{field.name: row[field.name] for field in dataclasses.fields(kind)})


class Slowness:
    """The steps of all workers of a run, kept for finding slow ones; workers may be added later."""

    def __init__(self) -> None:
        self._rows: dict[int, _Rows] = {}
        self._found: tuple[Straggler, ...] | None = None

    def add(self, records: Records) -> None:
        counted = _KINDS[records["kind"]] & (records["step"] >= 0)
        if not counted.any():
            return
        self._found = None
        for role in np.unique(records["role"][counted]).tolist():
            rows = _rows_of(records, np.flatnonzero(counted & (records["role"] == role)))
            for begin in range(0, len(rows), _PORTION):
                self._extend(role, rows[begin : begin + _PORTION])
                while len(self._rows[role]) > _MAX_ROWS:
                    before_ns = int(self._rows[role]["start_ns"][-_IN_FULL])
                    for other, own in self._rows.items():
                        is_new = own["start_ns"] >= before_ns
                        self._rows[other] = np.concatenate([own[~is_new][::2], own[is_new]])

    def _extend(self, role: int, rows: _Rows) -> None:
        own = self._rows.get(role, np.zeros(0, _ROW))
        if len(own) and own["step"][-1] == rows["step"][0]:  # more of the step that was newest
            for name in ("compute_ns", "wait_ns", "accounted_ns"):
                own[name][-1] += rows[name][0]
            if rows["peer_ns"][0] > own["peer_ns"][-1]:
                for name in ("peer", "peer_ns"):
                    own[name][-1] = rows[name][0]
            rows = rows[1:]
        self._rows[role] = np.concatenate([own, rows])

    def now(self) -> tuple[Straggler, ...]:
        if self._found is None:
            self._found = self._named(slow_now(self._paces()))
        return self._found

    def ever(self) -> tuple[Straggler, ...]:
        return self._named(find_slow(self._paces(), None))

    def late_now(self) -> Late | None:
        """Return the worker that the others wait for in their newest steps although it computes no longer."""
        since_ns = max((int(rows["start_ns"][-1]) for rows in self._rows.values()), default=0) - WINDOW_NS
        newest = {}
        for role, rows in self._rows.items():
            begin = int(np.searchsorted(rows["start_ns"], since_ns))
            newest[role] = rows[max(0, min(begin, len(rows) - _ENOUGH)) :]
        return _late(newest)

    def late_ever(self) -> Late | None:
        return _late(self._rows)

    def _paces(self) -> list[Pace]:
        paces = []
        for role, kept in sorted(self._rows.items()):
            rows = kept[kept["compute_ns"] > 0]
            if len(rows):
                compute = rows["compute_ns"].astype(np.float64)
                paces.append(Pace(role, f"worker {role}", rows["step"], rows["start_ns"], compute))
        return paces

    def _named(self, found: Iterable[Slow]) -> tuple[Straggler, ...]:
        return tuple(
            Straggler(
                worker=slow.worker,
                ratio=slow.ratio,
                since_step=slow.since_step,
                until_step=slow.until_step,
                from_the_start=slow.from_the_start,
                others_wait=self._others_wait(slow),
            )
            for slow in found
            if slow.ratio >= _NAMED_FACTOR
        )

    def _others_wait(self, slow: Slow) -> float:
        own = self._rows[slow.worker]
        begin_ns = int(own["start_ns"][np.flatnonzero(own["step"] == slow.since_step)[-1]])
        end_ns = np.iinfo(np.int64).max
        if slow.until_step is not None:
            end_ns = int(own["start_ns"][np.flatnonzero(own["step"] == slow.until_step)[-1]])
        waited = accounted = 0
        for role, rows in self._rows.items():
            if role != slow.worker:
                meanwhile = rows[(rows["start_ns"] >= begin_ns) & (rows["start_ns"] <= end_ns)]
                waited += int(meanwhile["wait_ns"].sum())
                accounted += int(meanwhile["accounted_ns"].sum())
        return waited / accounted if accounted else 0.0


def _rows_of(records: Records, chosen: npt.NDArray[np.intp]) -> _Rows:
    """Merge consecutive records of one worker and one step into one row."""
    steps, kinds = records["step"][chosen], records["kind"][chosen]
    durations = records["duration_ns"][chosen].astype(np.int64)
    begins = np.flatnonzero(np.diff(steps, prepend=-1))
    rows = np.zeros(len(begins), _ROW)
    rows["step"] = steps[begins]
    rows["start_ns"] = np.minimum.reduceat(records["start_ns"][chosen].astype(np.int64), begins)
    for name, kind in (("compute_ns", EventKind.COMPUTE), ("wait_ns", EventKind.WAIT)):
        rows[name] = np.add.reduceat(np.where(kinds == kind, durations, 0), begins)
    rows["accounted_ns"] = np.add.reduceat(durations, begins)
    waits = np.where(kinds == EventKind.WAIT, durations, 0)
    peers = records["peer"][chosen]
    owner = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(waits)))
    longest = np.lexsort((waits, owner))[np.append(begins[1:], len(waits)) - 1]
    rows["peer"], rows["peer_ns"] = np.where(waits[longest] > 0, peers[longest], NOBODY), waits[longest]
    return rows


def _late(rows: Mapping[int, _Rows]) -> Late | None:
    """Decide by medians over at least `_ENOUGH` steps each; None also where the worker waited for computes longer."""
    rows = {role: own for role, own in rows.items() if len(own) >= _ENOUGH}
    if len(rows) < 2:
        return None
    awaited = dict.fromkeys(rows, 0.0)
    for role, own in rows.items():
        peers, counts = np.unique(own["peer"], return_counts=True)
        peer = int(peers[counts.argmax()])  # any other peer has a median share of 0
        if peer in awaited and peer != role:
            shares = np.where(own["peer"] == peer, own["peer_ns"] / np.maximum(1, own["accounted_ns"]), 0.0)
            awaited[peer] += float(np.median(shares)) / (len(rows) - 1)
    *_, (second, _), (share, worker) = sorted((share, role) for role, share in awaited.items())
    own_ns, *others_ns = (
        float(np.median(rows[role]["compute_ns"])) for role in sorted(rows, key=lambda role: role != worker)
    )
    is_alone = share >= _LATE_SHARE and share >= 2 * second
    has_its_own_work = 0 < own_ns <= SLOW_FACTOR * float(np.median(others_ns))
    return Late(worker=worker, others_wait=share) if is_alone and has_its_own_work else None
