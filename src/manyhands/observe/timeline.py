"""What every role did when: the rows, slices, marks and arrows that a picture of a run is made of.

Pure: records go in, a `Timeline` comes out, which `trace_json` and `timeline_svg` only write down. Three
things happen on the way.

*Choosing.* A picture of 10,000 steps is no picture. Where the run has more slices than wanted, three windows
of steps are kept: the first, one around the slowest step, and the last. What lies between is one slice per
role that says how much it stands for.

*Laying out.* The parts of a step are recorded as durations that do not overlap, but an exchange that was
hidden under the backward pass is recorded as one piece after it. Inside their step, parts are laid end to
end in the order recorded: durations are exact, and a part lies off its true place by no more than the
exchange that was hidden.

*Pointing.* At the end of every wait that names a peer, an arrow leads from what the peer did at that moment
to the waiter.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from manyhands.errors import UserError
from manyhands.observe.events import NO_STEP, NOBODY, EventKind, Records
from manyhands.observe.recorded import RoleEvents, role_name

__all__ = ["Arrow", "Gap", "Mark", "Row", "Slice", "Step", "Timeline", "Window", "build_timeline"]

_PARTS = (
    EventKind.COMPUTE,
    EventKind.EXCHANGE,
    EventKind.WAIT,
    EventKind.EVALUATE,
    EventKind.CHECKPOINT,
)
_MARKS = (EventKind.JOIN, EventKind.LEAVE, EventKind.FAULT)
_MAX_MARKS = 1_000  # of one role; a role that faults without end must not fill the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A stretch of one role's time; times are nanoseconds since the run's first event."""

    kind: EventKind
    start_ns: int
    end_ns: int
    step: int
    peer: int = NOBODY
    num_bytes: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One whole step of one role."""

    step: int
    start_ns: int
    end_ns: int
    samples: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Steps of one role that were left out, and what they add up to."""

    first_step: int
    last_step: int
    start_ns: int
    end_ns: int
    compute_ns: int
    exchange_ns: int
    wait_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment: a role joined, left, or met a fault for which `peer` is to blame."""

    kind: EventKind
    at_ns: int
    step: int
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One role; its slices and gaps do not overlap and are in the order of time."""

    role: int
    name: str
    slices: tuple[Slice, ...]
    steps: tuple[Step, ...]
    gaps: tuple[Gap, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """The end of a wait: from a moment inside a slice of the one waited for into the waiter's own slice."""

    source: int
    source_ns: int
    target: int
    target_ns: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Steps that are kept, both ends included; `label` says why: all, first, slowest or last."""

    label: str
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All rows in the order of their roles; `left_out` are sentences on what is not in them."""

    rows: tuple[Row, ...]
    arrows: tuple[Arrow, ...]
    windows: tuple[Window, ...]
    left_out: tuple[str, ...] = ()


def build_timeline(
    roles: Sequence[RoleEvents], *, max_slices: int, max_steps: int | None = None, steps: range | None = None
) -> Timeline:
    """The picture of a run, of at most about `max_slices` slices and `max_steps` steps.

    `steps` restricts it to those global batches; UserError where the run has none of them.
    """
    ids, slowness = _steps_of(roles)
    if not len(ids):
        raise UserError("the run has recorded no step yet; there is nothing to draw")
    wanted = np.ones(len(ids), bool) if steps is None else (ids >= steps.start) & (ids < steps.stop)
    if steps is not None and not wanted.any():
        raise UserError(f"none of the run's steps, {ids[0]} to {ids[-1]}, is among the steps asked for")
    ids, slowness = ids[wanted], slowness[wanted]
    most = _affordable_steps(roles, ids, max_slices)
    windows = _choose(ids, slowness, most if max_steps is None else max(3, min(most, max_steps)))
    zero_ns = min(int(events.records["start_ns"].min()) for events in roles if len(events.records))
    holes = _holes(ids, windows)
    rows = tuple(_row(events, windows, holes, zero_ns, whole=steps is None) for events in roles)
    left_out = (*_steps_left_out(rows, holes, ids), *_marks_left_out(roles))
    return Timeline(rows=rows, arrows=_arrows(rows), windows=windows, left_out=left_out)


def _steps_of(roles: Sequence[RoleEvents]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The run's steps in order, and how long each took the role that took longest."""
    records = [events.of(EventKind.STEP, EventKind.COMPUTE) for events in roles]
    joined = np.concatenate(records) if records else np.zeros(0, [("step", np.int64)])
    joined = joined[joined["step"] > NO_STEP]
    ids, index = np.unique(joined["step"], return_inverse=True)
    slowness = np.zeros(len(ids), np.int64)
    if len(ids):
        whole = joined["kind"] == EventKind.STEP
        np.maximum.at(slowness, index[whole], joined["duration_ns"][whole].astype(np.int64))
    return ids, slowness


def _affordable_steps(roles: Sequence[RoleEvents], ids: npt.NDArray[np.int64], max_slices: int) -> int:
    slices = 0
    for events in roles:
        parts = events.of(*_PARTS, EventKind.STEP)
        slices += int(((parts["step"] >= ids[0]) & (parts["step"] <= ids[-1])).sum())
    return max(3, max_slices * len(ids) // max(1, slices))


def _choose(
    ids: npt.NDArray[np.int64], slowness: npt.NDArray[np.int64], max_steps: int
) -> tuple[Window, ...]:
    """All steps where there are few, else a third each: the first, those around the slowest, the last."""
    if len(ids) <= max_steps:
        return (Window(label="all", first_step=int(ids[0]), last_step=int(ids[-1])),)
    size = max(1, max_steps // 3)
    middle = range(size, len(ids) - size)
    begin = middle.start + int(slowness[middle.start : middle.stop].argmax()) - size // 2
    begin = min(max(begin, middle.start), max(middle.start, middle.stop - size))
    kept = {
        "first": ids[:size],
        "slowest": ids[begin : min(begin + size, middle.stop)],
        "last": ids[-size:],
    }
    return tuple(
        Window(label=label, first_step=int(part[0]), last_step=int(part[-1])) for label, part in kept.items()
    )


def _holes(ids: npt.NDArray[np.int64], windows: Sequence[Window]) -> tuple[tuple[int, int], ...]:
    """First and last step of every stretch between two windows."""
    holes = []
    for left, right in itertools.pairwise(windows):
        between = ids[(ids > left.last_step) & (ids < right.first_step)]
        if len(between):
            holes.append((int(between[0]), int(between[-1])))
    return tuple(holes)


def _steps_left_out(
    rows: Sequence[Row], holes: Sequence[tuple[int, int]], ids: npt.NDArray[np.int64]
) -> tuple[str, ...]:
    if not holes:
        return ()
    count = sum(int(((ids >= first) & (ids <= last)).sum()) for first, last in holes)
    which = " and ".join(f"{first} to {last}" for first, last in holes)
    slices = f"{sum(len(row.slices) for row in rows):,}"
    return (
        f"{count:,} of {len(ids):,} steps are left out (steps {which}); kept are the first, those around "
        f"the slowest, and the last: {slices} slices",
    )


def _marks_left_out(roles: Sequence[RoleEvents]) -> Iterable[str]:
    for events in roles:
        count = len(events.of(*_MARKS)) - _MAX_MARKS
        if count > 0:
            yield f"{count:,} joins, leaves and faults in the middle of {role_name(events.name)} are left out"


def _row(
    events: RoleEvents,
    windows: Sequence[Window],
    holes: Sequence[tuple[int, int]],
    zero_ns: int,
    *,
    whole: bool,
) -> Row:
    records = events.records
    kept = np.zeros(len(records), bool)
    for window in windows:
        kept |= (records["step"] >= window.first_step) & (records["step"] <= window.last_step)
    if whole:
        kept |= records["step"] == NO_STEP
    chosen = records[kept]
    steps = _step_spans(chosen[chosen["kind"] == EventKind.STEP], zero_ns)
    parts = chosen[np.isin(chosen["kind"], _PARTS) & (chosen["duration_ns"] > 0)]
    slices = _laid_out(_slices(parts, zero_ns), steps)
    gaps = [gap for hole in holes if (gap := _gap(records, hole, zero_ns)) is not None]
    return Row(
        role=events.role,
        name=role_name(events.name),
        slices=slices,
        steps=steps,
        gaps=_fitted(gaps, slices),
        marks=_marks(events.of(*_MARKS), zero_ns),
    )


def _slices(parts: Records, zero_ns: int) -> list[Slice]:
    order = np.lexsort((parts["id"], parts["start_ns"]))
    names = ("kind", "start_ns", "duration_ns", "step", "peer", "num_bytes", "count")
    columns = zip(*(parts[name][order].tolist() for name in names), strict=True)
    return [
        Slice(
            kind=EventKind(kind),
            start_ns=start - zero_ns,
            end_ns=start - zero_ns + duration,
            step=step,
            peer=peer,
            num_bytes=num_bytes,
            count=count,
        )
        for kind, start, duration, step, peer, num_bytes, count in columns
    ]


def _step_spans(records: Records, zero_ns: int) -> tuple[Step, ...]:
    """The steps in the order of time, cut where a clock made one overlap the next."""
    records = records[np.argsort(records["start_ns"], kind="stable")]
    names = ("step", "start_ns", "duration_ns", "count", "value")
    columns = zip(*(records[name].tolist() for name in names), strict=True)
    spans: list[Step] = []
    for step, start, duration, samples, loss in columns:
        begin = start - zero_ns
        if spans and spans[-1].end_ns > begin:
            spans[-1] = replace(spans[-1], end_ns=begin)
        spans.append(Step(step=step, start_ns=begin, end_ns=begin + duration, samples=samples, loss=loss))
    return tuple(spans)


@dataclass(slots=True)
class _Group:
    """Parts that lie inside one step, or one part that lies in none."""

    begin_ns: int
    end_ns: int
    parts: list[Slice] = field(default_factory=list)


def _laid_out(slices: Sequence[Slice], steps: Sequence[Step]) -> tuple[Slice, ...]:
    """The same slices, none overlapping another: moved inside their step, cut only where that is not enough."""
    starts = [step.start_ns for step in steps]
    groups: list[_Group] = []
    homes: dict[int, _Group] = {}
    for part in slices:
        home = bisect.bisect_right(starts, part.start_ns) - 1
        if home < 0 or part.start_ns >= steps[home].end_ns:
            groups.append(_Group(part.start_ns, part.end_ns, [part]))
            continue
        if home not in homes:
            homes[home] = _Group(steps[home].start_ns, steps[home].end_ns)
            groups.append(homes[home])
        homes[home].parts.append(part)
    out: list[Slice] = []
    cursor = 0
    for group in groups:
        for part in _end_to_end(group):
            cut = _between(part, max(part.start_ns, cursor), part.end_ns)
            if cut.end_ns > cut.start_ns:
                out.append(cut)
                cursor = cut.end_ns
    return tuple(out)


def _end_to_end(group: _Group) -> list[Slice]:
    """Later ones first make room by moving on, then everything moves back as far as the step's end asks."""
    cursor = group.begin_ns
    moved: list[Slice] = []
    for part in group.parts:
        begin = max(part.start_ns, cursor)
        cursor = begin + part.end_ns - part.start_ns
        moved.append(_between(part, begin, cursor))
    limit = group.end_ns
    for index in range(len(moved) - 1, -1, -1):
        part = moved[index]
        if part.end_ns <= limit:
            break
        begin = limit - (part.end_ns - part.start_ns)
        moved[index] = _between(part, begin, limit)
        limit = begin
    return [_between(part, max(part.start_ns, group.begin_ns), part.end_ns) for part in moved]


def _between(part: Slice, start_ns: int, end_ns: int) -> Slice:
    """The slice moved or cut, and nearly always as it was."""
    if (part.start_ns, part.end_ns) == (start_ns, end_ns):
        return part
    return replace(part, start_ns=start_ns, end_ns=end_ns)


def _gap(records: Records, hole: tuple[int, int], zero_ns: int) -> Gap | None:
    first, last = hole
    inside = records[(records["step"] >= first) & (records["step"] <= last)]
    if not len(inside):
        return None
    durations = inside["duration_ns"].astype(np.int64)

    def spent(kind: EventKind) -> int:
        return int(durations[inside["kind"] == kind].sum())

    return Gap(
        first_step=first,
        last_step=last,
        start_ns=int(inside["start_ns"].min()) - zero_ns,
        end_ns=int((inside["start_ns"].astype(np.int64) + durations).max()) - zero_ns,
        compute_ns=spent(EventKind.COMPUTE),
        exchange_ns=spent(EventKind.EXCHANGE),
        wait_ns=spent(EventKind.WAIT),
    )


def _fitted(gaps: Iterable[Gap], slices: Sequence[Slice]) -> tuple[Gap, ...]:
    """The gaps, cut to the free time around their middle; one with no room there is not shown."""
    starts = [part.start_ns for part in slices]
    fitted: list[Gap] = []
    for gap in sorted(gaps, key=lambda gap: gap.start_ns + gap.end_ns):
        index = bisect.bisect_right(starts, (gap.start_ns + gap.end_ns) // 2)
        before = [slices[index - 1].end_ns] if index else []
        begin = max([gap.start_ns, *before, *(left.end_ns for left in fitted[-1:])])
        end = min(gap.end_ns, starts[index]) if index < len(starts) else gap.end_ns
        if end > begin:
            fitted.append(replace(gap, start_ns=begin, end_ns=end))
    return tuple(fitted)


def _marks(records: Records, zero_ns: int) -> tuple[Mark, ...]:
    if len(records) > _MAX_MARKS:
        records = np.concatenate([records[: _MAX_MARKS // 2], records[-_MAX_MARKS // 2 :]])
    return tuple(
        Mark(
            kind=EventKind(int(record["kind"])),
            at_ns=int(record["start_ns"]) + int(record["duration_ns"]) - zero_ns,
            step=int(record["step"]),
            peer=int(record["peer"]),
        )
        for record in records
    )


def _arrows(rows: Sequence[Row]) -> tuple[Arrow, ...]:
    """One for each wait whose peer was doing something that is shown when the wait ended."""
    by_role = {row.role: (row, [part.start_ns for part in row.slices]) for row in rows}
    arrows = []
    for row in rows:
        for wait in row.slices:
            if wait.kind is not EventKind.WAIT or wait.peer not in by_role or wait.peer == row.role:
                continue
            peer, starts = by_role[wait.peer]
            # A nanosecond inside both slices, so that a reader of the file has no doubt which are meant.
            target_ns = wait.end_ns - 1
            index = bisect.bisect_right(starts, target_ns) - 1
            if index < 0:
                continue
            arrows.append(
                Arrow(
                    source=wait.peer,
                    source_ns=min(target_ns, peer.slices[index].end_ns - 1),
                    target=row.role,
                    target_ns=target_ns,
                    step=wait.step,
                )
            )
    return tuple(arrows)
