"""Messages as bytes: the layout against `struct`, every kind of field, and bytes that nobody should send."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum, IntEnum, auto
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import UserError
from manyhands.strategies.ps import ps_messages
from manyhands.transport.messages import U32, MessageCoder, ProtocolError


class Colour(IntEnum):
    RED = 1
    BLUE = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: int
    colour: Colour
    far: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    number: int
    point: Point
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    name: str
    points: tuple[Point, ...]
    either: Point | Flat
    maybe: tuple[int, ...] | None = None
    share: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    nonce: bytes
    seal: Annotated[bytes, 2]


class Mood(Enum):
    GOOD = auto()
    BAD = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    small: U32
    mood: Mood
    pair: tuple[int, str]
    rows: Mapping[int, str]
    words: Mapping[str, float]
    said: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picky:
    even: int

    def __post_init__(self) -> None:
        if self.even % 2:
            raise UserError(f"even={self.even}: must be even")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    pass


class Quick(NamedTuple):
    number: int
    weight: float


class Slow(NamedTuple):
    name: str


OWN = {1: Flat, 2: Named, 3: Picky, 4: Nothing, 5: Secret, 6: Mixed}
ALL = dict(enumerate(get_args(ps_messages.Message), 1))
CODEC, SERVER = MessageCoder(OWN), MessageCoder(ALL)
POINT = Point(x=-3, colour=Colour.BLUE, far=True)
UNICODE = st.characters(exclude_categories=["Cs"])  # what UTF-8 has: without a word each character is tried


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    if hint is int:
        return st.integers(-(2**63), 2**63 - 1)
    if hint is float:
        return st.floats(allow_nan=False)
    if hint in (bool, str) or (isinstance(hint, type) and issubclass(hint, IntEnum)):
        return (
            st.text(UNICODE, max_size=8)
            if hint is str
            else st.sampled_from([*hint] if hint is not bool else [False, True])
        )
    if hint is NoneType:
        return st.none()
    if get_origin(hint) is tuple:
        return st.lists(values_of(get_args(hint)[0]), max_size=3).map(tuple)
    if get_origin(hint) is UnionType:
        return st.one_of([values_of(arm) for arm in get_args(hint)])
    hints = get_type_hints(hint)
    names = getattr(hint, "_fields", None) or [field.name for field in fields(hint)]
    return st.builds(hint, **{name: values_of(hints[name]) for name in names})


@pytest.mark.parametrize("kind", [*ALL], ids=lambda kind: ALL[kind].__name__)
def test_every_message_of_the_server_comes_back_as_it_was(kind: int) -> None:
    @given(values_of(ALL[kind]))
    def check(message: object) -> None:
        number, body = SERVER.encode(message)
        assert number == kind
        back = SERVER.decode(number, body)
        assert back == message
        assert repr(back) == repr(message)  # 1 == True == Colour.RED, but they are not the same

    check()


def test_a_message_of_numbers_is_one_struct_in_the_order_of_its_fields() -> None:
    flat = Flat(number=2**62, point=POINT, weight=0.1)
    assert CODEC.encode(flat) == (1, struct.pack("<qqqBd", 2**62, -3, 7, 1, 0.1))


def test_a_tuple_of_plain_numbers_is_one_struct_too() -> None:
    coder = MessageCoder({3: Quick})
    assert coder.encode(Quick(-5, 0.25)) == (3, struct.pack("<qd", -5, 0.25))
    back = coder.decode(3, memoryview(struct.pack("<qd", -5, 0.25)))
    assert (type(back), back) == (Quick, Quick(-5, 0.25))
    with pytest.raises(ProtocolError, match="must have 16 bytes, not 15"):
        coder.decode(3, bytes(15))
    with pytest.raises(UserError, match="cannot be sent"):
        coder.encode(Quick(1 << 63, 0.0))
    slow = MessageCoder({1: Slow})
    assert slow.decode(*slow.encode(Slow("ä"))) == Slow("ä"), "any other tuple is a list, as a dataclass is"
    with pytest.raises(UserError, match="tuple is neither a dataclass nor a NamedTuple"):
        MessageCoder({1: tuple})


def text(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def named(
    name: bytes = text(b"n"),
    points: bytes = bytes(4),
    either: bytes = b"\1" + struct.pack("<qqB", 1, 1, 1),
    maybe: bytes = b"\0",
    share: bytes = struct.pack("<d", 0.5),
) -> bytes:
    return name + points + either + maybe + share


def test_any_other_message_is_its_fields_one_after_the_other() -> None:
    point = struct.pack("<qqB", -3, 7, 1)
    message = Named(name="ä", points=(POINT,), either=POINT, maybe=(5,))
    body = named(text("ä".encode()), b"\1\0\0\0" + point, b"\1" + point, b"\1\1\0\0\0" + struct.pack("<q", 5))
    assert CODEC.encode(message) == (2, body)
    assert CODEC.decode(2, body) == message
    secret = Secret(nonce=b"\0\xff", seal=b"ab")
    assert CODEC.encode(secret) == (5, b"\2\0\0\0\0\xffab")
    assert CODEC.decode(5, b"\2\0\0\0\0\xffab") == secret


def test_every_other_kind_of_field_comes_back_as_it_was() -> None:
    said = {"loss": float("inf"), "rows": [1, None, "\ud800"], "deep": {"x": True}}
    mixed = Mixed(
        small=2**32 - 1,
        mood=Mood.BAD,
        pair=(-1, "x"),
        rows={7: "b", -2: "a"},
        words={"z": 1.0, "a": 2.0},
        said=said,
    )
    kind, body = CODEC.encode(mixed)
    assert body[:12] == struct.pack("<Iq", 2**32 - 1, 1)
    back = CODEC.decode(kind, body)
    assert back == mixed
    assert list(back.rows) == [-2, 7], "numbers ascend"
    assert list(back.words) == ["z", "a"], "names keep their order"


MIXED = struct.pack("<Iqq", 0, 0, 0) + text(b"")


@pytest.mark.parametrize(
    ("kind", "body", "where"),
    [
        (9, b"", "kind"),
        (0, b"", "kind"),
        (1, b"", "Flat"),
        (1, struct.pack("<qqqBd", 0, 0, 2, 1, 0.0), "Point.colour"),
        (1, struct.pack("<qqqBd", 0, 0, 1, 2, 0.0), "Point.far"),
        (1, struct.pack("<qqqBd", 0, 0, 1, 1, 0.0) + b"x", "Flat"),
        (2, b"", "Named.name"),
        (2, named() + b"x", "Named"),
        (2, named()[:-1], "Named.share"),
        (2, named(name=b"\xff\xff\xff\xffn"), "Named.name"),
        (2, named(name=text(b"\xff\xfe")), "Named.name"),
        (2, named(name=text(b"\xed\xa0\x80")), "Named.name"),  # a surrogate in what calls itself UTF-8
        (2, named(points=b"\xff\xff\xff\xff"), "Named.points"),
        (2, named(points=b"\1\0\0\0" + struct.pack("<qqB", 1, 2, 1)), "Named.points.colour"),
        (2, named(points=b"\1\0\0\0" + struct.pack("<qqB", 1, 1, 2)), "Named.points.far"),
        (2, named(either=b"\0"), "Named.either"),
        (2, named(either=b"\3" + bytes(17)), "Named.either"),
        (2, named(either=b"\1" + struct.pack("<qqB", 1, 2, 1)), "Named.either.Point.colour"),
        (2, named(maybe=b"\2"), "Named.maybe"),
        (3, struct.pack("<q", 3), "Picky"),
        (4, b"x", "Nothing"),
        (5, b"\0\0\0\0a", "Secret.seal"),
        (5, b"\0\0\0\0abc", "Secret"),
        (6, struct.pack("<Iq", 0, 2), "Mixed.mood"),
        (6, MIXED + struct.pack("<IqIqI", 2, 3, 0, 3, 0), "Mixed.rows"),
        (6, MIXED + struct.pack("<IqIqI", 2, 3, 0, 2, 0), "Mixed.rows"),
        (6, MIXED + bytes(4) + (b"\2\0\0\0" + 2 * (text(b"a") + bytes(8))), "Mixed.words"),
        (6, MIXED + bytes(8) + text(b"[]"), "Mixed.said"),
        (6, MIXED + bytes(8) + text(b"{"), "Mixed.said"),
        (6, MIXED + bytes(8) + text(b"[" * 100_000), "Mixed.said"),
    ],
)
def test_wrong_bytes_are_refused_with_the_name_of_the_field(kind: int, body: bytes, where: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        CODEC.decode(kind, body)
    assert caught.value.field == where
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


@given(st.integers(0, len(ALL) + 1), st.binary(max_size=200))
def test_random_bytes_give_a_message_or_a_protocol_error(kind: int, body: bytes) -> None:
    try:
        message = SERVER.decode(kind, body)
    except ProtocolError:
        return
    assert isinstance(message, ALL[kind])


@given(st.data())
def test_damaged_messages_give_a_message_or_a_protocol_error(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([*ALL]))
    body = bytearray(SERVER.encode(data.draw(values_of(ALL[kind])))[1])
    if body and data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * len(body) - 1))
        body[bit // 8] ^= 1 << bit % 8
    else:
        del body[data.draw(st.integers(0, len(body))) :]
    try:
        message = SERVER.decode(kind, memoryview(body))
    except ProtocolError:
        return
    assert SERVER.decode(*SERVER.encode(message)) == message or "nan" in repr(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsendable:
    table: dict[str, int]


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        ({0: Flat}, "kind 0 of Flat must be from 1"),
        ({1 << 16: Flat}, "must be from 1 to 65535"),
        ({1: Flat, 2: Flat}, "Flat has two kinds"),
        ({1: int}, "int is neither a dataclass"),
        ({1: Unsendable}, r"Unsendable\.table: dict\[str, int\] cannot be sent"),
    ],
)
def test_a_protocol_that_can_not_be_is_refused_when_it_is_made(kinds: dict[int, type], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        MessageCoder(kinds)


@pytest.mark.parametrize(
    "message",
    [
        Unsendable(table={}),
        Flat(number=2**63, point=POINT, weight=0.0),
        Flat(number=0, point=POINT, weight="much"),  # type: ignore[arg-type]
        Named(name="\ud800", points=(), either=POINT),
        Secret(nonce="ab", seal=b"ab"),  # type: ignore[arg-type]
        Secret(nonce=b"", seal=b"abc"),
        Named(name=b"bytes", points=(), either=POINT),  # type: ignore[arg-type]
        Named(name="", points=[], either=POINT),  # type: ignore[arg-type]
        Named(name="", points=(), either=Picky(even=2)),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_a_message_that_has_no_bytes_is_refused_when_it_is_sent(message: object) -> None:
    with pytest.raises(UserError):
        CODEC.encode(message)
