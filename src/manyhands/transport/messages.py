"""The one serializer: messages become bytes by their annotations alone, nothing is pickled, nothing received executed.

A message is a frozen dataclass or a NamedTuple, and its bytes are those of its fields in order, little-endian:

    int, IntEnum            8 bytes, signed; U32: 4 bytes, unsigned; another Enum: its place in the class
    float · bool            8 bytes · 1 byte
    str · bytes             4 bytes of length, then UTF-8 · the bytes; Annotated[bytes, 32]: exactly 32, no length
    tuple[T, ...]           4 bytes of count, then the items; tuple[T, S]: the items alone
    Mapping[K, V]           4 bytes of count, then keys and values; numbers as keys ascend
    Mapping[str, Any]       JSON, as text: what an application says
    T | None, A | B         1 byte, which of them, then its bytes
    dataclass, NamedTuple   its fields

A class of numbers alone is packed by one `struct`. NamedTuples are much faster to construct than dataclasses.

Whatever bytes arrive, `decode` returns a message whose every field has its annotated type and which `encode` would
accept, or raises ProtocolError. No count or length is believed beyond the bytes that are there. Text must be valid
UTF-8: a lone surrogate is refused in both directions, because code that prints or writes it later would fail.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum, IntEnum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from manyhands.errors import ManyhandsError, UserError

MAX_KIND: Final = (1 << 16) - 1
_QUOTED: Final = 60
_CODES: Final[dict[Any, str]] = {int: "q", float: "d", bool: "B"}

U32 = Annotated[int, "I"]  # an integer of 4 bytes without a sign

Buffer = bytes | bytearray | memoryview


class ProtocolError(ManyhandsError):
    """The peer sent what this protocol does not allow; `field` names the part of the message that is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"link protocol, field {field!r}: {message}")
        self.field = field


class _Input:
    """Received bytes, and how many of them were read."""

    __slots__ = ("at", "data")

    def __init__(self, data: Buffer) -> None:
        self.data = memoryview(data)
        self.at = 0

    def take(self, num_bytes: int, where: str) -> memoryview:
        begin, self.at = self.at, self.at + num_bytes
        if self.at > len(self.data):
            raise ProtocolError(where, f"needs {num_bytes} bytes, but {len(self.data) - begin} are left")
        return self.data[begin : self.at]

    def count(self, where: str) -> int:
        """A length; not above the bytes that are left, so nothing is allocated for what never comes."""
        count = int.from_bytes(self.take(4, where), "little")
        if count > len(self.data) - self.at:
            raise ProtocolError(where, f"{count} announced, but {len(self.data) - self.at} bytes are left")
        return count


_Check = tuple[int, dict[int, Any], str, Any]
"""A number's place, the values that it may stand for, and the name and type of its field."""
_Write = Callable[[Any], bytes]
_Read = Callable[[_Input, str], Any]  # reads a value; the text names the field in errors


class MessageCoder:
    """The messages of one protocol; `kinds` gives each class its number, which never changes its meaning."""

    def __init__(self, kinds: Mapping[int, type]) -> None:
        """Compile the classes; UserError for a class, a field or a number that cannot be encoded."""
        self._encoders: dict[type, tuple[int, _Write]] = {}
        self._decoders: dict[int, Callable[[Buffer], Any]] = {}
        for kind, message in kinds.items():
            if not 0 < kind <= MAX_KIND:
                raise UserError(f"kind {kind} of {message.__name__} must be from 1 to {MAX_KIND}")
            if message in self._encoders:
                raise UserError(f"{message.__name__} has two kinds: {self._encoders[message][0]} and {kind}")
            encode, self._decoders[kind] = _compile(message)
            self._encoders[message] = (kind, encode)

    def encode(self, message: object) -> tuple[int, bytes]:
        """The kind and the body of `message`; UserError if it is not a message of this coder or a field is wrong."""
        entry = self._encoders.get(type(message))
        if entry is None:
            names = ", ".join(one.__name__ for one in self._encoders)
            raise UserError(f"a {type(message).__name__} is not a message of this protocol; use {names}")
        kind, encode = entry
        try:
            return kind, encode(message)
        except (struct.error, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"a {type(message).__name__} cannot be sent: {error}") from error

    def decode(self, kind: int, body: Buffer) -> Any:
        """The message encoded in `body`; ProtocolError, and no other error, for any other bytes."""
        decode = self._decoders.get(kind)
        if decode is None:
            raise ProtocolError("kind", f"{kind} is not a message of this protocol")
        return decode(body)


def _compile(message: type) -> tuple[_Write, Callable[[Buffer], Any]]:
    flat = _flat_fields(message, "")
    if flat:
        return _as_struct(message, flat)
    write, read = _dataclass_rules(message)

    def decode(body: Buffer) -> Any:
        given = _Input(body)
        value = read(given, message.__name__)
        if given.at != len(given.data):
            raise ProtocolError(message.__name__, f"ends {len(given.data) - given.at} bytes before its body")
        return value

    return write, decode


def _hints(message: type) -> dict[str, Any]:
    if not _is_record(message):
        raise UserError(f"{message.__name__} is neither a dataclass nor a NamedTuple")
    hints = get_type_hints(message, include_extras=True)
    names = getattr(message, "_fields", None) or [field.name for field in fields(message)]
    return {name: hints[name] for name in names}


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields"))


def _code(hint: Any) -> str | None:
    if hint == U32:
        return "I"
    return "q" if isinstance(hint, type) and issubclass(hint, IntEnum) else _CODES.get(hint)


def _allowed(hint: Any) -> dict[int, Any] | None:
    if hint is bool:
        return {0: False, 1: True}
    if isinstance(hint, type) and issubclass(hint, Enum):
        is_number = issubclass(hint, IntEnum)
        return {int(one.value) if is_number else place: one for place, one in enumerate(hint)}
    return None


def _flat_fields(message: type, prefix: str) -> list[tuple[str, Any]] | None:
    """Dotted names and types of all numbers in a class, in order; None if it holds anything else."""
    flat: list[tuple[str, Any]] = []
    for name, hint in _hints(message).items():
        if _code(hint) is not None:
            flat.append((prefix + name, hint))
            continue
        inner = _flat_fields(hint, f"{prefix}{name}.") if _is_record(hint) else None
        if inner is None:
            return None
        flat += inner
    return flat


def _as_struct(message: type, flat: list[tuple[str, Any]]) -> tuple[_Write, Callable[[Buffer], Any]]:
    layout = struct.Struct("<" + "".join(str(_code(hint)) for _, hint in flat))
    values = attrgetter(*(name for name, _ in flat))
    is_tuple = hasattr(message, "_fields") and not any("." in name for name, _ in flat)
    checks: list[_Check] = []
    build = _builder(message, iter(range(len(flat))), checks)

    def encode(value: Any) -> bytes:
        numbers = value if is_tuple else values(value)
        return layout.pack(*numbers) if is_tuple or len(flat) > 1 else layout.pack(numbers)

    def decode(body: Buffer) -> Any:
        if len(body) != layout.size:
            raise ProtocolError(message.__name__, f"must have {layout.size} bytes, not {len(body)}")
        numbers = list(layout.unpack(body))
        for place, allowed, where, hint in checks:
            number = numbers[place]
            if number not in allowed:
                raise ProtocolError(where, f"{number} is not a {hint.__name__}")
            numbers[place] = allowed[number]
        return build(numbers)

    return encode, decode


def _builder(message: type, places: Any, checks: list[_Check]) -> Callable[[list[Any]], Any]:
    """Return a function that builds `message` from its values, using the next `places`; adds to the `checks`."""
    hints = _hints(message)
    makers: list[tuple[int, Callable[[list[Any]], Any] | None]] = []
    for name, hint in hints.items():
        if _code(hint) is None:
            makers.append((0, _builder(hint, places, checks)))
            continue
        place, allowed = next(places), _allowed(hint)
        makers.append((place, None))
        if allowed is not None:
            checks.append((place, allowed, f"{message.__name__}.{name}", hint))
    make_tuple = getattr(message, "_make", None)
    first = makers[0][0] if makers and all(make is None for _, make in makers) else -1
    end = first + len(makers)

    def build(numbers: list[Any]) -> Any:
        if first >= 0:
            values = numbers[first:end]
        else:
            values = [numbers[place] if make is None else make(numbers) for place, make in makers]
        if make_tuple is not None:
            return make_tuple(values)
        return _built(message, dict(zip(hints, values, strict=True)))

    return build


def _rules(hint: Any, where: str) -> tuple[_Write, _Read]:
    origin, arguments = get_origin(hint), get_args(hint)
    if _code(hint) is not None or _allowed(hint) is not None:
        return _number_rules(hint)
    if hint is str or hint is bytes:
        return _sized_rules(hint)
    if origin is Annotated and arguments[0] is bytes:
        return _sized_rules(bytes, arguments[1])
    if _is_record(hint):
        return _dataclass_rules(hint)
    if origin is tuple:
        return _tuple_rules(arguments, where)
    if origin is Mapping and arguments == (str, Any):
        return _json_rules()
    if origin is Mapping:
        return _mapping_rules(arguments[0], arguments[1], where)
    is_union = origin in (UnionType, Union)
    if is_union and all(arm is NoneType or _is_record(arm) or len(arguments) == 2 for arm in arguments):
        return _union_rules(arguments, where)
    raise UserError(
        f"{where}: {hint} cannot be sent; allowed are int, float, bool, str, bytes, Enum, dataclasses and NamedTuples "
        "of these, one of several such, tuples and Mappings of any of these, any of these or None, Mapping[str, Any]"
    )


def _number_rules(hint: Any) -> tuple[_Write, _Read]:
    layout, allowed = struct.Struct(f"<{_code(hint) or 'q'}"), _allowed(hint)

    def write(value: Any) -> bytes:
        if allowed is None:
            return layout.pack(value)
        if type(value) is not hint:
            raise TypeError(f"{_quote(value)} is not a {hint.__name__}")
        return layout.pack(next(sent for sent, one in allowed.items() if one is value))

    def read(given: _Input, where: str) -> Any:
        (number,) = layout.unpack(given.take(layout.size, where))
        if allowed is None:
            return number
        if number not in allowed:
            raise ProtocolError(where, f"{number} is not a {hint.__name__}")
        return allowed[number]

    return write, read


def _sized_rules(hint: Any, fixed: int | None = None) -> tuple[_Write, _Read]:
    """Text or bytes behind their length, or exactly `fixed` bytes."""

    def write(value: Any) -> bytes:
        if type(value) is not hint or fixed not in (None, len(value)):
            size = f" of {fixed} bytes" if fixed else ""
            raise TypeError(f"{_quote(value)} is not a {hint.__name__}{size}")
        data: bytes = value.encode() if hint is str else value
        return data if fixed else struct.pack("<I", len(data)) + data

    def read(given: _Input, where: str) -> Any:
        data = bytes(given.take(fixed or given.count(where), where))
        return _text(data, where) if hint is str else data

    return write, read


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ProtocolError(where, f"{data[:_QUOTED]!r} is not UTF-8") from None


def _dataclass_rules(message: type) -> tuple[_Write, _Read]:
    rules = [(name, *_rules(hint, f"{message.__name__}.{name}")) for name, hint in _hints(message).items()]

    def write(value: Any) -> bytes:
        if type(value) is not message:
            raise TypeError(f"{_quote(value)} is not a {message.__name__}")
        return b"".join([write_field(getattr(value, name)) for name, write_field, _ in rules])

    def read(given: _Input, where: str) -> Any:
        return _built(message, {name: take(given, f"{where}.{name}") for name, _, take in rules})

    return write, read


def _tuple_rules(hints: tuple[Any, ...], where: str) -> tuple[_Write, _Read]:
    is_open = hints[-1] is Ellipsis
    rules = [_rules(hint, where) for hint in hints if hint is not Ellipsis]

    def write(value: Any) -> bytes:
        if type(value) is not tuple or not (is_open or len(value) == len(rules)):
            raise TypeError(f"{_quote(value)} is not a tuple of the right length")
        if not is_open:
            return b"".join([write_item(item) for (write_item, _), item in zip(rules, value, strict=True)])
        write_item = rules[0][0]
        return struct.pack("<I", len(value)) + b"".join([write_item(item) for item in value])

    def read(given: _Input, where: str) -> tuple[Any, ...]:
        readers = [rules[0][1]] * given.count(where) if is_open else [read_item for _, read_item in rules]
        return tuple([read_item(given, where) for read_item in readers])

    return write, read


def _mapping_rules(key_hint: Any, hint: Any, where: str) -> tuple[_Write, _Read]:
    write_key, read_key = _rules(key_hint, where)
    write_item, read_item = _rules(hint, where)

    def write(value: Any) -> bytes:
        if not isinstance(value, Mapping):
            raise TypeError(f"{_quote(value)} is not a mapping")
        items = value.items() if key_hint is str else sorted(value.items())
        rows = [write_key(key) + write_item(item) for key, item in items]
        return struct.pack("<I", len(rows)) + b"".join(rows)

    def read(given: _Input, where: str) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for _ in range(given.count(where)):
            key = read_key(given, where)
            if key in found or (found and key_hint is not str and key < next(reversed(found))):
                raise ProtocolError(where, f"{_quote(key)} {key} appears twice or out of order"[:_QUOTED])
            found[key] = read_item(given, where)
        return found

    return write, read


def _json_rules() -> tuple[_Write, _Read]:
    write_text, _ = _sized_rules(str)

    def write(value: Any) -> bytes:
        if not isinstance(value, Mapping):
            raise TypeError(f"{_quote(value)} is not a mapping")
        return write_text(json.dumps(dict(value), separators=(",", ":"), default=_not_json))

    def read(given: _Input, where: str) -> dict[str, Any]:
        data = bytes(given.take(given.count(where), where))
        try:
            found = json.loads(_text(data, where))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(where, f"{data[:_QUOTED]!r} is not JSON ({type(error).__name__})") from None
        if type(found) is not dict:
            raise ProtocolError(where, f"must be a JSON object, not {_quote(found)}")
        return found

    return write, read


def _not_json(value: object) -> Any:
    raise TypeError(
        f"it has a {type(value).__name__}; only numbers, text, lists and dicts of these can be sent (for a tensor "
        "of one element, send its item())"
    )


def _union_rules(arms: tuple[Any, ...], where: str) -> tuple[_Write, _Read]:
    """None is number 0, the others follow in the order of the annotation."""
    some = [arm for arm in arms if arm is not NoneType]
    rules = [_rules(arm, where) for arm in some]

    def write(value: Any) -> bytes:
        if value is None and len(some) < len(arms):
            return b"\0"
        number = 0 if len(some) == 1 else next((i for i, arm in enumerate(some) if type(value) is arm), -1)
        if number < 0:
            raise TypeError(f"{_quote(value)} is not one of {', '.join(arm.__name__ for arm in some)}")
        return bytes([number + 1]) + rules[number][0](value)

    def read(given: _Input, where: str) -> Any:
        [number] = given.take(1, where)
        if number == 0 and len(some) < len(arms):
            return None
        if not 0 < number <= len(some):
            raise ProtocolError(where, f"{number} is not one of its {len(some)} types")
        inner = where if len(some) == 1 else f"{where}.{some[number - 1].__name__}"
        return rules[number - 1][1](given, inner)

    return write, read


def _built(message: type, values: dict[str, Any]) -> Any:
    """Construct a message; an error of its validation becomes a ProtocolError, because the peer sent it."""
    try:
        return message(**values)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ProtocolError(message.__name__, str(error)) from None


def _quote(value: Any) -> str:
    """The beginning of a value; not its `repr`, which may be as long as a message, or fail."""
    is_short = type(value) in (str, bytes)
    return f"{type(value).__name__} {value[:_QUOTED]!r}" if is_short else f"a {type(value).__name__}"
