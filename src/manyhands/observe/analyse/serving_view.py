"""Statistics of a model server: counted per event, and a view of them as a value. Pure: callers pass times."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

RECENT = 10_000  # answers that latencies are told of: the newest

_CURVE_S = 300  # seconds of throughput that are shown
_RATE_S = 5.0  # seconds over which the current rate is averaged
_LATELY_S = 60.0  # seconds for which a warning is shown
_NOTES = 20


@dataclass(frozen=True, slots=True)
class Answered:
    """One answered request."""

    at: float
    latency_s: float
    status: int
    inputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """One worker process and its current state."""

    number: int
    pid: int
    state: str  # starting, free or computing
    batches: int = 0
    inputs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingView:
    """What the page of a model server shows."""

    model: str
    task: str
    takes: str  # what one input is, in words
    example: str  # one of them, as JSON
    seconds: float
    requests: int
    inputs: int
    by_status: tuple[tuple[int, int], ...]  # how many answers had each HTTP status
    lately: tuple[tuple[int, int], ...]  # the same of the last minute, of the newest answers
    requests_per_s: float
    inputs_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    latencies_ms: tuple[tuple[int, int], ...]
    """How many of the newest answers took so many whole milliseconds."""
    curve: tuple[tuple[float, float], ...]  # seconds since the start, and requests answered in that second
    batch_mean: float  # inputs in a batch, on average
    waiting: int  # inputs that no worker has yet
    workers: tuple[ReplicaState, ...]
    wanted: int  # how many workers there should be
    deaths: int
    notes: tuple[str, ...]  # what happened to workers, the newest first


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest of these sorted numbers that at least so many percent do not exceed; NaN for none."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


class ServingTally:
    """Counters written by one thread and read by others; `begun` is the origin of all times."""

    def __init__(self, begun: float) -> None:
        self._begun = begun
        self._lock = threading.Lock()
        self._recent: deque[Answered] = deque(maxlen=RECENT)
        self._seconds: Counter[int] = Counter()
        self._first_second: int | None = None
        self._by_status: Counter[int] = Counter()
        self._batches = self._batched = 0
        self._notes: deque[str] = deque(maxlen=_NOTES)
        self.deaths = 0
        self.requests = self.inputs = 0

    def answered(self, answer: Answered) -> None:
        with self._lock:
            self.requests += 1
            self.inputs += answer.inputs if answer.status == 200 else 0
            self._by_status[answer.status] += 1
            self._recent.append(answer)
            second = int(answer.at - self._begun)
            if self._first_second is None:
                self._first_second = second
            if second not in self._seconds:
                for old in [one for one in self._seconds if one < second - _CURVE_S]:
                    del self._seconds[old]
            self._seconds[second] += 1

    def batch(self, inputs: int) -> None:
        with self._lock:
            self._batches += 1
            self._batched += inputs

    def note(self, now: float, sentence: str, death: bool = False) -> None:
        with self._lock:
            self._notes.appendleft(f"{now - self._begun:.0f} s: {sentence}")
            self.deaths += death

    def figures(self, now: float) -> dict[str, object]:
        with self._lock:
            recent, seconds, notes = list(self._recent), dict(self._seconds), tuple(self._notes)
            by_status = tuple(sorted(self._by_status.items()))
            batch_mean = self._batched / self._batches if self._batches else 0.0
            requests, inputs, deaths = self.requests, self.inputs, self.deaths
        good = sorted(one.latency_s * 1e3 for one in recent if one.status == 200)
        since = max(self._begun, now - _RATE_S)
        lately = [one for one in recent if one.at >= since]
        if len(lately) == RECENT:  # earlier seconds are dropped
            since = lately[0].at
        span = max(now - since, 1e-3)
        statuses = Counter(one.status for one in recent if one.at >= now - _LATELY_S)
        last = int(now - self._begun)
        first = max(0, last if self._first_second is None else self._first_second, last - _CURVE_S)
        return {
            "seconds": now - self._begun,
            "requests": requests,
            "inputs": inputs,
            "by_status": by_status,
            "lately": tuple(sorted(statuses.items())),
            "requests_per_s": len(lately) / span,
            "inputs_per_s": sum(one.inputs for one in lately if one.status == 200) / span,
            "p50_ms": percentile(good, 50),
            "p95_ms": percentile(good, 95),
            "p99_ms": percentile(good, 99),
            "latencies_ms": tuple(sorted(Counter(int(one) for one in good).items())),
            # the current, incomplete second would show as a drop
            "curve": tuple((float(one), float(seconds.get(one, 0))) for one in range(first, last)),
            "batch_mean": batch_mean,
            "deaths": deaths,
            "notes": notes,
        }
