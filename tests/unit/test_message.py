"""The header: what is encoded decodes the same, and nothing else gets past `decode`."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import UserError
from manyhands.native.dtypes import CODES, LINKED
from manyhands.transport.link.interface import HEADER_BYTES, FrameKind, Header, Message
from manyhands.transport.messages import ProtocolError

LIMIT = 1 << 20
GOOD = Header(FrameKind.MESSAGE, 7, 3, 118, 41, torch.float32, 4096).encode()

headers = st.builds(
    lambda kind, tag, step, sequence, dtype, count: Header(
        FrameKind.MESSAGE, kind, tag, step, sequence, dtype, count * dtype.itemsize if dtype else 0
    ),
    kind=st.integers(0, 2**32 - 1),
    tag=st.integers(0, 2**32 - 1),
    step=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**64 - 1),
    dtype=st.sampled_from([None, *LINKED]),
    count=st.integers(0, LIMIT // 8),
)


@given(headers)
def test_a_header_survives_the_wire(header: Header) -> None:
    assert Header.decode(header.encode(), LIMIT) == header


def test_the_layout_is_the_documented_one() -> None:
    # Written out by hand from the table in docs/internals/links.md, so that neither can change alone.
    header = b"MHFR" + struct.pack("<HHHHIQQ", 4, 1, 0, 0, 32, 4096, 0)
    by_hand = header + struct.pack("<IIQQH6x", 7, 3, 118, 41, 1)
    assert by_hand == GOOD
    assert len(GOOD) == HEADER_BYTES == 64


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Header.decode(data, LIMIT)


@given(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255))
def test_one_changed_byte_is_refused_or_understood(offset: int, value: int) -> None:
    data = bytearray(GOOD)
    data[offset] = value
    try:
        header = Header.decode(data, LIMIT)
    except ProtocolError:
        return
    assert header.encode() == data
    assert header.payload_bytes <= LIMIT


@pytest.mark.parametrize(
    ("offset", "layout", "value", "field"),
    [
        (0, "<I", 0xDEADBEEF, "magic"),
        (4, "<H", 2, "version"),
        (6, "<H", 0, "frame"),
        (6, "<H", 2, "frame"),  # a goodbye with a payload
        (8, "<H", 1, "flags"),
        (8, "<H", 4, "flags"),
        (10, "<H", 1, "reserved"),
        (12, "<I", 31, "body_bytes"),
        (12, "<I", 33, "body_bytes"),
        (16, "<Q", LIMIT + 4, "payload_bytes"),
        (16, "<Q", 2**64 - 1, "payload_bytes"),
        (16, "<Q", 4097, "payload_bytes"),  # not a multiple of the 4 bytes of float32
        (24, "<Q", 1, "position"),
        (56, "<H", 99, "dtype"),
        (56, "<H", 0, "payload_bytes"),  # bytes of no dtype
        (58, "<H", 1, "reserved"),
    ],
)
def test_the_error_names_the_field(offset: int, layout: str, value: int, field: str) -> None:
    data = bytearray(GOOD)
    struct.pack_into(layout, data, offset, value)
    with pytest.raises(ProtocolError) as caught:
        Header.decode(data, LIMIT)
    assert caught.value.field == field


@pytest.mark.parametrize("length", [0, 63, 65])
def test_a_header_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="length"):
        Header.decode(bytes(length), LIMIT)


def test_a_goodbye_carries_nothing() -> None:
    header = Header.decode(Header.goodbye(5).encode(), LIMIT)
    assert (header.frame, header.sequence, header.payload_bytes, header.dtype) == (
        FrameKind.GOODBYE,
        5,
        0,
        None,
    )


def test_numbers_of_types_never_change_their_meaning() -> None:
    names = ["float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"]
    assert {CODES[dtype]: str(dtype).removeprefix("torch.") for dtype in LINKED} == dict(enumerate(names, 1))


@pytest.mark.parametrize("dtype", list(LINKED))
def test_a_message_knows_its_size(dtype: torch.dtype) -> None:
    payload = torch.zeros(5, dtype=dtype)
    header = Header.of(Message(kind=1, payload=payload), 0)
    assert header.payload_bytes == payload.nbytes
    assert (header.items, header.dtype) == (5, dtype)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": -1}, "kind=-1"),
        ({"kind": 2**32}, "kind=4294967296"),
        ({"kind": 0, "tag": 2**32}, "tag=4294967296"),
        ({"kind": 0, "step": -1}, "step=-1"),
        ({"kind": 0, "payload": torch.zeros(2, 2)}, r"\(2, 2\)"),
        ({"kind": 0, "payload": torch.zeros(4)[::2]}, "contiguous"),
        ({"kind": 0, "payload": torch.zeros(4, dtype=torch.complex64)}, "complex64"),
        ({"kind": 0, "payload": torch.zeros(4, device="meta")}, "meta"),
    ],
)
def test_a_message_that_can_not_travel_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Message(**fields)  # type: ignore[arg-type]
