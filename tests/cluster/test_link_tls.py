"""Links over TLS: who is refused, by which sentence on both sides, and what somebody between them sees.

That messages, deadlines and deaths are those of every other link is `test_link_contract`'s to say.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from certificates import HOSTS, careless_security, folders, run_security
from manyhands.transport.link.interface import Message, PeerDied, Queued, Received
from manyhands.transport.link.tcp import TcpLink, connected
from manyhands.transport.security import Security
from manyhands.transport.tls import End, SecureSocket, TlsRefused
from relay import Relay

PATIENCE_S = 60.0


def both(first: Callable[[], End], second: Callable[[], End]) -> list[End | TlsRefused]:
    """What two ends come to, that shake hands at the same time."""

    def outcome(shake: Callable[[], End]) -> End | TlsRefused:
        try:
            return shake()
        except TlsRefused as refused:
            return refused

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(outcome, (first, second)))


def linked(security: Security) -> tuple[TcpLink, TcpLink, Relay]:
    """Two ends of a link with somebody in the middle."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay(server.getsockname()[1]).__enter__()
        near = socket.create_connection(("127.0.0.1", relay.port), PATIENCE_S)
        far, _ = server.accept()
    ends = both(
        lambda: security.wrap(near, "worker 1 on host-b", server_side=False),
        lambda: security.wrap(far, "worker 0 on host-a", server_side=True),
    )
    links = []
    for end, peer in zip(ends, ("worker 1", "worker 0"), strict=True):
        assert not isinstance(end, TlsRefused), end
        links.append(TcpLink(end, peer=peer))
    return links[0], links[1], relay


def test_whoever_reads_along_finds_no_tensor_with_tls_and_every_one_without() -> None:
    content = os.urandom(400_000)
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    found = {}
    for name, security in {"plain": Security.loopback(), "TLS": run_security()}.items():
        first, second, relay = linked(security)
        assert isinstance(first.send(Message(kind=1, payload=tensor)), Queued)
        outcome = second.receive(PATIENCE_S)
        assert isinstance(outcome, Received)
        assert torch.equal(outcome.message.payload, tensor)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(TcpLink.close, (first, second)))
        relay.__exit__()
        heard = bytes(relay.heard)
        assert len(heard) > len(content)
        found[name] = [content[at : at + 16] in heard for at in range(0, len(content), 1000)]
        assert (b"MHFR" in heard) is (name == "plain")
    assert all(found["plain"])
    assert not any(found["TLS"])


def test_one_bit_changed_on_the_way_is_the_end_of_the_link() -> None:
    first, second, relay = linked(run_security())
    relay.spoil_next.set()
    first.send(Message(kind=1, payload=torch.zeros(1000)))
    outcome = second.receive(PATIENCE_S)
    assert isinstance(outcome, PeerDied)
    assert outcome.reason == "worker 0 is gone: its connection broke (the data was changed in transit)"
    for link in (first, second):
        link.close(silently=True)
    relay.__exit__()


def test_an_end_of_another_authority_is_named_on_both_sides() -> None:
    near, far = connected()
    other = careless_security(folders("other") / HOSTS[1])
    begin_s = time.monotonic()
    refused = both(
        lambda: other.wrap(near, "worker 0 on host-a", server_side=False),
        lambda: run_security().wrap(far, "worker 1 on host-b", server_side=True),
    )
    assert [str(one) for one in refused] == [
        "worker 0 on host-a: it refused this end's certificate, which is from another authority; give both hosts "
        "folders made by the same `manyhands certificates`",
        "worker 1 on host-b: its certificate is from another authority; give both hosts folders made by the same "
        "`manyhands certificates`",
    ]
    assert time.monotonic() - begin_s < 40.0
    assert near.fileno() == far.fileno() == -1


def test_an_end_without_tls_is_named() -> None:
    near, far = connected()
    with near:
        near.sendall(bytes(64))
        with pytest.raises(TlsRefused, match=r"worker 1: it does not use TLS 1\.3; start it with --tls DIR"):
            run_security().wrap(far, "worker 1", server_side=True)
        near.settimeout(PATIENCE_S)
        assert near.recv(100)[:2] == b"\x15\x03"  # and is told in the words of TLS


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"], ids=["nothing", "a beginning"])
def test_a_handshake_that_stops_ends_at_its_deadline(said: bytes) -> None:
    near, far = connected()
    with near:
        near.sendall(said)
        begin_s = time.monotonic()
        with pytest.raises(TlsRefused, match=r"worker 1: did not finish the TLS handshake within 0\.2 s"):
            run_security().wrap(far, "worker 1", timeout_s=0.2, server_side=True)
        assert time.monotonic() - begin_s < 40.0
    near, far = connected()
    near.close()
    with pytest.raises(TlsRefused, match=r"worker 1: the connection broke in the TLS handshake"):
        run_security().wrap(far, "worker 1", server_side=False)


def test_a_server_that_says_something_else_after_the_handshake_is_refused() -> None:
    near, far = connected()
    server = run_security().begin(far, server_side=True)
    assert isinstance(server, SecureSocket)
    far.settimeout(PATIENCE_S)

    def say_no(context: ssl.SSLContext) -> None:
        with context.wrap_socket(far, server_side=True) as tls:
            tls.sendall(b"\x02")

    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(say_no, server._context)
        with pytest.raises(
            TlsRefused, match=r"worker 1: TLS failed \(.*it sent something other than the hands"
        ):
            run_security(HOSTS[1]).wrap(near, "worker 1", server_side=False)
        said.result(PATIENCE_S)


def test_nothing_is_sent_or_received_before_the_handshake() -> None:
    near, far = connected()
    with near, far:
        end = run_security().begin(near, server_side=False)
        assert isinstance(end, SecureSocket)
        with pytest.raises(RuntimeError, match="before the TLS handshake"):
            end.sendmsg([b"secret"])
        with pytest.raises(RuntimeError, match="before the TLS handshake"):
            end.recv_into(memoryview(bytearray(1)))
        end.close()


def test_both_ends_have_agreed_on_tls_1_3_with_certificates_of_the_run() -> None:
    near, far = connected()
    ends = both(
        lambda: run_security(HOSTS[1]).wrap(near, "a", server_side=False),
        lambda: run_security().wrap(far, "b", server_side=True),
    )
    for end, host in zip(ends, HOSTS, strict=True):
        assert isinstance(end, SecureSocket)
        tls = end._tls
        assert isinstance(tls, ssl.SSLSocket)
        assert tls.version() == "TLSv1.3"
        names = tls.getpeercert()
        assert names is not None
        assert names["subjectAltName"] == (("DNS", host),)
        end.close()
