"""Hubs over TLS: who is refused, by which sentence on both sides, and what somebody between them sees."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from certificates import HOSTS, careless, careless_security, folders, run_security
from descriptors import open_descriptors
from hubs import FAST, PATIENCE_S, TOKEN, Clock, Number, Party, control, dial
from manyhands.transport.certificates import make_certificates
from manyhands.transport.hub.handshake import Credentials, Handshake
from manyhands.transport.hub.hub_events import Arrived, Joined, Lost, Rejected, Settings
from manyhands.transport.security import Security
from relay import Relay

SECURE = Settings(security=run_security())


@pytest.fixture
def party() -> Iterator[Party]:
    before = len(open_descriptors())
    party = Party()
    yield party
    party.close()
    assert len(open_descriptors()) == before
    assert not [thread for thread in threading.enumerate() if "hub" in thread.name]


def test_a_role_of_another_authority_is_named_on_both_sides(party: Party) -> None:
    one = party.add(1, settings=SECURE)
    two = party.add(2, settings=Settings(security=Security.from_directory(folders("other") / HOSTS[1])))
    begin_s = time.monotonic()
    two.connect(1, one.listen("tcp"))
    lost = party.one(2, Lost)
    assert (lost.member, lost.in_peace) == (1, False)
    assert "its certificate is from another authority; give both hosts folders" in lost.reason
    reason = party.one(1, Rejected).reason
    assert "it refused this end's certificate, which is from another authority" in reason
    assert time.monotonic() - begin_s < 40.0  # it was refused by name, so nobody dials for a minute
    assert one.members() == two.members() == ()


def test_a_role_that_would_believe_anybody_is_refused_all_the_same(party: Party) -> None:
    one = party.add(1, settings=SECURE)
    foreign_row = careless_security(folders("other") / HOSTS[1])
    party.add(2, settings=Settings(security=foreign_row)).connect(1, one.listen("tcp"))
    assert "it refused this end's certificate, which is from another authority" in party.one(2, Lost).reason
    assert "its certificate is from another authority" in party.one(1, Rejected).reason


@pytest.mark.parametrize(
    ("moment", "dialler_hears", "listener_hears"),
    [
        (
            timedelta(days=-8),
            "has expired by its clock; make new ones",
            "its certificate has expired; make new",
        ),
        (
            timedelta(hours=5),
            "is not valid yet by its clock",
            "is not valid yet: this host's clock is behind",
        ),
    ],
    ids=["expired", "not valid yet"],
)
def test_a_certificate_of_another_time_is_reported_as_such(
    party: Party, tmp_path: Path, moment: timedelta, dialler_hears: str, listener_hears: str
) -> None:
    """The authority is the run's, kept for a year; the host's certificate is older or younger than now."""
    now = datetime.now(UTC)
    run = tmp_path / "run"
    make_certificates(run, ["a"], keep_authority=True, days=365, now=now - timedelta(days=30))
    make_certificates(run, ["b"], days=7, now=now + moment)
    one = party.add(1, settings=Settings(security=Security.from_directory(run / "a")))
    two = party.add(2, settings=Settings(security=careless_security(run / "b")))
    two.connect(1, one.listen("tcp"))
    assert dialler_hears in party.one(2, Lost).reason
    assert listener_hears in party.one(1, Rejected).reason


def talk_tls(party: Party, address: str, context: ssl.SSLContext) -> str:
    """What a stranger hears who shakes hands as `context` says."""
    said: list[str] = []

    def come() -> None:
        with dial(address) as end:
            end.settimeout(PATIENCE_S)
            try:
                with context.wrap_socket(end) as tls:
                    said.append(str(tls.recv(1)))
            except OSError as error:
                said.append(str(error))

    thread = threading.Thread(target=come)
    thread.start()
    party.until(lambda: bool(said))
    thread.join()
    return said[0]


def test_nobody_comes_in_without_a_certificate_or_with_an_older_protocol(party: Party) -> None:
    address = party.add(1, settings=SECURE).listen("tcp")
    assert "CERTIFICATE_REQUIRED" in talk_tls(party, address, careless(None))
    assert "it sent no certificate" in party.one(1, Rejected).reason
    old = careless(folders() / HOSTS[1])
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert "PROTOCOL_VERSION" in talk_tls(party, address, old)
    assert "does not use TLS 1.3" in party.one(1, Rejected).reason
    assert talk_tls(party, address, careless(folders() / HOSTS[1])) == str(b"\x01")  # the control


def test_the_certificate_alone_is_not_enough(party: Party) -> None:
    one = party.add(1, settings=SECURE)
    party.add(2, settings=SECURE, token=b"the token of another run").connect(1, one.listen("tcp"))
    assert "field 'token'" in party.one(2, Lost).reason
    assert "field 'token'" in party.one(1, Rejected).reason


def test_a_hub_with_tls_and_one_without_tell_each_other(party: Party) -> None:
    secure, plain = party.add(1, settings=SECURE), party.add(2)
    begin_s = time.monotonic()
    plain.connect(1, secure.listen("tcp"))
    assert "it uses TLS; give this process --tls DIR too" in party.one(2, Lost).reason
    assert "does not use TLS 1.3; start it with --tls DIR" in party.one(1, Rejected).reason
    secure.connect(2, plain.listen("tcp"))
    assert "does not use TLS 1.3; start it with --tls DIR" in party.one(1, Lost).reason
    assert "the peer uses TLS; give this process --tls DIR" in party.one(2, Rejected).reason
    assert time.monotonic() - begin_s < 40.0


def test_an_impostor_who_listens_gets_nothing_that_the_token_sealed(party: Party) -> None:
    """It stands where a member was, with a certificate of another authority."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        party.add(2, settings=SECURE).connect(1, f"tcp:127.0.0.1:{door.getsockname()[1]}")
        near, _ = door.accept()
        tls = careless(folders("other") / HOSTS[0], server_side=True).wrap_socket(
            near, server_side=True, do_handshake_on_connect=False
        )
        with tls:
            tls.settimeout(0.0)
            failed: list[str] = []

            def shake() -> bool:
                try:
                    tls.do_handshake()
                except (ssl.SSLWantReadError, BlockingIOError):
                    return False
                except OSError as error:
                    failed.append(str(error))
                return True

            party.until(shake)
            assert "UNKNOWN_CA" in failed[0]
        assert "its certificate is from another authority" in party.one(2, Lost).reason


# ── strangers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def hello() -> bytes:
    """The first flight of an honest client."""
    out = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        careless(folders() / HOSTS[1]).wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


HELLO = control(
    Handshake(Credentials(member=2, role="r", token=TOKEN, fingerprint="task"), expected=1).hello()
)
GARBAGE = {
    "zeros": bytes(4096),
    "noise": os.urandom(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a hello in the clear": HELLO,
    "an alert": b"\x15\x03\x03\x00\x02\x02\x28",
    "a record of 65535": b"\x16\x03\x01\xff\xff" + bytes(100),
    "hello twice": hello() * 2,
    "a hello with noise in it": hello()[:60] + os.urandom(64) + hello()[124:],
    "data before the handshake": b"\x17\x03\x03\x00\x20" + bytes(32),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_ends_its_connection_and_nothing_else(party: Party, what: str) -> None:
    one, two = party.pair("tls", {"settings": FAST}, {"settings": FAST})
    with dial(one.listen("tcp")) as end:
        end.sendall(GARBAGE[what])
        reason = party.one(1, Rejected).reason
    assert "a defect of this library" not in reason
    assert two.send(1, Number(value=7))
    assert party.one(1, Arrived).message == Number(value=7)


@pytest.mark.parametrize("said", [b"", b"x", "hello"])
def test_whoever_resets_its_connection_at_once_is_forgotten(party: Party, said: bytes | str) -> None:
    """A connection that is gone when it is accepted has no name any more, and no TLS can begin on it."""
    one = party.add(1, settings=SECURE)
    address = one.listen("tcp")
    for number in range(20):
        end = dial(address)
        end.sendall(hello() if isinstance(said, str) else said)
        if number % 2:
            party.events[1] += one.poll(0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()  # with a reset
    party.until(lambda: one.rejected == 20 and not one._reactor.connections)
    party.add(2, settings=SECURE).connect(1, address)
    assert party.one(1, Joined).member == 2


class PeerGoes:
    """What ssl does when the peer goes between two of its looks: it has taken the descriptor, and raises."""

    def wrap_socket(self, end: socket.socket, **_: object) -> None:
        os.close(end.detach())
        raise ConnectionResetError(104, "Connection reset by peer")


def test_a_descriptor_that_tls_took_with_it_is_forgotten(party: Party) -> None:
    security = careless_security(folders() / HOSTS[0])
    security._contexts = careless(None), PeerGoes()  # type: ignore[assignment]
    one = party.add(1, settings=Settings(security=security))
    with dial(one.listen("tcp")):
        assert "Connection reset by peer" in party.one(1, Rejected).reason
    assert not one._reactor.connections


def test_a_handshake_may_stop_at_any_byte_and_has_a_deadline(party: Party) -> None:
    clock = Clock()
    one = party.add(1, settings=SECURE, clock=clock)
    address, whole = one.listen("tcp"), hello()
    cuts = [0, 1, 4, 5, 6, 100, len(whole) - 1, len(whole)]
    with ExitStack() as stack:
        for cut in cuts:
            end = stack.enter_context(dial(address))
            end.sendall(whole[:cut])
        party.until(lambda: len(one._reactor.connections) == len(cuts))
        for _ in range(9):
            clock.now_s += 0.5
            party.events[1] += one.poll(0.001)
        assert one.rejected == 0
        clock.now_s += 0.6
        party.until(lambda: one.rejected == len(cuts))
        assert "did not identify itself in time" in party.one(1, Rejected).reason
    party.add(2, settings=SECURE).connect(1, address)
    assert party.one(1, Joined).member == 2


def test_members_get_in_beside_hundreds_of_handshakes_that_never_end(party: Party) -> None:
    one = party.add(1, settings=SECURE)
    address, whole = one.listen("tcp"), hello()
    with ExitStack() as stack:
        for number in range(300):
            end = stack.enter_context(dial(address))
            end.sendall(whole[: number % len(whole)])
            if number % 10 == 0:
                party.events[1] += one.poll(0)
        for member in (2, 3):
            party.add(member, settings=SECURE).connect(1, address)
        party.until(lambda: set(one.members()) == {2, 3})
        assert len(one._reactor.connections) <= 256 + 2


# ── what the network sees ─────────────────────────────────────────────────────────────────────────────────────────────


def talk_through(party: Party, settings: Settings, content: bytes) -> bytes:
    """What somebody in the middle hears when a member pushes `content` and is answered."""
    one, two = party.add(1, settings=settings), party.add(2, settings=settings)
    port = int(one.listen("tcp").rpartition(":")[2])
    with Relay(port) as relay:
        two.connect(1, f"tcp:127.0.0.1:{relay.port}")
        party.one(2, Joined)
        assert two.send(1, Number(value=1), [content])
        assert bytes(party.one(1, Arrived).payload) == content
        for hub in (two, one):
            hub.close()
    party.close()
    party.hubs.clear()
    return bytes(relay.heard)


def visible(content: bytes, heard: bytes) -> int:
    """How many of the pieces of 16 bytes that stand every 1000 in `content` are to be found in what was heard."""
    return sum(content[at : at + 16] in heard for at in range(0, len(content) - 16, 1000))


def test_whoever_reads_along_finds_no_tensor_with_tls_and_every_one_without(party: Party) -> None:
    content = os.urandom(300_000)
    pieces = len(range(0, len(content) - 16, 1000))
    plain = talk_through(party, Settings(), content)
    assert visible(content, plain) == pieces
    assert b"role 2" in plain
    secure = talk_through(Party(), SECURE, content)
    assert len(secure) > len(content)
    assert visible(content, secure) == 0
    for word in (b"role 2", b"MHFR", b"task", TOKEN):
        assert word not in secure


def test_one_bit_changed_on_the_way_ends_the_connection(party: Party) -> None:
    settings = replace(FAST, security=run_security())
    one, two = party.add(1, settings=settings), party.add(2, settings=settings)
    with Relay(int(one.listen("tcp").rpartition(":")[2])) as relay:
        two.connect(1, f"tcp:127.0.0.1:{relay.port}")
        party.one(1, Joined)
        relay.spoil_next.set()
        two.send(1, Number(value=1), [bytes(100)])
        lost = party.one(1, Lost)
        assert (lost.member, lost.in_peace) == (2, False)
        assert "was changed in transit" in lost.reason
        assert party.of(1, Arrived) == []
        for hub in (two, one):
            hub.close()
