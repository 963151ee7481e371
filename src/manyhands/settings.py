"""The settings in a strategy's text, `key=value`: how each field of the value is read, checked and printed."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.errors import UserError, nearest

__all__ = [
    "MIB",
    "Setting",
    "buckets_setting",
    "check_buckets",
    "check_choice",
    "check_count",
    "check_link",
    "enough",
    "link_setting",
    "parse_size",
    "read_settings",
    "setting",
    "settings_of",
    "show_size",
    "switch_setting",
    "whole_number",
]

MIB = 1024 * 1024
LINKS = ("shared", "tcp")
_SWITCH = {"yes": True, "no": False, "true": True, "false": False}
_UNITS = {"b": 1, "kib": 1024, "mib": MIB, "gib": 1024 * MIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How one field of a strategy is read from text and printed."""

    default: Any
    read: Callable[[str], Any]
    show: Callable[[Any], str]


def setting(default: Any, read: Callable[[str], Any], show: Callable[[Any], str] = str) -> Any:
    """A field of a strategy with its text form; `read` raises UserError for a text that makes no sense."""
    return dataclasses.field(default=default, metadata={"read": read, "show": show})


def settings_of(kind: type[Any]) -> dict[str, Setting]:
    """The settings of a strategy's class, in the order of its fields."""
    return {
        field.name: Setting(default=field.default, read=field.metadata["read"], show=field.metadata["show"])
        for field in dataclasses.fields(kind)
    }


def read_settings(
    word: str, allowed: Mapping[str, Setting], texts: list[str], refused: Mapping[str, str]
) -> dict[str, Any]:
    """The values that `texts` give to the settings of the strategy `word`; UserError names the one that is wrong.

    `refused` has a sentence for each setting that other strategies have, and this one, if it has not, for a reason.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in allowed and name in refused:
            raise UserError(f"{word} {text}: {refused[name]}")
        if name not in allowed:
            tail = nearest(name, allowed) if allowed else "it takes none"
            raise UserError(f"{word} has no setting {name!r}; {tail}")
        if not equals or not value:
            example = allowed[name].show(allowed[name].default)
            raise UserError(f"{word} setting {name!r} needs a value, as in {name}={example}")
        if name in values:
            raise UserError(f"{word} setting {name!r} is given twice")
        try:
            values[name] = allowed[name].read(value)
        except UserError as error:
            raise UserError(f"{word} {text}: {error}") from error
    return values


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    """Raise the UserError that lists what `name` may be, unless `value` is among it."""
    if value not in allowed:
        raise UserError(f"unknown {name} {value!r}; {nearest(value, allowed)}")


def check_count(name: str, value: object) -> None:
    """Raise UserError unless `value` is an integer of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{name}={value!r} must be a whole number of at least 1")


def whole_number(text: str) -> int:
    """Read an integer; the strategy that it is for says which ones it takes."""
    if re.fullmatch(r"[+-]?[0-9]+", text) is None:
        raise UserError(f"{text!r} is not an integer")
    return int(text)


def switch_setting(default: bool = False) -> Any:
    """`name=yes` or `name=no`; true and false are read as well."""

    def read(text: str) -> bool:
        check_choice("value", text, tuple(_SWITCH))
        return _SWITCH[text]

    return setting(default, read, lambda value: "yes" if value else "no")


def parse_size(text: str) -> int:
    """`25MiB` as a number of bytes; KiB, MiB, GiB, kB, MB, GB and plain bytes are allowed."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = (match.group(2) or "b") if match else ""
    if match is None or unit not in _UNITS:
        raise UserError(f"size {text!r} is not a number of bytes; write it as 25MiB, 512KiB or 1000000")
    return int(float(match.group(1)) * _UNITS[unit])


def show_size(num_bytes: int) -> str:
    """The shortest exact text of a size, which `parse_size` reads back."""
    for unit, size in (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", 1024)):
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)


def enough(num_bytes: float) -> str:
    """A size of at least `num_bytes` in few digits, as a user would write it for a limit."""
    unit = 1024 if num_bytes <= MIB else MIB
    return show_size(math.ceil(num_bytes / unit) * unit)


def buckets_setting() -> Any:
    """`buckets=25MiB`: how much of the gradient travels at once."""
    return setting(25 * MIB, parse_size, show_size)


def link_setting() -> Any:
    """`link=shared`: whether processes of one host talk through memory that they share, or by `tcp` on loopback."""
    return setting("shared", str)


def check_link(link: str, more: Sequence[str] = ()) -> None:
    """Raise the UserError that lists what `link` may be, `more` than usual, unless it is among it."""
    check_choice("link", link, (*LINKS, *more))


def check_buckets(num_bytes: int) -> None:
    """Raise UserError for buckets that hold nothing."""
    if not isinstance(num_bytes, int) or num_bytes < 1:
        raise UserError(f"buckets={num_bytes!r} must be at least one byte; 25MiB is usual")
