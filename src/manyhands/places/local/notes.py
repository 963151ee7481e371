"""Typed messages as JSON objects: what the launcher and the roles of a run say to each other in notes.

    REPORTS = TypedNotes(Joined, Left)
    REPORTS.write(Joined(member=3))                  {"kind": "Joined", "member": 3}
    REPORTS.read({"kind": "Joined", "member": 3})    Joined(member=3)

A message is a dataclass of whole and other numbers, text, truth values, enums, tuples and mappings of them, and such
dataclasses again. Reading refuses everything else by its name: a note that nobody meant is an error, and no silence.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from manyhands.places.local.control import ControlError

__all__ = ["TypedNotes"]

_KIND = "kind"


class TypedNotes:
    """The types of message that one side may say to the other."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def write(self, message: Any) -> dict[str, Any]:
        """A message as JSON has it."""
        name = type(message).__name__
        if self._kinds.get(name) is not type(message):
            raise ControlError(f"a {name} is none of {', '.join(self._kinds)}")
        return {_KIND: name, **_written(message)}

    def read(self, payload: Mapping[str, Any]) -> Any:
        """The message that `write` made this of; ProtocolError names what it is not."""
        kind = self._kinds.get(str(payload.get(_KIND)))
        if kind is None:
            raise ControlError(f"{payload.get(_KIND)!r} is none of {', '.join(self._kinds)}")
        values = {name: value for name, value in payload.items() if name != _KIND}
        return _read(kind, values, kind.__name__)


def _written(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _written(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple | list):
        return [_written(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _written(item) for key, item in value.items()}
    return value


def _read(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type that a field has."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint) and isinstance(hint, type):
        return _read_fields(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        if value in hint.__members__:
            return hint[value]
    elif origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(value):
            return tuple(
                _read(kind, item, f"{where}[{number}]")
                for number, (kind, item) in enumerate(zip(kinds, value, strict=True))
            )
    elif origin is Mapping and isinstance(value, dict):
        key, item = arguments
        if key is not int or all(name.lstrip("-").isdecimal() for name in value):
            return {key(name): _read(item, one, f"{where}[{name}]") for name, one in value.items()}
    elif origin in (Union, types.UnionType):
        inner = next(one for one in arguments if one is not types.NoneType)
        return None if value is None else _read(inner, value, where)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint in (int, str, bool) and type(value) is hint:
        return value
    raise ControlError(f"{where} is {value!r}, which is no {getattr(hint, '__name__', hint)}")


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    hints, needed = _shape(kind)
    if not isinstance(value, dict) or not needed <= value.keys() <= hints.keys():
        raise ControlError(f"{where} needs {', '.join(hints)} and has {value!r}")
    return kind(**{name: _read(hints[name], one, f"{where}.{name}") for name, one in value.items()})


@cache
def _shape(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """The types of a dataclass's fields, and which of them must be given."""
    hints = get_type_hints(kind)
    needed = frozenset(field.name for field in fields(kind) if field.default is MISSING)
    return {field.name: hints[field.name] for field in fields(kind)}, needed
