"""Strangers at a hub: what they learn, whom they keep out, and how much is said about them: nothing, nobody, little."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

import manyhands.transport.hub.handshake as handshake
from descriptors import open_descriptors
from hubs import FAST, TOKEN, Clock, Number, Party, control, dial, raw, read_all, read_end
from manyhands.native.version import __version__
from manyhands.transport.frames import HEADER_BYTES
from manyhands.transport.hub import admission
from manyhands.transport.hub.admission import Dialer, PendingConnections, Rejections
from manyhands.transport.hub.handshake import CONTROL, NO_PROOF, Credentials, Handshake
from manyhands.transport.hub.hub_events import Arrived, Joined, Lost, Rejected, Settings
from manyhands.transport.security import Security

MEMBER = Credentials(member=2, role="worker", token=TOKEN, fingerprint="task")
both = pytest.mark.parametrize("how", ["unix", "tcp"])


@pytest.fixture
def party() -> Iterator[Party]:
    before = len(open_descriptors())
    party = Party()
    yield party
    party.close()
    assert len(open_descriptors()) == before
    assert not [thread for thread in threading.enumerate() if "hub" in thread.name]


# ── what they learn ───────────────────────────────────────────────────────────────────────────────────────────────────


def sayings() -> list[bytes]:
    """First messages of somebody who knows everything but the token."""
    wrong = Handshake(replace(MEMBER, token=b"some other secret"), expected=1)
    hello = wrong.hello()
    old = [7, "worker", __version__, "task", "ab" * 32]
    return [
        control(hello),
        control(hello._replace(seal=bytes(32))),
        raw(9, bytes(64)),
        raw(9, b"\xff" * 63),
        raw(1, json.dumps(old).encode()),
        raw(11, struct.pack("<qI", 2, 3) + b"\xed\xa0\x80"),
        raw(5, b"\5\0\0\0token\4\0\0\0\x1b[2J"),
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        bytes(HEADER_BYTES),
    ]


@both
@pytest.mark.parametrize("said", sayings(), ids=range(9))
def test_whoever_cannot_prove_the_token_is_told_the_same_and_nothing_of_release_or_task(
    party: Party, how: str, said: bytes
) -> None:
    one = party.add(1, fingerprint="the fingerprint of the task")
    with dial(one.listen(how)) as end:
        end.sendall(said)
        remote = party.one(1, Rejected)
        told = read_end(end)
    assert told in (b"", control(NO_PROOF))
    assert __version__.encode() not in told
    assert b"fingerprint of" not in told
    assert remote.reason.isprintable()
    assert "defect" not in remote.reason


@both
def test_a_listener_that_cannot_prove_the_token_learns_nothing_of_who_dialled(party: Party, how: str) -> None:
    other = party.add(1, token=b"the token of another run")
    party.add(2, fingerprint="the fingerprint of the task").connect(1, other.listen(how))
    assert "'token'" in party.one(2, Lost).reason
    assert "'token'" in party.one(1, Rejected).reason


@pytest.mark.parametrize("reply", [raw(10, b"\xff" * 63), control(NO_PROOF), bytes(64)])
def test_a_port_that_a_stranger_took_is_no_member(party: Party, reply: bytes) -> None:
    two = party.add(2, settings=Settings(connect_s=0.2))
    with socket.create_server(("127.0.0.1", 0)) as door:
        two.connect(1, f"tcp:127.0.0.1:{door.getsockname()[1]}")
        with ExitStack() as stack:
            door.setblocking(False)

            def answer() -> bool:
                try:
                    end, _ = door.accept()
                    stack.enter_context(end).sendall(reply)
                except BlockingIOError:
                    pass
                return bool(party.of(2, Lost))

            party.until(answer)
    assert party.one(2, Lost).reason.isprintable()
    assert two.members() == ()


def test_a_mistake_of_a_member_with_the_token_is_told_by_its_name(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = party.add(1), party.add(2)
    two.connect(1, one.listen("tcp"))
    monkeypatch.setattr(handshake, "__version__", "9.9.9")  # for what is accepted from now on
    assert "'package'" in party.one(1, Rejected).reason
    reason = party.one(2, Lost).reason
    assert "'9.9.9'" in reason
    assert repr(__version__) in reason


@both
def test_a_recorded_handshake_gets_a_challenge_and_no_further(party: Party, how: str) -> None:
    one = party.add(1)
    address = one.listen(how)
    shake = Handshake(MEMBER, expected=1)
    with dial(address) as end:
        end.sendall(hello := control(shake.hello()))
        challenge = CONTROL.decode(10, read_all(party, end)[HEADER_BYTES:])
        end.sendall(proof := control(shake.handle(challenge)))
        assert party.one(1, Joined).member == 2
    assert party.one(1, Lost).member == 2
    with dial(address) as end:
        end.sendall(hello + proof)
        assert "'token'" in party.one(1, Rejected).reason
        told = read_end(end)
    assert told.endswith(control(NO_PROOF)) or told == b""
    assert __version__.encode() not in told
    assert one.members() == ()


# ── whom they keep out ────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def cohort(address: str, count: int, *, come_back: bool) -> Iterator[list[int]]:
    """So many strangers who hold their connections, and are back at once when they are closed if they `come_back`."""
    over, came = threading.Event(), [0]

    def stay() -> None:
        ends: list[socket.socket] = []
        while not over.is_set():
            try:
                ends += [dial(address) for _ in range(count - len(ends))]
                came[0] += 1
            except OSError:  # the queue is full
                pass
            over.wait(0.002)
            if come_back:
                ends = [end for end in ends if not closed(end)]
        for end in ends:
            end.close()

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        yield came
    finally:
        over.set()
        thread.join()


def closed(end: socket.socket) -> bool:
    try:
        gone = end.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        gone = True
    if gone:
        end.close()
    return gone


@both
@pytest.mark.parametrize("come_back", [False, True], ids=["who hold", "who come back"])
def test_members_get_in_beside_hundreds_of_strangers(party: Party, how: str, come_back: bool) -> None:
    one = party.add(1)
    address = one.listen(how)
    before = len(open_descriptors())
    with cohort(address, 400, come_back=come_back) as came:
        party.until(lambda: one.rejected > 100 and came[0] > 0)
        for member in (2, 3, 4):
            party.add(member).connect(1, address)
        party.until(lambda: set(one.members()) == {2, 3, 4})
        # Those of the strangers, who are of this process too, and no more of ours than there are places.
        assert len(open_descriptors()) - before < 400 + 256 + 50
        assert party.hubs[2].send(1, Number(value=1))
        assert party.one(1, Arrived).message == Number(value=1)
    assert len(party.of(1, Rejected)) <= 5


def test_a_member_that_was_pushed_out_dials_again(party: Party) -> None:
    clock = Clock()
    one, two = party.add(1, clock=clock), party.add(2)
    address = one.listen("tcp")
    two.connect(1, address)  # it has sent nothing, for nobody polls it
    with ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(dial(address))
            party.events[1] += one.poll(0)
            clock.now_s += 0.01
        assert one.rejected == 401 - 256
        assert one.members() == ()
    assert party.one(2, Joined).member == 1
    assert party.of(2, Lost) == []


def test_a_unix_socket_of_another_user_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    listening, address = admission.listen("unix", Security.loopback())
    with listening:
        admission.dial(address, Security.loopback()).close()
        monkeypatch.setattr(admission.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ConnectionRefusedError, match="another user listens at unix:manyhands-"):
            admission.dial(address, Security.loopback())


def test_a_call_is_repeated_until_somebody_listens(party: Party) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = f"tcp:127.0.0.1:{door.getsockname()[1]}"
    two = party.add(2)
    two.connect(1, address)
    until_s = time.monotonic() + 0.3
    party.until(lambda: time.monotonic() > until_s)
    assert party.events[2] == []
    party.add(1).listen(address)
    assert party.one(2, Joined).member == 1


def test_whoever_is_not_wanted_any_more_is_not_called(party: Party) -> None:
    two = party.add(2, settings=Settings(connect_s=0.1))
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = f"tcp:127.0.0.1:{door.getsockname()[1]}"
        two.connect(1, address)  # it is connected, and nobody will answer
        two.connect(3, "unix:nobody-listens-at-this-name")
        for member in (1, 3):
            two.hang_up(member)
        until_s = time.monotonic() + 0.2
        party.until(lambda: time.monotonic() > until_s)
    assert party.events[2] == []
    two.connect(1, "unix:nobody-listens-at-this-name")  # and may be called again
    assert party.one(2, Lost).member == 1


def test_a_hub_without_descriptors_waits_and_does_not_spin(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = party.add(1, settings=FAST)
    address = one.listen("tcp")
    real, tries = socket.socket.accept, [0]

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        tries[0] += 1
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", accept)
    with dial(address):
        until_s = time.monotonic() + 0.2
        party.until(lambda: time.monotonic() > until_s)
        assert 1 <= tries[0] < 40  # at most one at each look, every 10 ms
        monkeypatch.setattr(socket.socket, "accept", real)
        party.add(2, settings=FAST).connect(1, address)
        assert party.one(1, Joined).member == 2


# ── how much is said ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_thousands_of_strangers_are_a_few_events(party: Party) -> None:
    clock = Clock()
    one = party.add(1, clock=clock)
    address = one.listen("tcp")
    for _ in range(300):
        with dial(address) as end:
            end.sendall(b"x" * 64)
            party.events[1] += one.poll(0)
        clock.now_s += 0.01
    clock.now_s += 10.0
    party.until(lambda: sum(remote.count for remote in party.of(1, Rejected)) == one.rejected == 300)
    assert len(party.events[1]) <= 5
    assert party.of(1, Rejected)[0].count == 1


def test_the_tally_tells_the_first_at_once_and_the_rest_ever_more_rarely() -> None:
    tally, told = Rejections(), []
    for second in range(24 * 3600):
        tally.add("x\x1b[2J\ud800\n" * 1000, None)
        remote = tally.due(float(second))
        if remote is not None:
            told.append((second, remote))
    assert [second for second, _ in told][:6] == [0, 1, 3, 7, 15, 31]
    assert len(told) < 40
    assert sum(remote.count for _, remote in told) <= tally.total == 24 * 3600
    assert all(remote.reason.isprintable() and len(remote.reason) < 5000 for _, remote in told)
    assert Rejections().due(0.0) is None


# ── the decisions alone ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_oldest_of_the_silent_goes_and_who_knocked_stays() -> None:
    newcomers: PendingConnections[str] = PendingConnections(silent=2, sealed=1)
    assert newcomers.oldest() is None
    assert newcomers.arrived("a", 0.0) is None
    assert newcomers.arrived("b", 0.1) is None
    assert newcomers.arrived("a", 0.2, sealed=True) is None
    assert newcomers.has_room(0.2)
    assert newcomers.arrived("c", 0.2) is None
    assert not newcomers.has_room(0.59)  # both have their moment of grace
    assert newcomers.has_room(0.6)
    assert newcomers.arrived("d", 0.6) == "b"
    newcomers.left("b")
    assert newcomers.oldest() == "c"
    assert newcomers.arrived("d", 0.7, sealed=True) == "a"
    newcomers.left("a")
    newcomers.left("d")
    assert newcomers.arrived("c", 0.8, sealed=True) is None
    assert newcomers.oldest() is None


def test_calls_pause_longer_and_longer_and_end_with_a_sentence() -> None:
    calls = Dialer(10.0, random.Random(1))
    calls.begin(7, "tcp:x", 100.0)
    assert 7 in calls
    now_s, pauses = 100.0, []
    while True:
        assert calls.next_s == now_s
        assert calls.due(now_s) == [(7, "tcp:x")]
        assert calls.due(now_s) == []  # it is being tried
        assert calls.next_s == float("inf")
        sentence = calls.failed(7, "no answer", now_s)
        if sentence is not None:
            break
        pauses.append(calls.next_s - now_s)
        now_s = calls.next_s
    assert now_s == 110.0  # the last try is at the deadline itself
    assert all(
        0.5 <= pause / longest <= 1.0
        for pause, longest in zip(pauses, (0.05, 0.1, 0.2, 0.4, 0.8), strict=False)
    )
    assert all(pause <= 1.0 for pause in pauses)
    assert len(set(pauses[5:])) > 3  # by chance
    assert (
        sentence == f"not reached at tcp:x within 10.0 s, in {len(pauses) + 1} tries; last error: no answer"
    )
    assert 7 not in calls


def test_a_member_that_was_lost_at_once_is_called_after_a_pause() -> None:
    calls = Dialer(10.0, random.Random(1))
    calls.begin(7, "tcp:x", 0.0)
    calls.due(0.0)
    calls.answered(7, 0.0)
    for number, longest in enumerate((0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0)):
        now_s = float(number)
        calls.begin(7, "tcp:x", now_s)
        assert longest / 2 <= calls.next_s - now_s <= longest
        assert calls.due(calls.next_s) == [(7, "tcp:x")]
        calls.answered(7, now_s)
    calls.begin(7, "tcp:x", 100.0)
    assert calls.due(100.0) == [(7, "tcp:x")]
    calls.end(7)
    assert calls.failed(7, "taken back", 100.0) == "taken back"


def test_a_mistake_of_ours_before_the_proof_ends_that_connection_and_is_named(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Handshake, message: object) -> None:
        raise KeyError("a mistake of ours")

    one, two = party.pair("tcp")
    monkeypatch.setattr(Handshake, "handle", broken)
    with dial(one.listen("tcp")) as end:
        end.sendall(control(Handshake(MEMBER, expected=1).hello()))
        reason = party.one(1, Rejected).reason
    assert reason.startswith("a defect of this library")
    assert "KeyError('a mistake of ours')" in reason
    assert two.send(1, Number(value=1))
    assert party.one(1, Arrived).message == Number(value=1)


def test_a_mistake_of_the_application_is_not_hidden(party: Party) -> None:
    def broken(member: int, message: object, num_bytes: int) -> memoryview | None:
        raise KeyError("a mistake of the application")

    _, two = party.pair("tcp", first={"destination": broken})
    two.send(1, Number(value=1), [bytes(10)])
    with pytest.raises(KeyError, match="a mistake of the application"):
        party.until(lambda: False)
