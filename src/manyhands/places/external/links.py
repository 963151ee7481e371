"""Links between workers of different hosts: one TCP connection for each pair, with TLS if the run uses it.

    store    link/0 … link/3       the address where each worker that has others elsewhere listens
    socket   higher rank ── ranks, nonce ──► lower rank
             ◄── nonce, HMAC ──                            both have the run's token
             ── HMAC ──►
             TLS, both with certificates                   where the run has them

The higher rank connects. Each rank connects to the lower ranks before it accepts the higher ones, so there is no
cycle of waits. If workers come and go, the addresses come not from a store but from the membership that all are
sent (`meet_all`).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from manyhands.errors import ManyhandsError, PeerTimeout
from manyhands.places.external.key_value_store import comes_true
from manyhands.places.external.specification import listening_at
from manyhands.places.local.rendezvous import RendezvousStore
from manyhands.transport.heartbeats import Heartbeats, exchange_places
from manyhands.transport.hub.addresses import tune
from manyhands.transport.link.tcp import TcpLink
from manyhands.transport.liveness import SILENT_AFTER_S
from manyhands.transport.security import HANDSHAKE_S, Security
from manyhands.transport.tls import End, TlsRefused

__all__ = ["address_towards", "meet_all", "open_heartbeats", "open_links"]

_HELLO: Final = struct.Struct("!II32s")  # from, to, nonce
_PROOF_BYTES: Final = 32
_PENDING_S: Final = 2.0
_SLICE_S: Final = 0.2
_CONNECT_S: Final = 2.0

Still = Callable[[], None]
"""Called several times a second during a wait; raises if waiting has become pointless."""


def _go_on() -> None:
    """Continue waiting: the default `Still`, which never raises."""


def address_towards(host: str, family: int = socket.AF_INET) -> str:
    """This host's address on the route to another host; sends nothing. ManyhandsError if there is no route."""
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
    store: RendezvousStore,
    *,
    address: str,
    token: bytes,
    security: Security,
    timeout_s: float,
    name_of: Callable[[int], str] = lambda rank: f"rank {rank}",
) -> dict[int, TcpLink]:
    """Collective among workers of several hosts: open a link to each rank of `far`, the ranks on other hosts.

    Other hosts reach this worker at `address`. PeerTimeout names the ranks that did not connect, ManyhandsError
    those that could not be trusted.
    """
    security.check_address(address)
    deadline = time.monotonic() + timeout_s

    def where(peer: int) -> str:
        if not comes_true(lambda: store.check([f"link/{peer}"]), deadline - time.monotonic()):
            raise _late([peer], "say where it listens")
        return store.get(f"link/{peer}").decode()

    with _listening(rank, address, len(far) + 16) as listener:
        store.set(f"link/{rank}", f"{address}:{listener.getsockname()[1]}")
        return meet_all(
            rank,
            dict.fromkeys(far, security),
            listener,
            where,
            token=token,
            deadline=deadline,
            name_of=name_of,
        )


def open_heartbeats(
    rank: int,
    world: int,
    store: RendezvousStore,
    *,
    address: str,
    timeout_s: float,
    on_lost: Callable[[int, str], None],
) -> Heartbeats:
    """Collective: monitor all other workers, those of this host too; `on_lost(rank, sentence)` runs in a thread.

    The control connections have heartbeats too, but Python sends them, and a long call that holds the GIL delays them:
    their timeouts are long. The heartbeats here come from compiled code, as those of `mh.join` do.
    """
    deadline = time.monotonic() + timeout_s

    def wait_for(key: str) -> None:
        if not comes_true(lambda: store.check([key]), deadline - time.monotonic()):
            raise _late([int(key.rpartition("/")[2]) if key[-1].isdigit() else 0], "say where it listens")

    own, places, secret = exchange_places(store, rank, world, address, "beats/", wait_for)
    others = {peer: place for peer, place in places.items() if peer != rank}
    return Heartbeats(rank, own, others, secret, on_lost)


def meet_all(
    rank: int,
    far: Mapping[int, Security],
    listener: socket.socket,
    where: Callable[[int], str],
    *,
    token: bytes,
    deadline: float,
    name_of: Callable[[int], str] = lambda rank: f"rank {rank}",
    still: Still = _go_on,
) -> dict[int, TcpLink]:
    """Collective: open a link to each rank of `far`; `where` returns the `host:port` at which a rank listens.

    A connection that does not prove this token is rejected, so a token may belong to one rendezvous of many.
    PeerTimeout names the ranks that did not connect before `deadline`, ManyhandsError those that could not be
    reached or trusted.
    """
    links: dict[int, TcpLink] = {}
    try:
        for peer in sorted(one for one in far if one < rank):
            end = _dial(rank, peer, where(peer), token, deadline, still)
            secured = _secured(far[peer].wrap_client, end, name_of(peer), deadline)
            links[peer] = TcpLink(secured, peer=name_of(peer))
        waited_for = {one for one in far if one > rank}
        while waited_for:
            peer, end = _accept(listener, rank, waited_for, token, deadline, still)
            secured = _secured(far[peer].wrap_server, end, name_of(peer), deadline)
            links[peer] = TcpLink(secured, peer=name_of(peer))
            waited_for.discard(peer)
    except BaseException:
        for link in links.values():
            link.abandon()
        raise
    return links


def _listening(rank: int, address: str, backlog: int) -> socket.socket:
    """Listen where others reach `address`, which may be a name for this host that no interface has."""
    try:
        host = listening_at(f"{address}:0").split(":")[1]
        return socket.create_server((host, 0), backlog=backlog)
    except OSError as error:
        raise ManyhandsError(f"rank {rank} cannot listen at {address}: {error}") from error


def _secured(
    wrap: Callable[[socket.socket, str, float], End], end: socket.socket, peer: str, deadline: float
) -> End:
    try:
        return wrap(end, peer, min(HANDSHAKE_S, _left_s(deadline)))
    except TlsRefused as error:
        raise ManyhandsError(f"{peer} and this process do not trust each other: {error}") from error


def _dial(rank: int, peer: int, address: str, token: bytes, deadline: float, still: Still) -> socket.socket:
    """Connect to a lower rank; both ends prove to each other that they have the token."""
    host, _, port = address.rpartition(":")
    try:
        end = _connected(host, int(port), deadline, still)
    except OSError as error:
        raise ManyhandsError(
            f"rank {rank} cannot connect to rank {peer} at {host}:{port}: {error}; see whether a firewall is between"
        ) from error
    try:
        nonce = secrets.token_bytes(_PROOF_BYTES)
        end.settimeout(_left_s(deadline))
        end.sendall(_HELLO.pack(rank, peer, nonce))
        answer = _read(end, 2 * _PROOF_BYTES, deadline, still)
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


def _connected(host: str, port: int, deadline: float, still: Still) -> socket.socket:
    """Dial again while the host does not answer; a refused connection raises at once."""
    while True:
        still()
        left_s = deadline - time.monotonic()
        try:
            return socket.create_connection((host, port), max(0.001, min(left_s, _CONNECT_S)))
        except TimeoutError:
            if left_s <= _CONNECT_S:
                raise


def _accept(
    listener: socket.socket,
    rank: int,
    waited_for: Iterable[int],
    token: bytes,
    deadline: float,
    still: Still,
) -> tuple[int, socket.socket]:
    """Accept the next of the awaited ranks; a peer that cannot prove the token is rejected."""
    while True:
        still()
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise _late(sorted(waited_for), "connect")
        listener.settimeout(min(left_s, _SLICE_S))
        try:
            end, _ = listener.accept()
        except TimeoutError:
            continue
        peer = _admit(end, rank, token, time.monotonic() + min(_PENDING_S, left_s), still)
        if peer is not None and peer in waited_for:
            tune(end, 4 * SILENT_AFTER_S)
            return peer, end
        end.close()


def _admit(end: socket.socket, rank: int, token: bytes, deadline: float, still: Still = _go_on) -> int | None:
    try:
        peer, wanted, nonce = _HELLO.unpack(_read(end, _HELLO.size, deadline, still))
        if wanted != rank:
            return None
        mine = secrets.token_bytes(_PROOF_BYTES)
        said = nonce + mine + struct.pack("!II", peer, rank)
        end.sendall(mine + _proof(token, b"accept", said))
        if not hmac.compare_digest(
            _read(end, _PROOF_BYTES, deadline, still), _proof(token, b"connect", said)
        ):
            return None
        return int(peer)
    except OSError:
        return None
    except BaseException:
        end.close()
        raise


def _read(end: socket.socket, num_bytes: int, deadline: float, still: Still) -> bytes:
    data = b""
    while len(data) < num_bytes:
        still()
        left_s = deadline - time.monotonic()
        end.settimeout(max(0.001, min(left_s, _SLICE_S)))
        try:
            more = end.recv(num_bytes - len(data))
        except TimeoutError:
            if left_s <= _SLICE_S:
                raise
            continue
        if not more:
            raise ConnectionResetError("it closed the connection")
        data += more
    return data


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _proof(token: bytes, word: bytes, said: bytes) -> bytes:
    return hmac.digest(token, b"link " + word + b"|" + said, "sha256")


def _late(ranks: Sequence[int], deed: str) -> PeerTimeout:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return PeerTimeout(f"{who} did not {deed} in time; see whether a firewall is between", ranks[0])
