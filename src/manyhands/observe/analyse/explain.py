"""Where the time of a run's median step goes, which worker is slow, and what the ideal step time would be.

*Synchronous runs.* A step lasts until the last worker arrives, so its time is that worker's: the critical
path. Who arrives last is the one that waits least. Of its compute, as much as the median of the others
needs is compute; the rest is what everybody waits for.

*Servers.* Of the time between a worker's push and the answer, what the busiest of the servers spent applying
updates meanwhile is theirs; the rest is exchange, or waiting for the one that the answer was held for.

*Other runs.* Each worker has a path of its own, and the figures of the run are the means over its workers.

Means are taken over the middle fifth of the steps by their time. That is as robust as the median, and the
parts add up to the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from manyhands.errors import UserError
from manyhands.observe.analyse.remarks import about_late, planned_waits, straggler_advice
from manyhands.observe.analyse.slow_workers import Late, Pace, Slow, Slowness, find_slow
from manyhands.observe.record.events import EventKind, Records
from manyhands.observe.record.recorded import RoleEvents, role_name, step_keys

__all__ = ["PART_WORDS", "Explanation", "Parts", "Slow", "WorkerPath", "explain", "paragraph"]

_MS = 1e-6  # milliseconds per nanosecond
_IN_STEP = (
    *(EventKind.COMPUTE, EventKind.INPUT, EventKind.EXCHANGE),
    *(EventKind.WAIT, EventKind.EVALUATE, EventKind.CHECKPOINT),
)
_Floats = npt.NDArray[np.float64]
_Applying = Callable[[_Floats, _Floats], _Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a step is made of, in milliseconds."""

    compute_ms: float
    exchange_ms: float  # exposed communication: not overlapped with compute
    wait_ms: float  # waiting for stragglers
    apply_ms: float  # waiting for servers that apply updates
    input_ms: float  # loading the samples
    other_ms: float  # in the step but in none of the parts: bookkeeping

    @property
    def step_ms(self) -> float:
        return float(sum(dataclasses.astuple(self)))

    @property
    def own_ms(self) -> float:
        return self.compute_ms + self.input_ms + self.other_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPath:
    """The median step of one worker, as that worker measured it."""

    worker: int
    name: str
    steps: int
    parts: Parts
    evaluate_ms: float  # per step, averaged over all steps
    checkpoint_ms: float
    last_share: float  # share of the steps in which all workers waited for this one; 0 where none has to


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where the time of a run goes."""

    synchronous: bool
    steps: int
    parts: Parts  # of the critical path; of the mean worker where the run is not synchronous
    evaluate_ms: float  # per step, averaged over all steps, beside the step itself
    checkpoint_ms: float
    ideal_ms: float  # a step with every worker at the median speed and no exchange
    speedup: float  # ideal steps per second divided by the measured ones
    workers: tuple[WorkerPath, ...]
    slow: tuple[Slow, ...]  # slowest first
    late: Late | None = None  # waited for in the median step, although its compute time is not longer

    def to_dict(self) -> dict[str, Any]:
        row = dataclasses.asdict(self)
        row["parts"]["step_ms"] = self.parts.step_ms
        for worker, path in zip(row["workers"], self.workers, strict=True):
            worker["parts"]["step_ms"] = path.parts.step_ms
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The steps of one worker as columns in nanoseconds, in the order of `keys`."""

    worker: int
    name: str
    keys: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    columns: tuple[_Floats, ...]  # in the order of the fields of `Parts`
    evaluate_ns: float  # over all steps
    checkpoint_ns: float


def explain(roles: Sequence[RoleEvents], *, synchronous: bool) -> Explanation:
    """Explain a run; `synchronous` where each step waits for all workers. UserError where no step was recorded."""
    applying = [_applying(records) for events in roles if len(records := events.of(EventKind.APPLY))]
    workers = [steps for events in roles if len((steps := _steps_of(events, applying)).keys)]
    if not workers:
        raise UserError("the run has recorded no step yet; there is nothing to explain")
    paths = [_middle(np.sum(worker.columns, axis=0), worker.columns) for worker in workers]
    if synchronous:
        parts, whole, last = _critical_path(workers)
        ideal_ms = parts.own_ms
        speedup = _ratio(parts.step_ms, ideal_ms)
    else:
        parts = _parts(np.asarray([dataclasses.astuple(path) for path in paths]).mean(axis=0).tolist())
        last = np.zeros(len(workers))
        whole = None
        ideal_ms = float(np.median([path.own_ms for path in paths]))
        speedup = _ratio(len(paths) / ideal_ms if ideal_ms else 0.0, sum(1 / path.step_ms for path in paths))
    per_step = [(worker.evaluate_ns, worker.checkpoint_ns) for worker in workers]
    shares = np.asarray(per_step) * _MS / np.asarray([[len(worker.keys)] for worker in workers])
    # In a synchronous run the other workers wait while one evaluates or saves.
    evaluate_ms, checkpoint_ms = shares.max(axis=0) if synchronous else shares.mean(axis=0)
    paces = [
        Pace(worker.worker, worker.name, worker.keys, worker.start, worker.columns[0]) for worker in workers
    ]
    seen, numbers = Slowness(), {worker.worker for worker in workers}
    for events in roles:
        if events.role in numbers:
            seen.add(events.records)
    return Explanation(
        synchronous=synchronous,
        steps=len(np.unique(np.concatenate([worker.keys for worker in workers]))),
        parts=parts,
        evaluate_ms=float(evaluate_ms),
        checkpoint_ms=float(checkpoint_ms),
        ideal_ms=ideal_ms,
        speedup=speedup,
        workers=tuple(
            WorkerPath(
                worker=worker.worker,
                name=worker.name,
                steps=len(worker.keys),
                parts=path,
                evaluate_ms=float(share[0]),
                checkpoint_ms=float(share[1]),
                last_share=float(late),
            )
            for worker, path, share, late in zip(workers, paths, shares, last, strict=True)
        ),
        slow=find_slow(paces, whole),
        late=seen.late_ever(),
    )


def _applying(records: Records) -> _Applying:
    """Return how long one server was applying updates between two moments, for many of them at once."""
    records = records[np.argsort(records["start_ns"], kind="stable")]
    starts = records["start_ns"].astype(np.float64)
    durations = records["duration_ns"].astype(np.float64)
    done = np.cumsum(durations)
    moments = np.stack([starts, starts + durations], axis=1).ravel()
    done = np.stack([done - durations, done], axis=1).ravel()
    return lambda begin, end: np.interp(end, moments, done) - np.interp(begin, moments, done)


def _steps_of(events: RoleEvents, applying: Sequence[_Applying]) -> _Steps:
    records, keys = events.records, step_keys(events)
    durations = records["duration_ns"].astype(np.int64)
    starts = records["start_ns"].astype(np.int64)
    is_step = records["kind"] == EventKind.STEP
    unique, index = np.unique(keys[is_step], return_inverse=True)
    count = len(unique)
    begin = np.full(count, np.iinfo(np.int64).max)
    end = np.zeros(count, np.int64)
    np.minimum.at(begin, index, starts[is_step])
    np.maximum.at(end, index, starts[is_step] + durations[is_step])
    place = np.minimum(np.searchsorted(unique, keys), max(0, count - 1))
    belongs = unique[place] == keys if count else np.zeros(len(keys), bool)
    whole = np.bincount(index, durations[is_step], count)

    applied = np.zeros(len(records))  # by the busiest of the servers, while this role waited
    waits = np.isin(records["kind"], (EventKind.EXCHANGE, EventKind.WAIT))
    since = records["start_ns"][waits].astype(np.float64)
    until = since + records["duration_ns"][waits]
    if applying and waits.any():
        applied[waits] = np.max([spent_by(since, until) for spent_by in applying], axis=0)

    def spent(*kinds: EventKind, inside: bool = False, of: _Floats | None = None) -> _Floats:
        chosen = belongs & np.isin(records["kind"], kinds)
        if inside:  # a worker of a parameter server pulls before its step; other workers evaluate after it
            chosen &= (starts >= begin[place]) & (starts < end[place]) if count else False
        values = durations if of is None else of
        return np.bincount(place[chosen], values[chosen], count).astype(np.float64)

    known = spent(*_IN_STEP, inside=True)
    return _Steps(
        worker=events.role,
        name=role_name(events.name),
        keys=unique,
        start=begin,
        columns=(
            spent(EventKind.COMPUTE),
            spent(EventKind.EXCHANGE) - spent(EventKind.EXCHANGE, of=applied),
            spent(EventKind.WAIT) - spent(EventKind.WAIT, of=applied),
            spent(EventKind.EXCHANGE, EventKind.WAIT, of=applied),
            spent(EventKind.INPUT),
            np.maximum(0.0, whole - known),
        ),
        evaluate_ns=float(durations[records["kind"] == EventKind.EVALUATE].sum()),
        checkpoint_ns=float(durations[records["kind"] == EventKind.CHECKPOINT].sum()),
    )


def _critical_path(workers: Sequence[_Steps]) -> tuple[Parts, dict[int, float], _Floats]:
    """Return the parts of the median step, each step's time in ms by key, and how often each worker was last."""
    keys = np.unique(np.concatenate([worker.keys for worker in workers]))
    columns = np.arange(len(keys))

    table = np.full((len(Parts.__dataclass_fields__), len(workers), len(keys)), np.nan)
    for row, worker in enumerate(workers):
        table[:, row, np.searchsorted(keys, worker.keys)] = worker.columns
    compute, exchange, wait, apply, read, other = table
    least = np.nanmin(wait, axis=0)
    # Where waiting was not measured, the worker that computes longest counts as last.
    last = np.where(wait == least, compute + read + other, -1.0).argmax(axis=0)
    own = compute[last, columns]
    others = compute.copy()
    others[last, columns] = np.nan
    alone = np.isnan(others).all(axis=0)
    others[0, alone] = own[alone]
    needed = np.minimum(own, np.nanmedian(others, axis=0))
    straggling = own - needed + wait[last, columns]
    rest = (part[last, columns] for part in (apply, read, other))
    path = (needed, exchange[last, columns], straggling, *rest)
    whole = np.sum(path, axis=0)
    step_ms = dict(zip(keys.tolist(), (whole * _MS).tolist(), strict=True))
    share = np.bincount(last, minlength=len(workers)) / len(keys)
    return _middle(whole, path), step_ms, share if len(workers) > 1 else np.zeros(1)


def _middle(whole: _Floats, parts: Sequence[_Floats]) -> Parts:
    order = np.argsort(whole, kind="stable")
    count, reach = len(order), len(order) // 10
    chosen = order[max(0, (count - 1) // 2 - reach) : count // 2 + reach + 1]
    return _parts([float(part[chosen].mean()) * _MS for part in parts])


def _parts(columns: Sequence[float]) -> Parts:
    return Parts(**dict(zip(Parts.__dataclass_fields__, columns, strict=True)))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0


PART_WORDS = {
    "compute_ms": "compute",
    "exchange_ms": "exposed communication",
    "wait_ms": "waiting for stragglers",
    "apply_ms": "servers applying updates",
    "input_ms": "input",
    "other_ms": "other",
}  # the parts of a step, as they are called in tables and sentences

_MIN_SAID = 0.005  # parts with a smaller share are not mentioned
_WORTH_IT = 0.10  # share of a step above which advice is given
_MAX_NAMED = 3


def paragraph(found: Explanation, strategy: str = "mirrored") -> str:
    shares = sorted(_shares_of(found.parts).items(), key=lambda one: -one[1])
    listed = ", ".join(
        f"{getattr(found.parts, field):.1f} ms ({100 * share:.0f} %) {PART_WORDS[field]}"
        for field, share in shares
        if share >= _MIN_SAID
    )
    takes = f"he median step takes {found.parts.step_ms:.1f} ms"
    first = f"Every worker runs at its own pace; on average t{takes}: {listed}."
    if len(found.workers) == 1:
        first = f"T{takes}: {listed}."
    elif found.synchronous:
        first = f"T{takes}, the time of the last worker to arrive: {listed}."
    sentences = [first, *(_about(slow) for slow in found.slow[:_MAX_NAMED])]
    if found.late is not None and not found.slow:
        said = about_late(found.late)
        sentences.append(f"{said[:1].upper()}{said[1:]}.")
    elif len(found.workers) > 1 and not found.slow:
        sentences.append("No worker is slower than the others for long.")
    if planned := planned_waits(strategy):
        sentences.append(planned)
    overhead = found.evaluate_ms + found.checkpoint_ms
    if overhead >= _WORTH_IT / 2 * found.parts.step_ms:
        sentences.append(
            f"Evaluation ({found.evaluate_ms:.1f} ms) and checkpoints ({found.checkpoint_ms:.1f} ms) add "
            f"{overhead:.1f} ms to the average step."
        )
    if found.speedup >= 1.005:
        sentences.append(
            f"With every worker at the median speed and no exchange, a step would take {found.ideal_ms:.1f} ms: "
            f"{found.speedup:.1f} times as fast."
        )
    sentences.append(_advice(found, strategy))
    return " ".join(sentences)


def _about(slow: Slow) -> str:
    numbers = f"{slow.ratio:.1f} times the median of the others"
    against = f"({slow.compute_ms:.1f} ms a step against {slow.others_ms:.1f} ms)"
    name = slow.name[:1].upper() + slow.name[1:]
    if slow.until_step is not None:
        when = f"from step {slow.since_step} to step {slow.until_step}"
        return f"{name} computed {numbers} {when} {against}, then no more."
    if slow.from_the_start:
        return f"{name} computes {numbers} from the start {against}."
    sentence = f"{name} computes {numbers} since step {slow.since_step} {against}"
    if slow.step_before_ms is None or slow.step_since_ms is None:
        return sentence + "."
    before, since = f"{slow.step_before_ms:.1f} ms", f"{slow.step_since_ms:.1f} ms"
    return f"{sentence}: the run's steps took {before} before, and {since} since."


def _advice(found: Explanation, strategy: str) -> str:
    losses = {field: share for field, share in _shares_of(found.parts).items() if field != "compute_ms"}
    step_ms = found.parts.step_ms
    losses["overhead"] = (found.evaluate_ms + found.checkpoint_ms) / step_ms if step_ms > 0 else 0.0
    largest = max(losses, key=lambda field: losses[field])
    lasting = [slow for slow in found.slow if slow.until_step is None]
    if lasting and (largest == "wait_ms" or losses[largest] < _WORTH_IT):
        advice = straggler_advice(strategy if found.synchronous else "")
        return (
            f"Look at {lasting[0].name} first: what else runs there, and whether its core or its input is slower."
            + (f" {advice[:1].upper()}{advice[1:]}." if advice else "")
        )
    if losses[largest] < _WORTH_IT:
        return "Nearly all of it is compute: only faster computing or more workers will help."
    if largest == "wait_ms" and found.late is not None:
        return f"The others wait for what worker {found.late.worker} does besides computing."
    if largest == "wait_ms":
        return (
            "No worker is slow for long, different workers are late at times: a bound on staleness (ps "
            "consistency=bounded:4) hides such delays."
            if found.synchronous
            else "A larger bound on staleness, or consistency=async, waits less."
        )
    return {
        "exchange_ms": "Exchange is the largest loss: a larger batch means more compute for each exchange.",
        "apply_ms": "Servers applying updates are the largest loss: more of them (ps servers=…) share the work.",
        "input_ms": "Getting the samples is the largest loss: have loader processes read ahead "
        "(Task(loading=Loading(workers=2))), or keep them in memory; where they are made by acting, more environments "
        "side by side cost less each.",
        "other_ms": "Check what runs around compute: the step's time is in none of the measured parts.",
        "overhead": "Evaluate and save less often.",
    }[largest]


def _shares_of(parts: Parts) -> dict[str, float]:
    whole = parts.step_ms
    return {field: getattr(parts, field) / whole if whole > 0 else 0.0 for field in PART_WORDS}
