"""The rows of a shard's log: every update that was applied, and what happened to the others.

One JSON object per line. The rows of one shard suffice to recompute the staleness bound and to prove that nothing
was applied twice. Those of all shards name, for every update, its batch and the version of each shard that it
read, so that a run can be replayed in the recorded order. A primary and its backup write the same rows.
"""

from __future__ import annotations

import json
from functools import cache
from math import isfinite
from typing import Any, NamedTuple, TypeVar

from manyhands.data.batches import MAX_SEED
from manyhands.errors import DataError


class UpdateRow(NamedTuple):
    """One update within a step."""

    slot: int
    clock: int
    batch: int
    part: int
    parts: int
    member: int
    read_version: int
    staleness: int
    weight: float
    factor: float  # the gradient's factor in the weighted sum
    read_term: int = 0  # the shard's at the read; of an older one, only what a snapshot kept counts
    rows_version: int = -1  # the version at which table rows were read; -1 if none were
    carrier: int = -1  # the slot whose push brought its gradient, in a sum; -1 if its own did

    @property
    def name(self) -> tuple[int, int, int]:
        """(slot, clock, member): the update, and the member that computed it."""
        return self.slot, self.clock, self.member


class StepRow(NamedTuple):
    """One optimizer step: `version` is the shard's after it, `sequence` the log entry that completed it."""

    shard: int
    term: int
    sequence: int
    version: int
    rate: float
    updates: tuple[UpdateRow, ...]


class LateRow(NamedTuple):
    """An update that its step did not wait for, sent or not."""

    shard: int
    term: int
    sequence: int
    slot: int
    clock: int


class SkippedRow(NamedTuple):
    """An update without a gradient, since its worker found it non-finite."""

    shard: int
    term: int
    sequence: int
    slot: int
    clock: int
    batch: int
    member: int


class LostRow(NamedTuple):
    """Updates in clocks [first, until) that were lost with a server or a worker."""

    shard: int
    term: int
    sequence: int
    slot: int
    first: int
    until: int


class SlotsRow(NamedTuple):
    """From clock `start` on these slots are active; `base` is the first batch that they distribute."""

    shard: int
    term: int
    sequence: int
    start: int
    base: int
    slots: tuple[int, ...]


class RestoredRow(NamedTuple):
    """The shard went back to a snapshot: rows of lower terms beyond `sequence` are discarded."""

    shard: int
    term: int
    sequence: int
    version: int


Row = StepRow | LateRow | SkippedRow | LostRow | SlotsRow | RestoredRow

_KINDS: dict[str, type[Row]] = {
    "step": StepRow,
    "late": LateRow,
    "skipped": SkippedRow,
    "lost": LostRow,
    "slots": SlotsRow,
    "restored": RestoredRow,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


_UPDATE = "{{{}}}".format(
    ",".join(f'"{name}":%{"r" if name in ("weight", "factor") else "d"}' for name in UpdateRow._fields)
)
_STEP = '{"row":"step","shard":%d,"term":%d,"sequence":%d,"version":%d,"rate":%r,"updates":[%s]}'


def row_to_json(row: Row) -> str:
    """A row as one line, without the newline.

    One is written for every optimizer step: those are formatted here, in a tenth of the time that `json` takes.
    """
    table = {}
    if isinstance(row, StepRow):
        if all(isfinite(number) for one in row.updates for number in (row.rate, one.weight, one.factor)):
            return _STEP % (*row[:-1], ",".join([_UPDATE % one for one in row.updates]))
        table = {"updates": [one._asdict() for one in row.updates]}
    return json.dumps({"row": _NAMES[type(row)], **row._asdict(), **table}, separators=(",", ":"))


def row_from_json(line: str) -> Row:
    """Parse a line of `row_to_json`; a DataError says what is wrong with any other line."""
    try:
        table = parse_record(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"a line of the log is not a valid JSON row ({error}): {line[:80]!r}") from None
    if not isinstance(table, dict) or str(table.get("row")) not in _KINDS:
        raise DataError(
            f"a line of the log is not a row: {line[:80]!r}; its kind must be one of {', '.join(_KINDS)}"
        )
    kind = _KINDS[str(table.pop("row"))]
    where = f"a line of the log, a {_NAMES[kind]} row, {line[:80]!r}"
    if kind is StepRow and isinstance(table.get("updates"), list):
        table["updates"] = tuple(
            checked(UpdateRow, _with_carrier(update), f"{where}, update {number}")
            for number, update in enumerate(table["updates"])
        )
    if kind is SlotsRow and isinstance(table.get("slots"), list):
        table["slots"] = tuple(table["slots"])
    row = checked(kind, table, where)
    if isinstance(row, LostRow) and not 0 <= row.until - row.first <= _MOST_LOST:
        raise DataError(
            f"{where}: it has {row.until - row.first} lost clocks; at least 0 and at most {_MOST_LOST} are allowed"
        )
    return row


def _with_carrier(update: Any) -> Any:
    """An update of a log from before there were carriers brought its own gradient."""
    return {"carrier": -1, **update} if isinstance(update, dict) else update


_MOST_LOST = 1 << 24  # updates of one worker that one restore lost: readers go through them one by one


# ── fields of a record ────────────────────
# Converts the JSON values of a record to its dataclass: exactly its fields, of their types and in range.
#
# Readers of a record size loops by its numbers, divide by them and look them up. A value that no run writes is
# rejected here, by the name of the field, before any of that.

_MOST = 1 << 53  # the integers that a float holds exactly: dividing by one or drawing from one cannot fail
_LIMITS = {
    "threads": (1, _MOST),
    "workers": (1, _MOST),
    "seed": (0, MAX_SEED),
    "parts": (1, _MOST),
    "rows_version": (-1, _MOST),
    "carrier": (-1, _MOST),
    "rows_versions": (-1, _MOST),
    "staleness": (-_MOST, _MOST),  # a difference, of which an audit says whether it may be negative
}
"""The minimum and maximum of integers by field name, where these are not 0 and `_MOST`."""

_LEAST_PART = 2.0**-53  # of a batch, where it is not nothing
_VAST = 1e300
_SHOWN = 80  # characters of a value
_T = TypeVar("_T")


def parse_record(text: str | bytes) -> Any:
    """Parse JSON; ValueError if the text is not JSON or an object in it has a duplicate key."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            twice = next(name for at, (name, _) in enumerate(pairs) if name in dict(pairs[:at]))
            raise ValueError(f"the key {twice[:_SHOWN]!r} appears twice")
        return table

    return json.loads(text, object_pairs_hook=once)


def checked(kind: type[_T], table: Any, where: str) -> _T:
    """`table` as a value of `kind`; otherwise a DataError that begins with `where` and names the bad field."""
    wanted = _wanted(kind)  # type: ignore[arg-type]  # a class is hashable
    if not isinstance(table, dict) or table.keys() != wanted.keys():
        raise DataError(f"{where}: it must have exactly the fields {', '.join(wanted)}")
    for name, hint in wanted.items():
        if not _fits(name, hint, table[name]):
            shown = repr(table[name])
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
            within = " with at least one item" if "Row" in hint else ""
            if "int" in hint:
                within = " from {} to {}".format(*_LIMITS.get(name, (0, _MOST)))
            elif hint == "float":
                within = f" from {_LEAST_PART:g} to 1, or 0" if name == "weight" else f" within ±{_VAST:g}"
            raise DataError(f"{where}: {name}={shown} must be {hint}{within}")
    return kind(**table)


@cache
def _wanted(kind: type[Any]) -> dict[str, str]:
    return {name: str(getattr(hint, "__forward_arg__", hint)) for name, hint in kind.__annotations__.items()}


def _fits(name: str, hint: str, value: Any) -> bool:
    match hint:
        case "int":
            low, high = _LIMITS.get(name, (0, _MOST))
            return type(value) is int and low <= value <= high
        case "float":  # what is not finite is not between
            good = type(value) in (int, float) and -_VAST <= value <= _VAST
            return good and (name != "weight" or value == 0 or _LEAST_PART <= value <= 1)
        case "str" | "bool":
            return type(value).__name__ == hint
        case "tuple[int, ...]" | "tuple[str, ...]":
            item = hint[len("tuple[") :].partition(",")[0]
            return type(value) is tuple and all(_fits(name, item, one) for one in value)
    return type(value) is tuple and len(value) > 0  # of records, which were checked one by one
