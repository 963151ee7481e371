"""Converts the JSON values of a record to its dataclass: exactly its fields, of their types and in range.

Readers of a record size loops by its numbers, divide by them and look them up. A value that no run writes is
rejected here, by the name of the field, before any of that.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

from manyhands.data.batch_plan import MAX_SEED
from manyhands.errors import DataError

__all__ = ["checked", "parse_record"]

_MOST = 1 << 53  # the integers that a float holds exactly: dividing by one or drawing from one cannot fail
_LIMITS = {
    "threads": (1, _MOST),
    "workers": (1, _MOST),
    "seed": (0, MAX_SEED),
    "parts": (1, _MOST),
    "rows_version": (-1, _MOST),
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
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(name for at, (name, _) in enumerate(pairs) if name in dict(pairs[:at]))
        raise ValueError(f"the key {twice[:_SHOWN]!r} comes twice")
    return table


def checked(kind: type[_T], table: Any, where: str) -> _T:
    """`table` as a value of `kind`; otherwise a DataError that begins with `where` and names the bad field."""
    wanted = _wanted(kind)  # type: ignore[arg-type]  # a class is hashable
    if not isinstance(table, dict) or table.keys() != wanted.keys():
        raise DataError(f"{where}: it must have exactly the fields {', '.join(wanted)}")
    for name, hint in wanted.items():
        if not _fits(name, hint, table[name]):
            shown = repr(table[name])
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
            raise DataError(f"{where}: {name}={shown} is no {hint}{_range(name, hint)}")
    return kind(**table)


@cache
def _wanted(kind: type[Any]) -> dict[str, str]:
    return {name: str(getattr(hint, "__forward_arg__", hint)) for name, hint in kind.__annotations__.items()}


def _fits(name: str, hint: str, value: Any) -> bool:
    match hint:
        case "int":
            low, high = _limits(name)
            return type(value) is int and low <= value <= high
        case "float":
            good = (
                type(value) in (int, float) and -_VAST <= value <= _VAST
            )  # what is not finite is not between
            return good and (name != "weight" or value == 0 or _LEAST_PART <= value <= 1)
        case "str" | "bool":
            return type(value).__name__ == hint
        case "tuple[int, ...]" | "tuple[str, ...]":
            item = hint[len("tuple[") :].partition(",")[0]
            return type(value) is tuple and all(_fits(name, item, one) for one in value)
    return type(value) is tuple and len(value) > 0  # of records, which were checked one by one


def _limits(name: str) -> tuple[int, int]:
    return _LIMITS.get(name, (0, _MOST))


def _range(name: str, hint: str) -> str:
    """The allowed range of a field, for the error message."""
    if "int" in hint:
        low, high = _limits(name)
        return f" from {low} to {high}"
    if hint == "float":
        return f" from {_LEAST_PART:g} to 1, nor 0" if name == "weight" else f" within {_VAST:g}"
    return " with at least one" if "Row" in hint else ""
