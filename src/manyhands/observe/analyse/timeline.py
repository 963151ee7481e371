"""What every role did when: the rows, slices, marks and arrows that a picture of a run is made of.

Pure: records go in, a `Timeline` comes out, which `trace_json` and `timeline_svg` only write down.

*Choosing.* A picture of 10,000 steps is not readable. Where the run has more slices than wanted, three windows
of steps are kept: the first, one around the slowest step, and the last. What lies between is one slice per
role that says how much it stands for.

Workers are shown by their steps. A server or a helper has none: of it is shown what it did while the steps that
are shown were under way.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from manyhands.errors import UserError
from manyhands.observe.record.events import NO_STEP, NOBODY, EventKind, Records
from manyhands.observe.record.recorded import RoleEvents, role_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """An interval of one role's time; times are nanoseconds since the run's first event."""

    kind: EventKind
    start_ns: int
    end_ns: int
    step: int
    peer: int = NOBODY
    num_bytes: int = 0
    count: int = 0
    value: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Omitted steps of one role and their totals; for a server, an omitted time range."""

    first_step: int
    last_step: int
    start_ns: int
    end_ns: int
    compute_ns: int
    exchange_ns: int
    wait_ns: int
    apply_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One role; its slices and gaps do not overlap and are in time order."""

    role: int
    name: str
    slices: tuple[Slice, ...]
    steps: tuple[Slice, ...]  # whole steps
    gaps: tuple[Gap, ...]
    marks: tuple[Slice, ...]  # at their ends the role joined, left, or met a fault that `peer` caused
    holds: tuple[Slice, ...] = ()  # what a server kept back, for whom; these overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """An arrow between slices of two roles: the end of a wait, or a message."""

    source: int
    source_ns: int
    target: int
    target_ns: int
    step: int
    is_message: bool = False
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A range of steps that is kept, both ends included; `label` says why: all, first, slowest or last."""

    label: str
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All rows in role order; `left_out` has sentences on what they omit."""

    rows: tuple[Row, ...]
    arrows: tuple[Arrow, ...]
    windows: tuple[Window, ...]
    left_out: tuple[str, ...] = ()


_Span = tuple[int, int]  # a stretch of time, both ends included, in nanoseconds on the clock of the events
_PARTS = (
    *(EventKind.INPUT, EventKind.COMPUTE, EventKind.EXCHANGE),
    *(EventKind.WAIT, EventKind.EVALUATE, EventKind.CHECKPOINT),
)
_SERVER_PARTS = (  # of a server or helper
    *(EventKind.RECEIVE, EventKind.APPLY, EventKind.SEND),
    *(EventKind.CHECKPOINT, EventKind.EXCHANGE),
)
_MARKS = (EventKind.JOIN, EventKind.LEAVE, EventKind.FAULT)
_MAX_MARKS = 1_000  # per role, so that endless faults cannot fill the file


def build_timeline(
    roles: Sequence[RoleEvents], *, max_slices: int, max_steps: int | None = None, steps: range | None = None
) -> Timeline:
    """Build about `max_slices` slices of `max_steps` steps at most, of `steps` alone; UserError where there is none."""
    ids, slowness = _steps_of(roles)
    if not len(ids):
        raise UserError("the run has recorded no step yet; there is nothing to draw")
    wanted = np.ones(len(ids), bool) if steps is None else (ids >= steps.start) & (ids < steps.stop)
    if steps is not None and not wanted.any():
        raise UserError(f"the run has steps {ids[0]} to {ids[-1]}; none of them was asked for")
    share = wanted.sum() / len(ids)
    ids, slowness = ids[wanted], slowness[wanted]
    slices = 0.0
    for events in roles:
        if _has_steps(events):
            slices += _within(events.of(*_PARTS, EventKind.STEP, EventKind.SEND), ids[0], ids[-1]).sum()
        else:  # its events may lack a step
            slices += len(events.of(*_SERVER_PARTS, EventKind.HOLD)) * share
    most = max(3, int(max_slices * len(ids) / max(1, slices)))
    windows = _choose(ids, slowness, most if max_steps is None else max(3, min(most, max_steps)))
    roles = [events for events in roles if len(events.records)]
    zero_ns = min(int(events.records["start_ns"].min()) for events in roles)
    holes = []
    for left, right in itertools.pairwise(windows):
        between = ids[(ids > left.last_step) & (ids < right.first_step)]
        if len(between):
            holes.append((int(between[0]), int(between[-1])))
    spans = [_span(roles, window) for window in windows]
    rows = tuple(
        _worker_row(events, windows, holes, zero_ns, whole=steps is None)
        if _has_steps(events)
        else _server_row(events, spans, zero_ns)
        for events in roles
    )
    left_out = []
    if holes:
        count = sum(int(((ids >= first) & (ids <= last)).sum()) for first, last in holes)
        which = " and ".join(f"{first} to {last}" for first, last in holes)
        left_out.append(
            f"{count:,} of {len(ids):,} steps are left out (steps {which}); kept are the first, those around "
            f"the slowest, and the last: {sum(len(row.slices) for row in rows):,} slices"
        )
    for events in roles:
        count = len(events.of(*_MARKS)) - _MAX_MARKS
        if count > 0:
            name = role_name(events.name)
            left_out.append(f"{count:,} joins, leaves and faults in the middle of {name} are left out")
    tracks = {row.role: _Track(row) for row in rows}
    arrows = (*_wait_arrows(rows, tracks), *_message_arrows(tracks, roles, spans, zero_ns))
    return Timeline(rows=rows, arrows=arrows, windows=windows, left_out=tuple(left_out))


def _has_steps(events: RoleEvents) -> bool:
    return bool(len(events.of(EventKind.STEP, EventKind.COMPUTE)))


def _steps_of(roles: Sequence[RoleEvents]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    records = [events.of(EventKind.STEP, EventKind.COMPUTE) for events in roles]
    joined = np.concatenate(records) if records else np.zeros(0, [("step", np.int64)])
    joined = joined[joined["step"] > NO_STEP]
    ids, index = np.unique(joined["step"], return_inverse=True)
    slowness = np.zeros(len(ids), np.int64)
    if len(ids):
        whole = joined["kind"] == EventKind.STEP
        np.maximum.at(slowness, index[whole], joined["duration_ns"][whole].astype(np.int64))
    return ids, slowness


def _within(records: Records, first: int, last: int) -> npt.NDArray[np.bool_]:
    return np.asarray((records["step"] >= first) & (records["step"] <= last))


def _span(roles: Sequence[RoleEvents], window: Window) -> _Span:
    begin, end = np.iinfo(np.int64).max, 0
    for events in roles:
        steps = events.of(EventKind.STEP, *_PARTS)
        steps = steps[_within(steps, window.first_step, window.last_step)]
        if len(steps):
            starts = steps["start_ns"].astype(np.int64)
            begin = min(begin, int(starts.min()))
            end = max(end, int((starts + steps["duration_ns"].astype(np.int64)).max()))
    return begin, end


def _choose(
    ids: npt.NDArray[np.int64], slowness: npt.NDArray[np.int64], max_steps: int
) -> tuple[Window, ...]:
    """Return all steps where there are few, else a third each: the first, those around the slowest, the last."""
    if len(ids) <= max_steps:
        return (Window(label="all", first_step=int(ids[0]), last_step=int(ids[-1])),)
    size = max(1, max_steps // 3)
    middle = range(size, len(ids) - size)
    begin = middle.start + int(slowness[middle.start : middle.stop].argmax()) - size // 2
    begin = min(max(begin, middle.start), max(middle.start, middle.stop - size))
    slowest = ids[begin : min(begin + size, middle.stop)]
    kept = {"first": ids[:size], "slowest": slowest, "last": ids[-size:]}
    return tuple(
        Window(label=label, first_step=int(part[0]), last_step=int(part[-1])) for label, part in kept.items()
    )


def _worker_row(
    events: RoleEvents, windows: Sequence[Window], holes: Sequence[_Span], zero_ns: int, *, whole: bool
) -> Row:
    records = events.records
    kept = (records["step"] == NO_STEP) & whole
    for window in windows:
        kept |= _within(records, window.first_step, window.last_step)
    chosen = records[kept]
    steps = _slices(chosen[chosen["kind"] == EventKind.STEP], zero_ns)
    for index, (step, following) in enumerate(itertools.pairwise(steps)):  # clocks may err
        steps[index] = _between(step, step.start_ns, min(step.end_ns, following.start_ns))
    inside = [(records[_within(records, *hole)], hole) for hole in holes]
    gaps = [_gap(omitted, hole, zero_ns) for omitted, hole in inside if len(omitted)]
    return _row(events, chosen[np.isin(chosen["kind"], _PARTS)], steps, gaps, zero_ns)


def _server_row(events: RoleEvents, spans: Sequence[_Span], zero_ns: int) -> Row:
    records = events.records
    starts = records["start_ns"].astype(np.int64)
    ends = starts + records["duration_ns"].astype(np.int64)
    kept = np.zeros(len(records), bool)
    for begin, end in spans:
        kept |= (starts >= begin) & (ends <= end)
    chosen = records[kept & np.isin(records["kind"], (*_SERVER_PARTS, EventKind.HOLD))]
    gaps = []
    for (_, begin), (end, _) in itertools.pairwise(spans):
        between = records[(starts > begin) & (ends < end)]
        if len(between):
            steps = (int(between["step"].min()), int(between["step"].max()))
            gaps.append(_gap(between, steps, zero_ns))
    return _row(events, chosen, (), gaps, zero_ns)


def _row(events: RoleEvents, chosen: Records, steps: Sequence[Slice], gaps: list[Gap], zero_ns: int) -> Row:
    chosen = chosen[chosen["duration_ns"] > 0]
    is_hold = chosen["kind"] == EventKind.HOLD
    slices = _laid_out(_slices(chosen[~is_hold], zero_ns), steps)
    marks = events.of(*_MARKS)
    if len(marks) > _MAX_MARKS:
        marks = np.concatenate([marks[: _MAX_MARKS // 2], marks[-_MAX_MARKS // 2 :]])
    return Row(
        role=events.role,
        name=role_name(events.name),
        slices=slices,
        steps=tuple(steps),
        gaps=_fitted(gaps, slices),
        marks=tuple(_slices(marks, zero_ns)),
        holds=tuple(_slices(chosen[is_hold], zero_ns)),
    )


def _slices(parts: Records, zero_ns: int) -> list[Slice]:
    order = np.lexsort((parts["id"], parts["start_ns"]))
    same = ("step", "peer", "num_bytes", "count", "value")
    columns = [parts[name][order].tolist() for name in ("kind", "start_ns", "duration_ns", *same)]
    return [
        Slice(
            kind=EventKind(kind),
            start_ns=start - zero_ns,
            end_ns=start - zero_ns + duration,
            **dict(zip(same, others, strict=True)),
        )
        for kind, start, duration, *others in zip(*columns, strict=True)
    ]


def _gap(inside: Records, steps: tuple[int, int], zero_ns: int) -> Gap:
    durations = inside["duration_ns"].astype(np.int64)

    def spent(kind: EventKind) -> int:
        return int(durations[inside["kind"] == kind].sum())

    return Gap(
        first_step=steps[0],
        last_step=steps[1],
        start_ns=int(inside["start_ns"].min()) - zero_ns,
        end_ns=int((inside["start_ns"].astype(np.int64) + durations).max()) - zero_ns,
        compute_ns=spent(EventKind.COMPUTE),
        exchange_ns=spent(EventKind.EXCHANGE),
        wait_ns=spent(EventKind.WAIT),
        apply_ns=spent(EventKind.APPLY),
    )


def _fitted(gaps: Iterable[Gap], slices: Sequence[Slice]) -> tuple[Gap, ...]:
    """Return the gaps cut to the free time around their middle; a gap without free time is dropped."""
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


def _laid_out(slices: Sequence[Slice], steps: Sequence[Slice]) -> tuple[Slice, ...]:
    """Return the same slices without overlaps: moved inside their step, cut only where that is not enough."""
    starts = [step.start_ns for step in steps]
    # The parts of each step, or a part outside of all steps by itself, with the time that they may have.
    groups: dict[int, tuple[int, int, list[Slice]]] = {}
    for number, part in enumerate(slices):
        place = bisect.bisect_right(starts, part.start_ns) - 1
        if place < 0 or part.start_ns >= steps[place].end_ns:
            groups[-1 - number] = (part.start_ns, part.end_ns, [part])
        else:
            span = (steps[place].start_ns, steps[place].end_ns)
            groups.setdefault(place, (*span, []))[2].append(part)
    out: list[Slice] = []
    cursor = 0
    for group in groups.values():
        for part in _end_to_end(*group):
            cut = _between(part, max(part.start_ns, cursor), part.end_ns)
            if cut.end_ns > cut.start_ns:
                out.append(cut)
                cursor = cut.end_ns
    return tuple(out)


def _end_to_end(begin_ns: int, end_ns: int, parts: Sequence[Slice]) -> list[Slice]:
    """Lay slices end to end: first move later ones forward, then move all back as far as the step's end requires."""
    cursor = begin_ns
    moved: list[Slice] = []
    for part in parts:
        begin = max(part.start_ns, cursor)
        cursor = begin + part.end_ns - part.start_ns
        moved.append(_between(part, begin, cursor))
    limit = end_ns
    for index in range(len(moved) - 1, -1, -1):
        part = moved[index]
        if part.end_ns <= limit:
            break
        begin = limit - (part.end_ns - part.start_ns)
        moved[index] = _between(part, begin, limit)
        limit = begin
    return [_between(part, max(part.start_ns, begin_ns), part.end_ns) for part in moved]


def _between(part: Slice, start_ns: int, end_ns: int) -> Slice:
    if (part.start_ns, part.end_ns) == (start_ns, end_ns):
        return part
    return replace(part, start_ns=start_ns, end_ns=end_ns)


_NEAR_NS = 1_000_000  # a record may begin or end slightly before or after the message that it belongs to


def _wait_arrows(rows: Sequence[Row], tracks: Mapping[int, _Track]) -> Iterator[Arrow]:
    """Return an arrow for each wait whose peer had a visible slice when the wait ended."""
    for row in rows:
        for wait in row.slices:
            if wait.kind is not EventKind.WAIT or wait.peer not in tracks or wait.peer == row.role:
                continue
            # One nanosecond inside both slices, so that a trace viewer attaches the arrow to the right slices.
            target_ns = wait.end_ns - 1
            source_ns = tracks[wait.peer].before(target_ns)
            if source_ns is not None:
                yield Arrow(
                    source=wait.peer,
                    source_ns=source_ns,
                    target=row.role,
                    target_ns=target_ns,
                    step=wait.step,
                )


def _message_arrows(
    tracks: Mapping[int, _Track], roles: Iterable[RoleEvents], spans: Sequence[_Span], zero_ns: int
) -> Iterator[Arrow]:
    """Return an arrow for each message whose two ends lie within `spans` and on visible slices."""
    for (source, target), (sent, received) in _ends(roles, spans).items():
        if source not in tracks or target not in tracks:
            continue
        for number, sends in sent.items():
            for send, arrival in zip(sends, received.get(number, ()), strict=False):
                target_ns = tracks[target].near(arrival.at_ns - zero_ns)
                if target_ns is None:
                    continue
                # A message may arrive before the call that sent it has returned.
                left_ns = max(send.began_ns, min(send.at_ns, arrival.at_ns))
                source_ns = tracks[source].near(left_ns - zero_ns, latest_ns=target_ns)
                if source_ns is not None:
                    yield Arrow(
                        source=source,
                        source_ns=source_ns,
                        target=target,
                        target_ns=target_ns,
                        step=max(send.step, arrival.step),
                        is_message=True,
                        num_bytes=send.num_bytes,
                    )


class _End(NamedTuple):
    """One end of a message."""

    began_ns: int
    step: int
    num_bytes: int
    at_ns: int


_Ends = dict[int, list[_End]]  # by message number, in recording order


def _ends(roles: Iterable[RoleEvents], spans: Sequence[_Span]) -> dict[tuple[int, int], tuple[_Ends, _Ends]]:
    found: dict[tuple[int, int], tuple[_Ends, _Ends]] = {}
    names = ("kind", "peer", "message", "start_ns", "step", "num_bytes")
    for events in roles:
        records = events.of(EventKind.SEND, EventKind.RECEIVE)
        starts = records["start_ns"].astype(np.int64)
        is_send = records["kind"] == EventKind.SEND
        ends = starts + np.where(is_send, records["duration_ns"].astype(np.int64), 0)
        inside = np.zeros(len(records), bool)
        for begin, end in spans:
            inside |= (starts >= begin) & (ends <= end)
        columns = [records[name][inside].tolist() for name in names]
        for kind, peer, number, *one in zip(*columns, ends[inside].tolist(), strict=True):
            sends = kind == EventKind.SEND
            pair = (events.role, peer) if sends else (peer, events.role)
            both = found.setdefault(pair, (defaultdict(list), defaultdict(list)))
            both[0 if sends else 1][number].append(_End(*one))
    return found


class _Track:
    """The slices of a row, searchable by time."""

    def __init__(self, row: Row) -> None:
        self._slices: Sequence[Slice] = row.slices
        self._starts = [part.start_ns for part in row.slices]

    def before(self, at_ns: int) -> int | None:
        """Return the moment if it lies in a slice, else the latest earlier moment that does."""
        index = bisect.bisect_right(self._starts, at_ns) - 1
        return min(at_ns, self._slices[index].end_ns - 1) if index >= 0 else None

    def near(self, at_ns: int, latest_ns: int | None = None) -> int | None:
        """Return the moment if it lies in a slice, else the nearest one that does, within the tolerance."""
        index = bisect.bisect_right(self._starts, at_ns)
        moments = [min(at_ns, part.end_ns - 1) for part in self._slices[max(0, index - 1) : index]]
        moments += self._starts[index : index + 1]
        moments = [moment for moment in moments if latest_ns is None or moment <= latest_ns]
        nearest = min(moments, key=lambda moment: abs(moment - at_ns), default=None)
        return nearest if nearest is not None and abs(nearest - at_ns) <= _NEAR_NS else None
