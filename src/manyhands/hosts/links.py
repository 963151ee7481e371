"""Links between workers of different hosts: one TCP connection for each pair, under TLS where the run has it.

    store    link/0 … link/3       the address where each worker that has others elsewhere listens
    socket   higher rank ── ranks, nonce ──► lower rank
             ◄── nonce, HMAC ──                            both have the run's token
             ── HMAC ──►
             TLS, both with certificates                   where the run has them

The higher rank connects. Each connects to those below before it lets in those above, so nobody waits in a circle.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from manyhands.cluster.meeting import MeetingStore
from manyhands.errors import ManyhandsError, PeerTimeout
from manyhands.hosts.waiting import comes_true
from manyhands.hub.addresses import tune
from manyhands.link.secure import End, Security, TlsRefused
from manyhands.link.silence import SILENT_AFTER_S
from manyhands.link.tcp import TcpLink

__all__ = ["address_towards", "open_links"]

_HELLO: Final = struct.Struct("!II32s")  # from, to, nonce
_PROOF_BYTES: Final = 32
_STRANGER_S: Final = 2.0


def address_towards(host: str, family: int = socket.AF_INET) -> str:
    """This host's own address on the way to another; nothing is sent. ManyhandsError where there is no way."""
    try:
        found, kind, _, _, address = socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM)[0]
        with socket.socket(found, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ManyhandsError(f"{host} cannot be reached from {socket.gethostname()}: {error}") from error


def open_links(
    rank: int,
    far: Sequence[int],
    store: MeetingStore,
    *,
    address: str,
    token: bytes,
    security: Security,
    timeout_s: float,
    name_of: Callable[[int], str] = lambda rank: f"rank {rank}",
) -> dict[int, TcpLink]:
    """Collective among workers of several hosts: a link to each of `far`, those of other hosts; listens at `address`.

    PeerTimeout names who did not come, ManyhandsError who could not be trusted.
    """
    security.check_address(address)
    deadline = time.monotonic() + timeout_s
    links: dict[int, TcpLink] = {}
    try:
        with socket.create_server((address, 0), backlog=len(far) + 16) as listener:
            store.set(f"link/{rank}", f"{address}:{listener.getsockname()[1]}")
            for peer in sorted(one for one in far if one < rank):
                end = _dial(rank, peer, store, token, deadline)
                links[peer] = TcpLink(_secured(security.wrap_client, end, name_of(peer)), peer=name_of(peer))
            waited_for = {one for one in far if one > rank}
            while waited_for:
                peer, end = _accept(listener, rank, waited_for, token, deadline)
                links[peer] = TcpLink(_secured(security.wrap_server, end, name_of(peer)), peer=name_of(peer))
                waited_for.discard(peer)
    except BaseException:
        for link in links.values():
            link.abandon()
        raise
    return links


def _secured(wrap: Callable[[socket.socket, str], End], end: socket.socket, peer: str) -> End:
    try:
        return wrap(end, peer)
    except TlsRefused as error:
        raise ManyhandsError(f"{peer} and this process do not trust each other: {error}") from error


def _dial(rank: int, peer: int, store: MeetingStore, token: bytes, deadline: float) -> socket.socket:
    """A connection to a lower rank, each having shown the other that it has the token."""
    if not comes_true(lambda: store.check([f"link/{peer}"]), deadline - time.monotonic()):
        raise _late([peer], "say where it listens")
    host, _, port = store.get(f"link/{peer}").decode().rpartition(":")
    try:
        end = socket.create_connection((host, int(port)), max(0.001, deadline - time.monotonic()))
    except OSError as error:
        raise ManyhandsError(
            f"rank {rank} cannot connect to rank {peer} at {host}:{port}: {error}; see whether a firewall is between"
        ) from error
    try:
        nonce = secrets.token_bytes(_PROOF_BYTES)
        end.settimeout(max(0.001, deadline - time.monotonic()))
        end.sendall(_HELLO.pack(rank, peer, nonce))
        answer = _read(end, 2 * _PROOF_BYTES)
        theirs = answer[:_PROOF_BYTES]
        said = nonce + theirs + struct.pack("!II", rank, peer)
        if not hmac.compare_digest(answer[_PROOF_BYTES:], _proof(token, b"accept", said)):
            raise ManyhandsError(f"who answers at rank {peer}'s address, {host}:{port}, is not of this run")
        end.sendall(_proof(token, b"connect", said))
        tune(end, 4 * SILENT_AFTER_S)
        return end
    except OSError as error:
        end.close()
        raise ManyhandsError(f"rank {peer} at {host}:{port} ended the connection: {error}") from error
    except BaseException:
        end.close()
        raise


def _accept(
    listener: socket.socket, rank: int, waited_for: Iterable[int], token: bytes, deadline: float
) -> tuple[int, socket.socket]:
    """The next of those who are waited for; whoever cannot prove to be one is turned away."""
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise _late(sorted(waited_for), "connect")
        listener.settimeout(left_s)
        try:
            end, _ = listener.accept()
        except TimeoutError:
            continue
        peer = _admit(end, rank, token, min(_STRANGER_S, left_s))
        if peer is not None and peer in waited_for:
            tune(end, 4 * SILENT_AFTER_S)
            return peer, end
        end.close()


def _admit(end: socket.socket, rank: int, token: bytes, timeout_s: float) -> int | None:
    end.settimeout(timeout_s)
    try:
        peer, wanted, nonce = _HELLO.unpack(_read(end, _HELLO.size))
        if wanted != rank:
            return None
        mine = secrets.token_bytes(_PROOF_BYTES)
        said = nonce + mine + struct.pack("!II", peer, rank)
        end.sendall(mine + _proof(token, b"accept", said))
        if not hmac.compare_digest(_read(end, _PROOF_BYTES), _proof(token, b"connect", said)):
            return None
        return int(peer)
    except OSError:
        return None


def _read(end: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = end.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("it closed the connection")
        data += more
    return data


def _proof(token: bytes, word: bytes, said: bytes) -> bytes:
    return hmac.digest(token, b"link " + word + b"|" + said, "sha256")


def _late(ranks: Sequence[int], deed: str) -> PeerTimeout:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return PeerTimeout(f"{who} did not {deed} in time; see whether a firewall is between", ranks[0])
