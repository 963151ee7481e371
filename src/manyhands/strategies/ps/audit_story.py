"""Merges the logs of all servers that kept one shard into one history. Pure.

A server writes from the point where it was given the shard (a **stint**: it opens with the slots in force, or
with a return to a snapshot) to the point where it stopped. Within a stint no row may be missing. Two stints that
overlap must have the same rows in the overlap, since a primary and its backup commit the same entries. A stint
may end anywhere, as its server may die; rows between two stints may be missing if a disk was full. If a shard
went back to a snapshot, the later rows of the older term are discarded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from manyhands.strategies.ps.log_rows import RestoredRow, Row, SlotsRow, StepRow, UpdateRow

__all__ = ["Story", "tell", "where"]

_Key = tuple[int, int, int]
"""(term, sequence, which row of that entry)."""


@dataclass(slots=True)
class Story:
    """The merged rows in order, each once."""

    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Contradictions between the logs."""

    gaps: set[tuple[int, int]] = field(default_factory=set)
    """(version, next version) pairs within a stint that `problems` already reports."""


@dataclass(slots=True)
class _Stint:
    """The rows that one server wrote from one opening on."""

    begin: int
    slots: list[SlotsRow] = field(default_factory=list)
    rows: dict[_Key, Row] = field(default_factory=dict)
    """All rows except those of slots."""

    version: int | None = None
    """The version of the last step, if known."""


def tell(files: Sequence[Iterable[Row]]) -> Story:
    """Merge these files, given in any order, into one history."""
    logs = [list(file) for file in files]
    ends = {row.term: row.sequence for log in logs for row in log if isinstance(row, RestoredRow)}
    terms = sorted(ends)

    def happened(row: Row) -> bool:
        return all(row.sequence <= ends[term] for term in terms[bisect_right(terms, row.term) :])

    story = Story()
    merged: dict[_Key, Row] = {}
    slots: dict[
        Row, _Key
    ] = {}  # every stint opens with all rows of slots in force, each of which counts once
    stints: list[_Stint] = []
    for log in logs:
        stints += _stints([row for row in log if happened(row)], story)
    for stint in stints:
        for opening in stint.slots:
            slots.setdefault(opening, (opening.term, opening.sequence, -1))
        for key, row in stint.rows.items():
            if merged.setdefault(key, row) != row:
                story.problems.append(
                    f"two replicas wrote different rows about {_difference(merged[key], row)}"
                )
    order = sorted(merged)
    for stint in stints:
        _require_all(stint, order, merged, story)
    happenings = [(key, row) for row, key in slots.items()] + list(merged.items())
    story.rows = [row for _, row in sorted(happenings, key=lambda one: one[0])]
    return story


def where(row: Row) -> str:
    if isinstance(row, StepRow) and row.updates:
        first = row.updates[0]
        return f"version {row.version} (slot {first.slot}, clock {first.clock})"
    return f"entry {row.sequence}"


def _stints(rows: list[Row], story: Story) -> list[_Stint]:
    """The stints of one file; a step that does not follow its predecessor within a stint is reported."""
    stints: list[_Stint] = []
    first = next((row for row in rows if isinstance(row, SlotsRow)), None)
    before: Row | None = None
    place, index = (-1, -1), 0
    for row in rows:
        again = isinstance(row, SlotsRow) and not isinstance(before, SlotsRow | RestoredRow)
        if not stints or isinstance(row, RestoredRow) or (again and _is_opening(row, first)):
            stints.append(_Stint(begin=row.sequence if isinstance(row, SlotsRow | RestoredRow) else -1))
            stints[-1].version = _version_at(row)
            place = (-1, -1)
        stint, before = stints[-1], row
        if isinstance(row, SlotsRow):
            stint.slots.append(row)
            continue
        if (row.term, row.sequence) < place:
            story.problems.append(f"entry {row.sequence} follows entry {place[1]}")
        index = index + 1 if place == (row.term, row.sequence) else 0
        place = (row.term, row.sequence)
        stint.rows[(*place, index)] = row
        if isinstance(row, StepRow):
            if stint.version is not None and row.version != stint.version + 1:
                story.problems.append(f"version {row.version} follows version {stint.version}")
                story.gaps.add((stint.version, row.version))
            stint.version = row.version
    return stints


def _is_opening(row: Row, first: SlotsRow | None) -> bool:
    """Whether a row of slots repeats the file's first one: the server was given the shard again."""
    assert isinstance(row, SlotsRow), "nothing else is asked about"
    return first is None or (row.start, row.base, row.slots) == (first.start, first.base, first.slots)


def _version_at(opening: Row) -> int | None:
    """The version at which a stint begins; None for a server that was given the shard during the run."""
    if isinstance(opening, RestoredRow):
        return opening.version
    return None if isinstance(opening, SlotsRow) and (opening.term, opening.sequence) != (0, 0) else 0


def _require_all(stint: _Stint, order: list[_Key], merged: dict[_Key, Row], story: Story) -> None:
    """Check that a stint has every row that any server wrote between its opening and its last entry; the last may
    be cut.
    """
    if not stint.rows:
        return
    term, end, _ = max(stint.rows)
    for key in order[bisect_left(order, (term, stint.begin + 1, 0)) : bisect_left(order, (term, end, 0))]:
        if key not in stint.rows:
            story.problems.append(f"one replica's log lacks {where(merged[key])}, which another's has")


def _difference(one: Row, other: Row) -> str:
    pairs = zip(_updates(one), _updates(other), strict=False)
    update = next((a for a, b in pairs if a != b), None)
    if not isinstance(one, StepRow) or update is None:
        return where(one)
    return f"version {one.version} (slot {update.slot}, clock {update.clock})"


def _updates(row: Row) -> tuple[UpdateRow, ...]:
    return row.updates if isinstance(row, StepRow) else ()
