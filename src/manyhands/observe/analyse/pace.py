"""Who computes slowly, and since when: a change point in compute times, which no barrier equalises.

Time is cut into windows that hold equally many steps of all workers together. In each, a worker's pace is the
median of its compute times, held against the median pace of the others. The longest stretch of windows in
which it is more than 1.3 times that (one window in between may be an exception) is when the worker was slow;
the steps in which that began and ended are then looked for around the stretch's two ends. Times that jitter
have such stretches by chance: one counts only if its long steps are more than the jitter elsewhere in the run
would ever put there (Chernoff's bound on the binomial, for all the stretches that might have been found).

Who is slow *now* is asked of the newest steps backwards: each step that is long speaks for a stretch, each that
is not against it, and where most has been said for it the stretch began. That needs no windows to fill: five
steps of three times the usual length are enough. The others' pace is that of the same moment (windows of five
steps), so that a machine which slows for everybody names nobody, and a stretch must have lasted for a while.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["SLOW_FACTOR", "Pace", "Slow", "find_slow", "slow_now"]

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
    """Return every worker that is slow as of its newest step, slowest first.

    A stretch must last two seconds; where `is_all`, a quarter of a shorter run is enough.
    """
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
        stretch = _until_now(times[index] > SLOW_FACTOR)
        if len(stretch) < _FEWEST_STEPS:
            continue
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


def _until_now(is_long: npt.NDArray[np.bool_]) -> range:
    """Return the best-scoring stretch that ends at the newest step; empty where the newest steps are not slow."""
    gained = np.cumsum(np.where(is_long[::-1], 1, -1))
    most = np.maximum(np.maximum.accumulate(gained), 0)
    ended = np.flatnonzero(most - gained > _DOUBTFUL + _DOUBTFUL_SHARE * most)
    gained = gained[: ended[0]] if len(ended) else gained
    if not len(gained) or gained.max() <= 0:
        return range(0)
    return range(len(is_long) - 1 - int(gained.argmax()), len(is_long))


def _by_start(pace: Pace) -> Pace:
    order = np.argsort(pace.start, kind="stable")
    return pace._replace(keys=pace.keys[order], start=pace.start[order], compute=pace.compute[order])


def _windows_of(paces: Sequence[Pace]) -> list[npt.NDArray[np.int64]]:
    starts = np.concatenate([pace.start for pace in paces])
    per_worker = max(1, len(starts) // len(paces))
    size = min(max(per_worker // _WINDOWS, _MIN_WINDOW), _MAX_WINDOW) * len(paces)
    rank = np.empty(len(starts), np.int64)
    rank[np.argsort(starts, kind="stable")] = np.arange(len(starts))
    # The remainder at the end joins the last full window.
    window = np.minimum(rank // size, max(0, len(starts) // size - 1))
    return np.split(window, np.cumsum([len(pace.start) for pace in paces])[:-1])


def _windows_before_now(paces: Sequence[Pace]) -> list[npt.NDArray[np.int64]]:
    """Return windows as `_windows_of` does, with the smallest ones before now and larger ones further back."""
    starts = np.concatenate([pace.start for pace in paces])
    small, large = _MIN_WINDOW * len(paces), _MAX_WINDOW * len(paces)
    age = np.empty(len(starts), np.int64)
    age[np.argsort(-starts, kind="stable")] = np.arange(len(starts))
    recent = _RECENT_WINDOWS * small
    back = np.where(age < recent, age // small, _RECENT_WINDOWS + (age - recent) // large)
    return np.split(back.max() - back, np.cumsum([len(pace.start) for pace in paces])[:-1])


def _paces_in(
    paces: Sequence[Pace], windows: Sequence[npt.NDArray[np.int64]]
) -> tuple[_Floats, list[_Floats]]:
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
    """Whether jitter, as frequent as it is outside of the stretch, would not make as many steps long.

    `stretches` is how many of the same worker might have been found.
    """
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
