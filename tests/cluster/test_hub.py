"""Hubs in one process, in turns: what arrives, who is let in, and what a bad peer can do (end its own connection)."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import manyhands.transport.hub.handshake as handshake
from descriptors import open_descriptors
from hubs import (
    CLAIM,
    CODEC,
    FAST,
    GOOD,
    PATIENCE_S,
    TOKEN,
    Clock,
    Number,
    Party,
    Text,
    control,
    dial,
    impostor,
    raw,
    read_all,
    read_end,
)
from manyhands.errors import UserError
from manyhands.native.segment import Segment
from manyhands.transport.frames import IN_ARENA, Limits, encode_header
from manyhands.transport.hub.handshake import (
    NO_PROOF,
    Credentials,
    Handshake,
    HandshakeWelcome,
    Proof,
    Refusal,
)
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import (
    Arrived,
    Joined,
    Lost,
    Ready,
    Rejected,
    Settings,
    Shared,
    spin_for,
)
from manyhands.transport.messages import ProtocolError


@pytest.fixture
def party() -> Iterator[Party]:
    before = len(open_descriptors())
    party = Party()
    yield party
    party.close()
    assert len(open_descriptors()) == before
    assert not [thread for thread in threading.enumerate() if "hub" in thread.name]


both = pytest.mark.parametrize("how", ["unix", "tcp"])
all_three = pytest.mark.parametrize("how", ["unix", "tcp", "tls"])


# ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@all_three
def test_messages_arrive_in_order_with_their_payloads(party: Party, how: str) -> None:
    one, two = party.pair(how)
    sizes = [0, 1, 100, 5000, 70_000, 300_000, 3, 900_000, 2_000_000, 64]
    contents = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    for value, content in enumerate(contents):
        assert two.send(1, Number(value=value), [content[:30], content[30:]])
        assert one.send(2, Text(text=str(value)))
    received: list[Arrived] = []
    for value in range(len(sizes)):
        received.append(party.one(1, Arrived))
        assert received[-1].member == 2
        assert received[-1].message == Number(value=value)
        np.testing.assert_array_equal(np.frombuffer(received[-1].payload, np.uint8), contents[value])
        assert party.one(2, Arrived).message == Text(text=str(value))
    for event in received:
        event.release()
    assert two.flush(PATIENCE_S)
    assert two.sent(1)


def test_a_payload_in_shared_memory_is_not_copied_and_its_room_is_used_again(party: Party) -> None:
    _, two = party.pair("unix", second={"settings": Settings(arena_bytes=64 << 10)})
    for value in range(20):
        two.send(1, Number(value=value), [bytes([value]) * 40_000])
        event = party.one(1, Arrived)
        assert event.payload.readonly  # it is the arena itself
        assert bytes(event.payload) == bytes([value]) * 40_000
        event.release()


def test_payloads_go_by_the_stream_when_the_arena_is_full_or_too_small(party: Party) -> None:
    _, two = party.pair("unix", second={"settings": Settings(arena_bytes=64 << 10)})
    for value, size in enumerate((40_000, 40_000, 100_000)):
        two.send(1, Number(value=value), [bytes([value]) * size])
    held, second, third = (party.one(1, Arrived) for _ in range(3))
    assert [event.payload.readonly for event in (held, second, third)] == [True, False, False]
    assert bytes(held.payload) == bytes(40_000)
    assert bytes(second.payload) == b"\1" * 40_000


@all_three
def test_payloads_land_where_the_application_wants_them(party: Party, how: str) -> None:
    wanted = np.zeros(125_000)

    def destination(member: int, message: Any, num_bytes: int) -> memoryview | None:
        return wanted.data if (member, message, num_bytes) == (2, Number(value=7), wanted.nbytes) else None

    _, two = party.pair(how, first={"destination": destination})
    for size in (wanted.size, 1000):  # 1 MB goes by the stream, the other by shared memory where there is any
        sent = np.random.default_rng(size).random(size)
        two.send(1, Number(value=7), [sent])
        event = party.one(1, Arrived)
        np.testing.assert_array_equal(np.frombuffer(event.payload), sent)
        assert np.shares_memory(np.frombuffer(event.payload), wanted) == (size == wanted.size)
        event.release()


@all_three
def test_an_application_that_refuses_a_payload_ends_that_connection(party: Party, how: str) -> None:
    def destination(member: int, message: Any, num_bytes: int) -> memoryview | None:
        if message == Number(value=1):
            raise ProtocolError("payload_bytes", "no gradient has 5 bytes")
        return memoryview(bytearray(8))

    _, two = party.pair(how, first={"destination": destination})
    two.send(1, Number(value=1), [b"12345"])
    assert "no gradient has 5 bytes" in party.one(1, Lost).reason
    assert "no gradient has 5 bytes" in party.one(2, Lost).reason


def test_a_member_shares_memory_in_order_with_its_messages(party: Party) -> None:
    one, two = party.pair("unix")
    with Segment.create(8192, "a test") as segment:
        for tag in (5, 6, 7):
            assert two.share(1, segment, tag)
            assert two.send(1, Number(value=tag))
        party.until(lambda: len(party.events[1]) == 6)
        for shared, received in zip(party.events[1][::2], party.events[1][1::2], strict=True):
            assert isinstance(shared, Shared)
            assert isinstance(received, Arrived)
            assert received.message == Number(value=shared.tag)
            shared.segment.memory()[shared.tag : shared.tag + 1] = b"x"
            shared.segment.close()
        assert bytes(segment.memory(5, 4)) == b"xxx\0"
        two.share(1, segment)  # one that is never handed out is closed with the hub
        party.until(lambda: two.sent(1))
        one.flush(1.0)


def test_memory_is_not_shared_over_tcp(party: Party) -> None:
    _, two = party.pair("tcp")
    with (
        Segment.create(4096, "a test") as segment,
        pytest.raises(UserError, match="TCP, which cannot share memory"),
    ):
        two.share(1, segment)


def test_other_descriptors_wake_the_hub(party: Party) -> None:
    hub = party.add(1)
    reader, writer = os.pipe()
    hub.register(reader)
    assert hub.poll(0) == []
    os.write(writer, b"x")
    assert hub.poll(PATIENCE_S) == [Ready(reader)]
    assert hub.poll(PATIENCE_S) == [Ready(reader)]  # until it is read
    hub.unregister(reader)
    assert hub.poll(0) == []
    os.close(reader)
    os.close(writer)


@both
@pytest.mark.parametrize("let_go", [Hub.send_off, lambda hub: hub.poll(0), lambda hub: hub.flush(PATIENCE_S)])
def test_messages_that_are_held_back_leave_together(
    party: Party, how: str, let_go: Callable[[Hub], object]
) -> None:
    one, two = party.pair(how, second={"settings": Settings(queue_bytes=1 << 20)})
    two.hold_back()
    assert two.send(1, Number(value=1), [bytes(10)])
    assert two.send(1, Number(value=2), [bytes(100_000)])
    assert not two.send(1, Number(value=-1), [bytes(2 << 20)])  # what is held back is bounded too
    assert one.poll(0.05) == []
    let_go(two)
    assert two.send(1, Number(value=3))
    party.until(lambda: len(party.of(1, Arrived)) == 3)
    received = party.of(1, Arrived)
    assert [event.message.value for event in received] == [1, 2, 3]
    assert [len(event.payload) for event in received] == [10, 100_000, 0]


@all_three
def test_a_message_that_is_not_held_back_does_not_overtake(party: Party, how: str) -> None:
    _, two = party.pair(how)
    two.hold_back()
    assert two.send(1, Number(value=1))
    assert not party.of(1, Arrived)
    with Segment.create(64, "a test") as segment:
        if how == "unix":
            assert two.share(1, segment)  # not a message, but in order with them
    two.send_off()
    assert two.send(1, Number(value=2))
    party.until(lambda: len(party.of(1, Arrived)) == 2)
    kinds = [type(event) for event in party.events[1] if isinstance(event, Arrived | Shared)]
    assert kinds == [Arrived, *([Shared] if how == "unix" else []), Arrived]
    for event in party.of(1, Shared):
        event.segment.close()


def test_many_members_at_one_hub(party: Party) -> None:
    server = party.add(1, settings=Settings(spin_s=spin_for(1)))
    addresses = [server.listen("unix"), server.listen("tcp")]
    for member in range(2, 22):
        party.add(member).connect(1, addresses[member % 2])
    party.until(lambda: len(server.members()) == 20)
    for member in range(2, 22):
        party.until(lambda member=member: party.hubs[member].members() == (1,))  # type: ignore[misc]
        assert party.hubs[member].send(1, Number(value=member), [bytes([member]) * 10_000])
    party.until(lambda: len(party.of(1, Arrived)) == 20)
    assert {
        (event.member, event.message.value, bytes(event.payload[:1])[0]) for event in party.of(1, Arrived)
    } == {(member, member, member) for member in range(2, 22)}


# ── a peer that reads nothing ─────────────────────────────────────────────────────────────────────────────────────────


@all_three
def test_what_waits_for_a_peer_that_reads_nothing_is_bounded(party: Party, how: str) -> None:
    one, two = party.pair(how, second={"settings": Settings(queue_bytes=1 << 20, arena_bytes=0)})
    content = bytes(100_000)
    taken = 0
    while two.send(1, Number(value=taken), [content]):
        taken += 1
        assert taken < 1000
    assert not two.sent(1)
    assert not two.flush(0.0)
    assert not two.send(1, Number(value=-1), [content])  # nothing of it is taken
    party.until(lambda: len(party.of(1, Arrived)) == taken)
    assert [event.message.value for event in party.of(1, Arrived)] == [*range(taken)]
    assert two.sent(1)
    assert one.members() == (2,)


def test_what_a_kernel_has_taken_arrives_once_the_other_end_has_room_for_it(party: Party) -> None:
    one, two = party.pair("tcp")
    assert two.arrives(1)
    count = 0
    while two.arrives(1):  # into the window of the end that does not read
        assert two.send(1, Number(value=count), [bytes(1 << 15)])
        count += 1
        assert count < 10_000
    assert two.sent(1), "all of it has left this process"
    party.until(lambda: len(party.of(1, Arrived)) == count)
    party.until(lambda: two.arrives(1))
    assert one.members() == (2,)
    assert two.arrives(3), "who is not there lacks nothing"


def test_what_a_unix_socket_has_taken_has_arrived(party: Party) -> None:
    _, two = party.pair("unix")
    while two.sent(1):
        two.send(1, Number(value=0), [bytes(1 << 11)])
        assert two.arrives(1) == two.sent(1)


@all_three
def test_an_empty_queue_takes_a_message_of_any_size_and_two_may_flush_to_each_other(
    party: Party, how: str
) -> None:
    small = Settings(queue_bytes=1000)
    one, two = party.pair(how, first={"settings": small}, second={"settings": small})
    content = np.random.default_rng(0).integers(0, 256, 16 << 20, np.uint8)
    assert one.send(2, Number(value=1), [content, b""])
    assert two.send(1, Number(value=2), [b"", content])
    assert not two.send(1, Number(value=3), [content])

    def flush_and_read(member: int) -> None:
        assert party.hubs[member].flush(PATIENCE_S)
        while not party.of(member, Arrived):
            party.events[member] += party.hubs[member].poll(PATIENCE_S)

    other = threading.Thread(target=flush_and_read, args=(1,))
    other.start()
    flush_and_read(2)
    other.join(PATIENCE_S)
    for member in (1, 2):
        np.testing.assert_array_equal(np.frombuffer(party.one(member, Arrived).payload, np.uint8), content)


def test_sending_to_nobody_takes_nothing(party: Party) -> None:
    assert not party.add(1).send(9, Number(value=0))


def test_a_message_over_the_limits_is_refused_at_the_sender(party: Party) -> None:
    _, two = party.pair(
        "unix", second={"settings": Settings(limits=Limits(body_bytes=100, payload_bytes=1000))}
    )
    with pytest.raises(UserError, match="exceeds the limits"):
        two.send(1, Number(value=0), [bytes(1001)])
    with pytest.raises(UserError, match="exceeds the limits"):
        two.send(1, Text(text="x" * 100))
    assert two.send(1, Number(value=0), [bytes(1000)])


# ── who is let in ─────────────────────────────────────────────────────────────────────────────────────────────────────


@both
@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"token": b"some other secret"}, "token"), ({"fingerprint": "another task"}, "fingerprint")],
)
def test_another_token_or_task_is_refused_by_name_on_both_sides(
    party: Party, how: str, wrong: dict[str, Any], field: str
) -> None:
    one = party.add(1)
    party.add(2, **wrong).connect(1, one.listen(how))
    remote, lost = party.one(1, Rejected), party.one(2, Lost)
    assert repr(field) in remote.reason
    assert repr(field) in lost.reason
    assert (lost.member, one.members(), party.hubs[2].members()) == (1, (), ())
    party.hubs.pop(2)


def test_another_release_is_refused_by_name(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = party.add(1), party.add(2)
    two.connect(1, one.listen("unix"))
    monkeypatch.setattr(handshake, "__version__", "0.0.1")  # for what is accepted from now on
    assert "'package'" in party.one(1, Rejected).reason
    assert "'0.0.1'" in party.one(2, Lost).reason


def test_another_member_than_expected_is_refused(party: Party) -> None:
    one, two = party.add(1), party.add(2)
    two.connect(3, one.listen("unix"))
    assert "1 answers, but 3 is expected" in party.one(2, Lost).reason
    assert "'member'" in party.one(1, Rejected).reason


def test_the_token_never_travels(party: Party) -> None:
    one = party.add(1)
    shake = Handshake(Credentials(member=2, role="", token=TOKEN, fingerprint="task"), expected=1)
    with dial(one.listen("unix")) as end:
        hello = control(shake.hello())
        end.sendall(hello)
        data = hello + read_all(party, end)
        assert TOKEN not in data
        assert TOKEN.hex().encode() not in data
        assert "token" not in repr(Credentials(member=2, role="", token=TOKEN, fingerprint="task"))


def test_a_proof_can_not_be_used_again_or_turned_around(party: Party) -> None:
    mine = Credentials(member=1, role="", token=TOKEN, fingerprint="task")
    theirs = replace(mine, member=2)
    client, server = Handshake(theirs, expected=1), Handshake(mine, expected=None)
    proof = client.handle(server.handle(client.hello()))
    assert isinstance(proof, Proof)
    for change in (
        {},  # as it was, at another connection
        {"proof": proof.proof[:-1] + bytes([proof.proof[-1] ^ 1])},
        {"claim": proof.claim._replace(member=3)},
        {"claim": proof.claim._replace(role="server")},
        {"expected": 3},
    ):
        again = Handshake(mine, expected=None)
        challenge = again.handle(client.hello())
        with pytest.raises(ProtocolError, match="token"):
            again.handle(proof._replace(**change))
        with pytest.raises(ProtocolError, match="token"):
            again.handle(proof._replace(proof=challenge.proof))  # type: ignore[union-attr]
        assert (again.trusted, again.peer) == (False, None)
    welcome = server.handle(proof)
    assert isinstance(welcome, HandshakeWelcome)
    assert server.peer == proof.claim
    with pytest.raises(ProtocolError, match="token"):
        client.handle(welcome._replace(claim=welcome.claim._replace(role="worker")))
    assert client.handle(welcome) is None
    assert client.peer == welcome.claim


def test_nobody_there_is_reported_as_lost(party: Party) -> None:
    hub = party.add(1, settings=Settings(connect_s=0.3))
    hub.connect(2, "unix:nobody-listens-at-this-name")
    assert party.one(1, Lost).member == 2
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    hub.connect(3, f"tcp:127.0.0.1:{port}")
    lost = party.one(1, Lost)
    assert (lost.member, lost.in_peace) == (3, False)
    found = re.search(rf"not reached at tcp:127\.0\.0\.1:{port} within ([\d.]+) s", lost.reason)
    assert found is not None, lost.reason
    assert float(found[1]) >= 0.3  # what it took, which is more on a busy machine
    assert "refused" in lost.reason


@pytest.mark.parametrize("address", ["tcp:0.0.0.0:0", "tcp:192.168.1.7:80", "tcp:example.org:80"])
def test_addresses_off_loopback_are_refused_with_a_sentence(party: Party, address: str) -> None:
    hub = party.add(1)
    with pytest.raises(UserError, match="not on loopback"):
        hub.listen(address)
    with pytest.raises(UserError, match="not on loopback"):
        hub.connect(2, address)


@pytest.mark.parametrize("address", ["", "http:x", "tcp:127.0.0.1", "tcp:127.0.0.1:99999", "tcp:127.0.0:80"])
def test_what_is_no_address_is_refused(party: Party, address: str) -> None:
    with pytest.raises(UserError, match="must be unix:NAME or tcp"):
        party.add(1).connect(2, address)


def test_a_member_that_connects_anew_replaces_its_older_connection(party: Party) -> None:
    one, two = party.pair("unix")
    with pytest.raises(UserError, match="member 1 is already connected"):
        two.connect(1, "unix:x")
    address = one.listen("unix")
    party.events[3] = []
    mine = Credentials(member=2, role="again", token=TOKEN, fingerprint="task")
    with Hub(mine, CODEC) as again:
        again.connect(1, address)
        party.hubs[3] = again
        assert party.one(1, Lost).member == 2
        assert party.one(1, Joined) == Joined(2, "again")
        assert one.send(2, Number(value=1))
        assert party.one(3, Arrived).message == Number(value=1)
        assert party.one(2, Lost).member == 1
        del party.hubs[3]


# ── strangers, damage and silence ─────────────────────────────────────────────────────────────────────────────────────


@both
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (os.urandom(64), "magic"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "magic"),
        (encode_header(1, 1, 1 << 20, 0), "body_bytes"),
        (encode_header(1, 1, 0, 1), "payload_bytes"),
        (encode_header(6, 1, 0, 0), "out of order"),
        (control(HandshakeWelcome(claim=CLAIM, proof=bytes(32))), "out of order"),
        (control(Proof(claim=CLAIM, expected=1, proof=bytes(32), arena=False)), "out of order"),
        (control(Refusal(field="x", reason="\x1b[2J")), "it refused"),
        (raw(5, b"\1\0\0\0x\3\0\0\0\xed\xa0\x80"), "is not UTF-8"),
        (raw(9, bytes(63)), "HandshakeHello.seal"),
        (raw(9, bytes(65)), "ends 1 bytes before its body"),
        (GOOD, "before the handshake"),
    ],
    ids=[
        "garbage",
        "http",
        "oversize body",
        "payload",
        "heartbeat",
        "welcome",
        "proof",
        "refusal",
        "surrogate",
        "short seal",
        "long seal",
        "message",
    ],
)
def test_a_stranger_is_turned_away_and_the_hub_goes_on(
    party: Party, how: str, data: bytes, reason: str
) -> None:
    one, two = party.pair(how)
    with dial(one.listen(how)) as end:
        end.sendall(data)
        remote = party.one(1, Rejected)
        assert reason in remote.reason
        assert remote.reason.isprintable()
        assert read_end(end) in (b"", control(NO_PROOF))
    assert two.send(1, Number(value=1))
    assert party.one(1, Arrived).message == Number(value=1)


@both
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (os.urandom(64), "magic"),
        (encode_header(1, 0, 8, 1 << 40), "payload_bytes"),
        (encode_header(1, 0, 1 << 30, 0), "body_bytes"),
        (encode_header(7, 0, 0, 0), "not a message of this protocol"),
        (encode_header(2, 0, 2, 0) + b"{}", "Text"),
        (encode_header(1, 0, 8, 100, 0) + bytes(8) + b"cut", "cut in the middle"),
        (encode_header(1, 0, 8, 0)[:20], "cut in the middle"),
        (encode_header(1, IN_ARENA, 8, 100, 64) + bytes(8), "no memory is shared"),
        (encode_header(8, 1, 8, 0) + bytes(8), "not passed"),
        (b"", "without a goodbye"),
    ],
    ids=[
        "garbage",
        "long payload",
        "long body",
        "kind",
        "fields",
        "cut payload",
        "cut header",
        "arena",
        "share",
        "end",
    ],
)
def test_a_bad_member_is_lost_after_what_it_said_well_and_the_hub_goes_on(
    party: Party, how: str, data: bytes, reason: str
) -> None:
    one, two = party.pair(how)
    with impostor(party, one.listen(how)) as end:
        end.sendall(GOOD + data)
        end.shutdown(socket.SHUT_WR)
        assert party.one(1, Arrived).message == Number(value=0)
        lost = party.one(1, Lost)
    assert lost.member == 9
    assert reason in lost.reason
    assert not lost.in_peace
    assert one.members() == (2,)
    assert two.send(1, Number(value=1))
    assert party.one(1, Arrived).message == Number(value=1)


def test_descriptors_that_nobody_announced_end_the_connection_and_are_closed(party: Party) -> None:
    one = party.add(1)
    with impostor(party, one.listen("unix")) as end, Segment.create(4096, "a test") as segment:
        for _ in range(9):
            socket.send_fds(end, [GOOD], [segment.descriptor])
        assert "more descriptors" in party.one(1, Lost).reason


def test_what_is_passed_must_be_memory(party: Party) -> None:
    one = party.add(1)
    with impostor(party, one.listen("unix")) as end:
        socket.send_fds(end, [encode_header(8, 1, 8, 0) + bytes(8)], [end.fileno()])
        assert "cannot be mapped" in party.one(1, Lost).reason


@both
def test_a_silent_member_is_lost_at_the_limit(party: Party, how: str) -> None:
    clock = Clock()
    one = party.add(1, clock=clock)
    with impostor(party, one.listen(how)) as end:
        for _ in range(9):
            clock.now_s += 0.5
            assert one.poll(0) == []
        end.sendall(GOOD)
        assert party.one(1, Arrived).message == Number(value=0)
        for _ in range(9):
            clock.now_s += 0.5
            assert one.poll(0) == []
        clock.now_s += 0.5
        (lost,) = one.poll(0)
        assert isinstance(lost, Lost)
        assert lost.reason == "nothing received for 5 s, not even a heartbeat"


def test_a_stranger_that_says_nothing_is_turned_away(party: Party) -> None:
    clock = Clock()
    one = party.add(1, clock=clock)
    with dial(one.listen("tcp")):
        for _ in range(10):
            assert one.poll(0.001) == []
            clock.now_s += 0.5
        assert "did not identify itself" in party.one(1, Rejected).reason


@all_three
def test_a_member_that_computes_is_kept_alive_by_its_heartbeats(party: Party, how: str) -> None:
    _, two = party.pair(how, first={"settings": FAST}, second={"settings": FAST})
    del party.hubs[2]  # it computes: nobody polls it
    until_s = time.monotonic() + 2 * FAST.liveness.silence_s
    party.until(lambda: time.monotonic() > until_s)
    assert party.events[1] == []
    two.send(1, Number(value=1), [bytes(8 << 20)])  # what does not fit at once also leaves by itself
    assert party.one(1, Arrived).message == Number(value=1)


@all_three
def test_leaving_is_reported_as_peace(party: Party, how: str) -> None:
    one, two = party.pair(how)
    two.send(1, Number(value=1))
    two.close()
    two.close()
    assert party.hubs.pop(2) is two
    assert party.one(1, Arrived).message == Number(value=1)
    assert party.one(1, Lost) == Lost(2, "it closed its connection", in_peace=True)
    assert not one.send(2, Number(value=1))


@all_three
def test_disconnecting_tells_the_other_why(party: Party, how: str) -> None:
    one, _ = party.pair(how)
    one.disconnect(2, "its slot belongs to member 7")
    assert "its slot belongs to member 7" in party.one(2, Lost).reason
    assert party.events[1] == []
