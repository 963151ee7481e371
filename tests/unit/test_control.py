"""The control channel: every message survives the wire in any pieces; nothing else is taken for one."""

from __future__ import annotations

import itertools
import math
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import Aborted, PeerTimeout, UserError
from manyhands.places.local.control import (
    MAX_FRAME_BYTES,
    Channel,
    Failed,
    Finished,
    Message,
    Note,
    RoleStarted,
    Stop,
    Unread,
    decoder,
    encode,
)
from manyhands.transport.frames import FrameDecoder, encode_header
from manyhands.transport.messages import ProtocolError

MESSAGES: list[Message] = [
    RoleStarted(pid=4242),
    Note(payload={"rows": [{"step": 1, "loss": 0.5}], "text": "größer \ud800 \x00"}),
    Failed(
        kind="NonFinite",
        error="NonFinite",
        message="worker 1, step 7",
        traceback="Traceback ...",
        step=7,
        details={"room_bytes": 5},
    ),
    Finished(payload={}),
    Stop(),
]


def feed(stream: FrameDecoder[Message], data: bytes) -> list[Message]:
    received: list[Message] = []
    while data:
        room = stream.room()
        taken = min(len(room), len(data))
        room[:taken], data = data[:taken], data[taken:]
        stream.advance(taken)
        while (frame := stream.next_frame()) is not None:
            received.append(frame.message)
    return received


@given(cuts=st.lists(st.integers(0, 2000), max_size=30))
def test_every_message_survives_in_any_pieces(cuts: list[int]) -> None:
    wire = b"".join(encode(message) for message in MESSAGES)
    edges = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    stream = decoder()
    received: list[Message] = []
    for start, end in itertools.pairwise(edges):
        received += feed(stream, wire[start:end])
    assert received == MESSAGES


def test_a_message_is_a_frame_without_a_payload() -> None:
    assert encode(RoleStarted(pid=7)) == encode_header(1, 0, 8, 0) + struct.pack("<q", 7)


def test_values_that_are_not_finite_arrive_as_they_are() -> None:
    (message,) = feed(decoder(), encode(Note(payload={"nan": math.nan, "inf": math.inf})))
    assert isinstance(message, Note)
    assert math.isnan(message.payload["nan"])
    assert message.payload["inf"] == math.inf


def test_a_length_beyond_the_bound_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(ProtocolError, match=r"'body_bytes': 16\.0 MiB announced, at most 16\.0 MiB"):
        feed(decoder(), encode_header(1, 0, MAX_FRAME_BYTES + 1, 0))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (0, b""),
        (6, b""),
        (1, b""),
        (1, b"\xff\xfe"),
        (2, struct.pack("<I", 2) + b"[]"),
        (2, struct.pack("<I", 3) + b"not"),
        (2, struct.pack("<I", 9) + b"{}"),
        (5, b"{}"),
    ],
)
def test_what_is_no_message_is_refused(kind: int, body: bytes) -> None:
    with pytest.raises(ProtocolError):
        feed(decoder(), encode_header(kind, 0, len(body), 0) + body)


def test_what_can_not_be_sent_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="has a complex"):
        encode(Note(payload={"x": 1j}))
    with pytest.raises(ProtocolError, match="shared memory or a file"):
        encode(Finished(payload={"x": "y" * MAX_FRAME_BYTES}))


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    left, right = socket.socketpair()
    pair = Channel(left, "the launcher"), Channel(right, "worker 0")
    yield pair
    for channel in pair:
        channel.close()


def test_a_channel_carries_messages_both_ways_and_notices_the_end(channels: tuple[Channel, Channel]) -> None:
    child, launcher = channels
    assert launcher.receive() == []
    for message in MESSAGES:
        child.send(message, timeout_s=1.0)
    launcher.post(Stop())
    assert launcher.receive() == MESSAGES
    assert child.receive() == [Stop()]
    assert not launcher.ended
    child.close()
    assert launcher.receive() == []
    assert launcher.ended


def test_what_was_sent_before_the_end_is_received_though_a_request_went_unread(
    channels: tuple[Channel, Channel],
) -> None:
    child, launcher = channels
    launcher.post(Stop())
    child.send(Finished(payload={"x": 1}), timeout_s=1.0)
    child.close()
    assert launcher.receive() == [Finished(payload={"x": 1})]
    assert launcher.ended


def test_sending_to_one_who_does_not_read_ends_with_his_name(channels: tuple[Channel, Channel]) -> None:
    child, _ = channels
    with pytest.raises(PeerTimeout, match=r"the launcher has read nothing for 0\.05 s"):
        child.send(Finished(payload={"x": "y" * 2**23}), timeout_s=0.05)


def test_what_is_posted_to_a_slow_reader_waits_within_bounds_and_arrives_in_order(
    channels: tuple[Channel, Channel],
) -> None:
    child, launcher = channels
    posted: list[Message] = [Note(payload={"number": number, "x": "y" * 2**20}) for number in range(8)]
    for message in posted:
        launcher.post(message)
    launcher.post(Stop())
    assert launcher.queue, "a socket without a reader took everything"
    received: list[Message] = []
    while launcher.queue:
        received += child.receive()
        launcher.flush()
    assert received + child.receive() == [*posted, Stop()]

    launcher.post(Note(payload={"x": "y" * (MAX_FRAME_BYTES - 100)}))
    launcher.post(posted[0])
    with pytest.raises(Unread, match=r"worker 0 has left 1\d{7} bytes unread"):
        launcher.post(posted[1])
    child.close()
    launcher.flush()
    assert not launcher.queue, "nothing is kept for one who is gone"


def test_sending_to_one_who_is_gone_is_an_abort(channels: tuple[Channel, Channel]) -> None:
    child, launcher = channels
    launcher.close()
    with pytest.raises(Aborted, match="the launcher is gone: RoleStarted was not delivered"):
        child.send(RoleStarted(pid=1), timeout_s=1.0)
    child.post(Stop())
    assert not child.queue
