"""Layout of one row's slices without overlaps: moved inside their step, cut only where that is not enough.

The parts of a step are recorded as durations that do not overlap, but an exchange that was hidden under the
backward pass is recorded as one piece after it. Inside their step, parts are laid end to end in the order
recorded: durations are exact, and a part lies off its true place by no more than the exchange that was hidden.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from manyhands.observe.analyse.picture import PictureStep, Slice

__all__ = ["laid_out"]


@dataclass(slots=True)
class _Group:
    """Parts that lie inside one step, or a single part outside all steps."""

    begin_ns: int
    end_ns: int
    parts: list[Slice] = field(default_factory=list)


def laid_out(slices: Sequence[Slice], steps: Sequence[PictureStep]) -> tuple[Slice, ...]:
    """Return the same slices without overlaps: moved inside their step, cut only where that is not enough."""
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
    """Lay slices end to end: first move later ones forward, then move all back as far as the step's end requires."""
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
    """Return the slice moved or cut to fit; usually unchanged."""
    if (part.start_ns, part.end_ns) == (start_ns, end_ns):
        return part
    return replace(part, start_ns=start_ns, end_ns=end_ns)
