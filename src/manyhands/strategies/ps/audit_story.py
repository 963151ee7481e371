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

from manyhands.strategies.ps.log_rows import RestoredRow, Row, SlotsRow, StepRow

__all__ = ["Story", "tell", "where"]

_Key = tuple[int, int, int]  # (term, sequence, which row of that entry)


@dataclass(slots=True)
class Story:
    """The merged rows in order, each once."""

    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # contradictions between the logs
    gaps: set[tuple[int, int]] = field(default_factory=set)
    """(version, next version) pairs within a stint that `problems` already reports."""


@dataclass(slots=True)
class _Stint:
    """The rows that one server wrote from one opening on."""

    begin: int
    slots: list[SlotsRow] = field(default_factory=list)
    rows: dict[_Key, Row] = field(default_factory=dict)  # except those of slots
    version: int | None = None  # of the last step, if known


def tell(files: Sequence[Iterable[Row]]) -> Story:
    """Merge these files, given in any order, into one history."""
    logs = [list(file) for file in files]
    ends = {row.term: row.sequence for log in logs for row in log if isinstance(row, RestoredRow)}
    terms = sorted(ends)

    def happened(row: Row) -> bool:
        return all(row.sequence <= ends[term] for term in terms[bisect_right(terms, row.term) :])

    story = Story()
    merged: dict[_Key, Row] = {}
    slots: dict[Row, _Key] = {}  # every stint opens with all of those in force, each of which counts once
    stints = [stint for log in logs for stint in _stints([row for row in log if happened(row)], story)]
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
        # It has every row that any server wrote between its opening and its last entry, which may be cut.
        term, end, _ = max(stint.rows, default=(-1, -1, -1))
        after, until = bisect_left(order, (term, stint.begin + 1, 0)), bisect_left(order, (term, end, 0))
        story.problems += [
            f"one replica's log lacks {where(merged[key])}, which another's has"
            for key in order[after:until]
            if key not in stint.rows
        ]
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
        # A row of slots that repeats the file's first one opens a stint: the server was given the shard again.
        if not stints or isinstance(row, RestoredRow) or (again and _table(row) == _table(first)):
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


def _table(row: Row | None) -> tuple[int, int, tuple[int, ...]] | None:
    return (row.start, row.base, row.slots) if isinstance(row, SlotsRow) else None


def _version_at(opening: Row) -> int | None:
    """The version at which a stint begins; None for a server that was given the shard during the run."""
    if isinstance(opening, RestoredRow):
        return opening.version
    return None if isinstance(opening, SlotsRow) and (opening.term, opening.sequence) != (0, 0) else 0


def _difference(one: Row, other: Row) -> str:
    if isinstance(one, StepRow) and isinstance(other, StepRow):
        for here, there in zip(one.updates, other.updates, strict=False):
            if here != there:
                return f"version {one.version} (slot {here.slot}, clock {here.clock})"
    return where(one)
