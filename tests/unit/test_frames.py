"""Frames in a stream: cut anywhere, damaged anywhere, and never more memory than was allowed."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import UserError
from manyhands.transport.frames import (
    HEADER_BYTES,
    IN_ARENA,
    FrameDecoder,
    FrameHeader,
    Limits,
    WholeFrame,
    encode_header,
)
from manyhands.transport.messages import ProtocolError

LIMITS = Limits(body_bytes=200_000, payload_bytes=1 << 20)
Message = tuple[int, bytes]


def decoder(limits: Limits = LIMITS, place: memoryview | None = None) -> FrameDecoder[Message]:
    return FrameDecoder(
        limits, lambda header, body: (header.kind, bytes(body)), lambda message, num_bytes: place
    )


def feed(stream: FrameDecoder[Message], data: bytes, piece: int) -> list[WholeFrame[Message]]:
    """Give `data` in pieces, as a socket would."""
    frames: list[WholeFrame[Message]] = []
    while data:
        room = stream.room()
        assert len(room) > 0
        num_bytes = min(len(room), piece, len(data))
        room[:num_bytes], data = data[:num_bytes], data[num_bytes:]
        stream.advance(num_bytes)
        while (frame := stream.next_frame()) is not None:
            frames.append(frame)
    return frames


def frame_bytes(kind: int, body: bytes, payload: bytes) -> bytes:
    return encode_header(kind, 0, len(body), len(payload)) + body + payload


def test_the_header_is_the_documented_32_bytes() -> None:
    expected = b"MHFR" + struct.pack("<HHHHIQQ", 4, 513, 2, 0, 7, 1 << 40, 9)
    assert encode_header(513, IN_ARENA, 7, 1 << 40, 9) == expected
    assert len(expected) == HEADER_BYTES == 32


CONTENTS = st.lists(
    st.tuples(
        st.integers(1, 65535),
        st.one_of(st.binary(max_size=40), st.integers(65_000, 140_000).map(lambda n: b"b" * n)),
        st.one_of(st.binary(max_size=40), st.integers(60_000, 200_000).map(lambda n: b"p" * n)),
    ),
    max_size=5,
)


@given(CONTENTS, st.sampled_from([1000, 4096, 65_536, 1 << 20]))
def test_frames_come_out_whole_however_the_stream_is_cut(
    contents: list[tuple[int, bytes, bytes]], piece: int
) -> None:
    stream = decoder()
    frames = feed(stream, b"".join(frame_bytes(*content) for content in contents), piece)
    assert [(*frame.message, bytes(frame.payload)) for frame in frames] == contents
    assert stream.between_frames


def test_frames_come_out_whole_byte_by_byte() -> None:
    contents = [(1, b"", b""), (2, b"body", b"payload"), (3, b"", b"x" * 100)]
    frames = feed(decoder(), b"".join(frame_bytes(*content) for content in contents), 1)
    assert [(*frame.message, bytes(frame.payload)) for frame in frames] == contents


@pytest.mark.parametrize("piece", [10, 1 << 20])
def test_a_payload_is_received_where_the_application_wants_it(piece: int) -> None:
    wanted = np.zeros(25_000)
    sent = np.random.default_rng(0).random(25_000)
    stream = decoder(place=wanted.data)
    (frame,) = feed(stream, frame_bytes(1, b"gradient", sent.tobytes()), piece)
    np.testing.assert_array_equal(wanted, sent)
    wanted[0] = 118.0
    assert np.frombuffer(frame.payload)[0] == 118.0  # the same memory, not a copy


def test_room_leads_into_the_payload_itself_once_that_has_begun() -> None:
    wanted = bytearray(1000)
    stream = decoder(place=memoryview(wanted))
    assert feed(stream, frame_bytes(1, b"", b"x" * 1000)[:-900], 1 << 20) == []
    assert len(stream.room()) == 900
    stream.room()[:900] = b"y" * 900
    stream.advance(900)
    assert stream.next_frame() is not None
    assert wanted == b"x" * 100 + b"y" * 900


def test_a_place_of_another_size_ends_the_stream() -> None:
    with pytest.raises(ProtocolError, match="8 bytes announced, 4 expected"):
        feed(decoder(place=memoryview(bytearray(4))), frame_bytes(1, b"", b"12345678"), 100)


def test_a_payload_in_shared_memory_is_not_in_the_stream() -> None:
    data = encode_header(1, IN_ARENA, 0, 1000, 64) + frame_bytes(2, b"", b"")
    frames = feed(decoder(), data, 1 << 20)
    assert [frame.header for frame in frames] == [
        FrameHeader(1, IN_ARENA, 0, 1000, 64),
        FrameHeader(2, 0, 0, 0, 0),
    ]


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "magic"),
        (b"MHFR" + struct.pack("<HHHHIQQ", 1, 1, 0, 0, 0, 0, 0), "version"),
        (b"MHFR" + struct.pack("<HHHHIQQ", 4, 1, 4, 0, 0, 0, 0), "flags"),
        (b"MHFR" + struct.pack("<HHHHIQQ", 4, 1, 0, 1, 0, 0, 0), "reserved"),
        (encode_header(1, 0, LIMITS.body_bytes + 1, 0), "body_bytes"),
        (encode_header(1, 0, 0, LIMITS.payload_bytes + 1), "payload_bytes"),
        (encode_header(1, IN_ARENA, 0, (1 << 64) - 1), "payload_bytes"),
        (encode_header(1, 0, 0, 0, 5), "position"),
    ],
)
def test_a_wrong_header_is_refused_with_the_name_of_the_field(data: bytes, field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        feed(decoder(), data, 7)
    assert caught.value.field == field


def test_lengths_are_refused_before_memory_is_taken() -> None:
    stream = decoder()
    tracemalloc.start()
    try:
        for body, payload in ((1 << 31, 0), (0, 1 << 50)):
            with pytest.raises(ProtocolError):
                feed(stream, encode_header(1, 0, body, payload), 100)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300), st.integers(1, 100))
def test_random_bytes_give_frames_or_a_protocol_error(data: bytes, piece: int) -> None:
    for beginning in (b"", b"MHFR", encode_header(1, 0, 5, 3)[:12]):
        try:
            feed(decoder(), beginning + data, piece)
        except ProtocolError:
            pass


@given(st.integers(0, 8 * (HEADER_BYTES + 10) - 1))
def test_a_flipped_bit_gives_frames_or_a_protocol_error(bit: int) -> None:
    data = bytearray(frame_bytes(3, b"12345", b"67890"))
    data[bit // 8] ^= 1 << bit % 8
    stream = decoder()
    try:
        frames = feed(stream, bytes(data), 1 << 20)
    except ProtocolError:
        return
    assert len(frames) == 1 or not stream.between_frames


def test_limits_are_checked_when_they_are_made() -> None:
    with pytest.raises(UserError, match="body_bytes=-1"):
        Limits(body_bytes=-1)
    with pytest.raises(UserError, match="payload_bytes=-1"):
        Limits(payload_bytes=-1)
