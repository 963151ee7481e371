"""Encoding of typed messages by their annotations alone: nothing is pickled, and nothing received is executed.

A `MessageCoder` is given the message classes, frozen dataclasses or NamedTuples (which are much faster to
construct), and the number of each. A class made of int, float, bool and IntEnum, and of classes made of these, is one
little-endian struct, compiled when the coder is made: int and IntEnum are 8 bytes signed, float 8 bytes, bool 1 byte,
in the order of the fields. Any other class (text, bytes, tuples, None, unions of classes) is JSON: a list of the
fields in order, a nested class again as a list, a union as a list that begins with the class name, and bytes as
hexadecimal digits.

Whatever bytes arrive, `decode` returns a message whose every field has its annotated type and which `encode` would
accept, or raises ProtocolError. Text must be valid UTF-8: a lone surrogate is refused in both directions, because
code that prints, writes or compares that text later would fail.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import IntEnum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from manyhands.errors import UserError
from manyhands.transport.link.message import ProtocolError

__all__ = ["MAX_KIND", "MessageCoder"]

MAX_KIND: Final = (1 << 16) - 1
_INT_LIMIT: Final = 1 << 63
_QUOTED: Final = 60
_TEXT: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False)

Buffer = bytes | bytearray | memoryview
_Encode = Callable[[Any], bytes]
_Decode = Callable[[Buffer], Any]
_Pack = Callable[[Any], Any]
"""Turns a value into what `json.dumps` accepts."""
_Unpack = Callable[[Any, str], Any]
"""Checks what `json.loads` returned and turns it into a value; the text names the field in errors."""


class MessageCoder:
    """The messages of one protocol; `kinds` gives each class its number, which never changes its meaning."""

    def __init__(self, kinds: Mapping[int, type]) -> None:
        """Compile the classes; UserError for a class, a field or a number that cannot be encoded."""
        self._encoders: dict[type, tuple[int, _Encode]] = {}
        self._decoders: dict[int, _Decode] = {}
        for kind, message in kinds.items():
            if not 0 < kind <= MAX_KIND:
                raise UserError(f"kind {kind} of {message.__name__}: must be from 1 to {MAX_KIND}")
            if message in self._encoders:
                raise UserError(f"{message.__name__} has two kinds: {self._encoders[message][0]} and {kind}")
            encode, decode = _compile(message)
            self._encoders[message] = (kind, encode)
            self._decoders[kind] = decode

    def encode(self, message: object) -> tuple[int, bytes]:
        """The kind and the body of `message`; UserError if it is not a message of this coder or a field is out of
        range.
        """
        entry = self._encoders.get(type(message))
        if entry is None:
            raise UserError(f"{type(message).__name__} is no message of this protocol")
        kind, encode = entry
        try:
            return kind, encode(message)
        except (struct.error, ValueError, TypeError) as error:
            raise UserError(f"{message!r} cannot be sent: {error}") from error

    def decode(self, kind: int, body: Buffer) -> Any:
        """The message encoded in `body`; ProtocolError, and no other error, for any other bytes."""
        decode = self._decoders.get(kind)
        if decode is None:
            raise ProtocolError("kind", f"{kind} is no message of this protocol")
        return decode(body)


def _compile(message: type) -> tuple[_Encode, _Decode]:
    flat = _flat_fields(message, "")
    return _as_json(message) if flat is None else _as_struct(message, flat)


def _hints(message: type) -> dict[str, Any]:
    if not _is_record(message):
        raise UserError(f"{message.__name__} is no dataclass and no NamedTuple")
    hints = get_type_hints(message)
    names = getattr(message, "_fields", None) or [field.name for field in fields(message)]
    return {name: hints[name] for name in names}


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields"))


# ── structs ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_CODES: Final[dict[type, str]] = {int: "q", float: "d", bool: "B"}


def _flat_fields(message: type, prefix: str) -> list[tuple[str, Any]] | None:
    """Dotted names and types of all numbers in a class, in order; None if it holds anything else."""
    flat: list[tuple[str, Any]] = []
    for name, hint in _hints(message).items():
        if hint in _CODES or _is_enum(hint):
            flat.append((prefix + name, hint))
        elif _is_record(hint):
            inner = _flat_fields(hint, f"{prefix}{name}.")
            if inner is None:
                return None
            flat += inner
        else:
            return None
    return flat


def _as_struct(message: type, flat: list[tuple[str, Any]]) -> tuple[_Encode, _Decode]:
    layout = struct.Struct("<" + "".join("q" if _is_enum(hint) else _CODES[hint] for _, hint in flat))
    if not flat:
        return lambda _: b"", lambda body: _built(message, {}) if not body else _wrong_size(message, 0, body)
    values = attrgetter(*(name for name, _ in flat))
    build = _builder(message, iter(range(len(flat))))

    def encode(value: Any) -> bytes:
        numbers = values(value)
        return layout.pack(*numbers) if len(flat) > 1 else layout.pack(numbers)

    def decode(body: Buffer) -> Any:
        if len(body) != layout.size:
            _wrong_size(message, layout.size, body)
        return build(layout.unpack(body))

    return encode, decode


def _builder(message: type, places: Any) -> Callable[[tuple[Any, ...]], Any]:
    """Return a function that builds `message` from unpacked numbers, using the next `places`."""
    hints = _hints(message)
    makers: list[tuple[int, Callable[[tuple[Any, ...]], Any] | None]] = []
    for name, hint in hints.items():
        if hint in (int, float):
            makers.append((next(places), None))
        elif _is_record(hint):
            makers.append((0, _builder(hint, places)))
        else:
            makers.append((0, _checker(message, name, hint, next(places))))
    make_tuple = getattr(message, "_make", None)

    def build(numbers: tuple[Any, ...]) -> Any:
        values = [numbers[place] if make is None else make(numbers) for place, make in makers]
        if make_tuple is not None:
            return make_tuple(values)
        return _built(message, dict(zip(hints, values, strict=True)))

    return build


def _checker(message: type, name: str, hint: Any, place: int) -> Callable[[tuple[Any, ...]], Any]:
    """Return a function that converts the number at `place` to a bool or an IntEnum."""
    allowed: dict[int, Any] = {0: False, 1: True} if hint is bool else {int(one): one for one in hint}

    def check(numbers: tuple[Any, ...]) -> Any:
        try:
            return allowed[numbers[place]]
        except KeyError:
            raise ProtocolError(
                f"{message.__name__}.{name}", f"{numbers[place]} is no {hint.__name__}"
            ) from None

    return check


def _wrong_size(message: type, expected: int, body: Buffer) -> None:
    raise ProtocolError(message.__name__, f"is {expected} bytes, not {len(body)}")


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _as_json(message: type) -> tuple[_Encode, _Decode]:
    pack, unpack = _dataclass_rules(message)
    name = message.__name__

    def encode(value: Any) -> bytes:
        return _TEXT.encode(pack(value)).encode()

    def decode(body: Buffer) -> Any:
        try:
            loaded = json.loads(str(body, "utf-8"))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(
                name, f"{bytes(body[:_QUOTED])!r} is no JSON ({type(error).__name__})"
            ) from None
        return unpack(loaded, name)

    return encode, decode


def _rules(hint: Any, where: str) -> tuple[_Pack, _Unpack]:
    """The functions that encode and decode the values of one annotation as JSON."""
    if _is_enum(hint):
        return _pack_int, _enum_unpacker(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if _is_record(hint):
        return _dataclass_rules(hint)
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        return _tuple_rules(get_args(hint)[0], where)
    arms = get_args(hint) if get_origin(hint) in (UnionType, Union) else ()
    if len(arms) == 2 and arms[1] is NoneType:
        return _optional_rules(arms[0], where)
    if arms and all(map(_is_record, arms)):
        return _union_rules(arms)
    raise UserError(
        f"{where}: {hint} cannot travel; allowed are int, float, bool, str, bytes, IntEnum, dataclasses and "
        "NamedTuples of these, one of several such, tuple[..., ...] of any of these, and any of these or None"
    )


def _dataclass_rules(message: type) -> tuple[_Pack, _Unpack]:
    rules = [(name, *_rules(hint, f"{message.__name__}.{name}")) for name, hint in _hints(message).items()]

    def pack(value: Any) -> list[Any]:
        if type(value) is not message:
            raise TypeError(f"{value!r} is no {message.__name__}")
        return [pack_field(getattr(value, name)) for name, pack_field, _ in rules]

    def unpack(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != len(rules):
            raise ProtocolError(where, f"must be a list of {len(rules)}, not {_quote(value)}")
        named = zip(rules, value, strict=True)
        return _built(message, {name: take(item, f"{where}.{name}") for (name, _, take), item in named})

    return pack, unpack


def _tuple_rules(hint: Any, where: str) -> tuple[_Pack, _Unpack]:
    pack_item, unpack_item = _rules(hint, where)

    def pack(value: Any) -> list[Any]:
        if type(value) is not tuple:
            raise TypeError(f"{value!r} is no tuple")
        return [pack_item(item) for item in value]

    def unpack(value: Any, where: str) -> tuple[Any, ...]:
        if type(value) is not list:
            raise ProtocolError(where, f"must be a list, not {_quote(value)}")
        return tuple([unpack_item(item, where) for item in value])

    return pack, unpack


def _optional_rules(hint: Any, where: str) -> tuple[_Pack, _Unpack]:
    pack_some, unpack_some = _rules(hint, where)

    def pack(value: Any) -> Any:
        return None if value is None else pack_some(value)

    def unpack(value: Any, where: str) -> Any:
        return None if value is None else unpack_some(value, where)

    return pack, unpack


def _union_rules(arms: tuple[type, ...]) -> tuple[_Pack, _Unpack]:
    rules = {arm.__name__: (arm, *_dataclass_rules(arm)) for arm in arms}

    def pack(value: Any) -> list[Any]:
        name = type(value).__name__
        if name not in rules:
            raise TypeError(f"{value!r} is none of {', '.join(rules)}")
        return [name, rules[name][1](value)]

    def unpack(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != 2 or type(value[0]) is not str or value[0] not in rules:
            raise ProtocolError(
                where, f"must be a list of one of {', '.join(rules)} and its fields, not {_quote(value)}"
            )
        return rules[value[0]][2](value[1], f"{where}.{value[0]}")

    return pack, unpack


def _pack_int(value: Any) -> int:
    if not isinstance(value, int) or not -_INT_LIMIT <= value < _INT_LIMIT:
        raise TypeError(f"{value!r} is no integer of 64 bits")
    return int(value)


def _pack_float(value: Any) -> float:
    return float(value)


def _pack_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{value!r} is no bool")
    return value


def _pack_str(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is no text")
    if not _is_utf8(value):
        raise ValueError(f"{value[:_QUOTED]!r} has a lone surrogate, which UTF-8 cannot hold")
    return value


def _pack_bytes(value: Any) -> str:
    if type(value) is not bytes:
        raise TypeError(f"{value!r} is no bytes")
    return value.hex()


def _unpack_int(value: Any, where: str) -> int:
    if type(value) is not int or not -_INT_LIMIT <= value < _INT_LIMIT:
        raise ProtocolError(where, f"must be an integer of 64 bits, not {_quote(value)}")
    return value


def _unpack_float(value: Any, where: str) -> float:
    if type(value) is not float:
        raise ProtocolError(where, f"must be a number with a point, not {_quote(value)}")
    return value


def _unpack_bool(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise ProtocolError(where, f"must be true or false, not {_quote(value)}")
    return value


def _unpack_str(value: Any, where: str) -> str:
    if type(value) is not str:
        raise ProtocolError(where, f"must be text, not {_quote(value)}")
    if not _is_utf8(value):
        raise ProtocolError(where, "has a lone surrogate, which UTF-8 cannot hold")
    return value


def _unpack_bytes(value: Any, where: str) -> bytes:
    try:
        data = bytes.fromhex(value)
    except (TypeError, ValueError):
        data = None
    if (
        data is None or data.hex() != value
    ):  # only one spelling is allowed, so that what was signed is what is compared
        raise ProtocolError(where, f"must be pairs of lower-case hexadecimal digits, not {_quote(value)}")
    return data


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _enum_unpacker(hint: type[IntEnum]) -> _Unpack:
    allowed = {int(one): one for one in hint}

    def unpack(value: Any, where: str) -> IntEnum:
        if type(value) is not int or value not in allowed:
            raise ProtocolError(where, f"{_quote(value)} is no {hint.__name__}")
        return allowed[value]

    return unpack


_SCALARS: Final[dict[Any, tuple[_Pack, _Unpack]]] = {
    int: (_pack_int, _unpack_int),
    float: (_pack_float, _unpack_float),
    bool: (_pack_bool, _unpack_bool),
    str: (_pack_str, _unpack_str),
    bytes: (_pack_bytes, _unpack_bytes),
}


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, IntEnum)


def _built(message: type, values: dict[str, Any]) -> Any:
    """Construct a message; an error of its validation becomes a ProtocolError, because the peer sent it."""
    try:
        return message(**values)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ProtocolError(message.__name__, str(error)) from None


def _quote(value: Any) -> str:
    """The beginning of what a peer sent; not its `repr`, which may be as long as the message, or fail."""
    return (
        f"{type(value).__name__} {value[:_QUOTED]!r}" if type(value) is str else f"a {type(value).__name__}"
    )
