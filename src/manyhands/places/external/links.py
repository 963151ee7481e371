"""What connects externally started workers: memory and links of one host, and TCP links between hosts, with TLS.

The higher rank connects, to an address that the lower one has put into the store (`link/0` …) or, if workers come and
go, that the membership has which all are sent (`connect_all`). Both prove the run's token by the handshake of
`transport.hub.handshake`; TLS follows, where the run has certificates. Each rank connects to the lower ranks before it
accepts the higher ones, so there is no cycle of waits.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from typing import Final

from manyhands.errors import ManyhandsError, PeerTimeout, UserError
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.native.segment import Segment
from manyhands.places.external.run_store import comes_true
from manyhands.places.external.specification import listening_at
from manyhands.places.local.rendezvous import Rendezvous, ranks_named
from manyhands.transport.frames import OF_TRANSPORT, encode_header
from manyhands.transport.heartbeats import Heartbeats, exchange_places
from manyhands.transport.hub.admission import tune
from manyhands.transport.hub.handshake import CONTROL, NO_PROOF, Credentials, HandshakeRefused, authenticate
from manyhands.transport.link.interface import Link
from manyhands.transport.link.mesh import mesh_kind
from manyhands.transport.link.tcp import TcpLink
from manyhands.transport.liveness import SILENT_AFTER_S, RendezvousStore
from manyhands.transport.messages import ProtocolError
from manyhands.transport.security import HANDSHAKE_S, Security
from manyhands.transport.tls import TlsRefused

_FINGERPRINT: Final = "manyhands link 2"
_PENDING_S: Final = 2.0
_SLICE_S: Final = 0.2
_CONNECT_S: Final = 2.0

Still = Callable[[], None]
"""Called several times a second during a wait; raises if waiting has become pointless."""


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
    purpose: str = "link",
) -> dict[int, TcpLink]:
    """Collective among workers of several hosts: open a link to each rank of `far`, the ranks on other hosts.

    Several such links of one run have each a `purpose` of their own. Other hosts reach this worker at `address`.
    PeerTimeout names the ranks that did not connect, ManyhandsError those that could not be trusted.
    """
    security.check_address(address)
    deadline = time.monotonic() + timeout_s

    @cache
    def addresses() -> dict[int, str]:
        lower = [peer for peer in far if peer < rank]
        keys = [f"{purpose}/{peer}" for peer in lower]
        _wait_for(store, keys, deadline)
        return dict(zip(lower, (text.decode() for text in store.multi_get(keys)), strict=True))

    try:  # `address` may be a name for this host that no interface has
        host = listening_at(f"{address}:0").split(":")[1]
        listener = socket.create_server((host, 0), backlog=len(far) + 16)
    except OSError as error:
        raise ManyhandsError(f"rank {rank} cannot listen at {address}: {error}") from error
    with listener:
        store.set(f"{purpose}/{rank}", f"{address}:{listener.getsockname()[1]}")
        return connect_all(
            rank,
            dict.fromkeys(far, security),
            listener,
            lambda peer: addresses()[peer],
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
    own, places, secret = exchange_places(
        store, rank, world, address, "beats/", lambda keys: _wait_for(store, keys, deadline)
    )
    others = {peer: place for peer, place in places.items() if peer != rank}
    return Heartbeats(rank, own, others, secret, on_lost)


def _wait_for(store: RendezvousStore, keys: list[str], deadline: float) -> None:
    if not comes_true(lambda: store.check(keys), deadline - time.monotonic()):
        missing = [key for key in keys if not store.check([key])] or keys
        late = {int(key.rpartition("/")[2]) if key[-1].isdigit() else 0 for key in missing}
        raise _late(sorted(late), "publish its address")


def connect_all(
    rank: int,
    far: Mapping[int, Security],
    listener: socket.socket,
    where: Callable[[int], str],
    *,
    token: bytes,
    deadline: float,
    name_of: Callable[[int], str] = lambda rank: f"rank {rank}",
    still: Still = lambda: None,
) -> dict[int, TcpLink]:
    """Collective: open a link to each rank of `far`; `where` returns the `host:port` at which a rank listens.

    A connection that does not prove this token is rejected, so it may belong to one rendezvous of many. PeerTimeout
    names the ranks that did not connect before `deadline`, ManyhandsError those that could not be reached or trusted.
    """
    links: dict[int, TcpLink] = {}
    mine = Credentials(member=rank, role=f"rank {rank}", token=token, fingerprint=_FINGERPRINT)

    def add(peer: int, end: socket.socket, *, server_side: bool) -> None:
        name, timeout_s = name_of(peer), min(HANDSHAKE_S, max(0.001, deadline - time.monotonic()))
        tune(end, 4 * SILENT_AFTER_S)
        try:
            links[peer] = TcpLink(far[peer].wrap(end, name, timeout_s, server_side=server_side), peer=name)
        except TlsRefused as error:
            raise ManyhandsError(f"{name} and this process do not trust each other: {error}") from error

    try:
        for peer in sorted(one for one in far if one < rank):
            add(peer, _dial(mine, peer, where(peer), deadline, still), server_side=False)
        while waited_for := {one for one in far if one > rank} - links.keys():
            add(*_accept(listener, mine, waited_for, deadline, still), server_side=True)
    except BaseException:
        for link in links.values():
            link.close(silently=True)
        raise
    return links


def _dial(mine: Credentials, peer: int, address: str, deadline: float, still: Still) -> socket.socket:
    """Connect to a lower rank, again while its host does not answer; a refused connection raises at once."""
    host, _, port = address.rpartition(":")
    while True:
        still()
        left_s = deadline - time.monotonic()
        try:
            end = socket.create_connection((host, int(port)), max(0.001, min(left_s, _CONNECT_S)))
            break
        except OSError as error:
            if not isinstance(error, TimeoutError) or left_s <= _CONNECT_S:
                raise ManyhandsError(
                    f"{mine.role} cannot connect to rank {peer} at {address}: {error}; is a firewall in between?"
                ) from error
    try:
        authenticate(end, mine, peer, deadline, still)
        return end
    except BaseException as error:
        end.close()
        if isinstance(error, ProtocolError | HandshakeRefused):
            sentence = f"the process at rank {peer}'s address, {address}, is not part of this run: {error}"
        elif isinstance(error, OSError):
            sentence = f"rank {peer} at {address} ended the connection: {error}"
        else:
            raise
        raise ManyhandsError(sentence) from error


def _accept(
    listener: socket.socket, mine: Credentials, waited_for: Iterable[int], deadline: float, still: Still
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
        peer = _admit(end, mine, time.monotonic() + min(_PENDING_S, left_s), still)
        if peer is not None and peer in waited_for:
            return peer, end
        end.close()


def _admit(end: socket.socket, mine: Credentials, deadline: float, still: Still = lambda: None) -> int | None:
    """The rank that a new connection proves to be; None for a peer that proves nothing."""
    try:
        return authenticate(end, mine, None, deadline, still).member
    except (ProtocolError, HandshakeRefused):
        kind, body = CONTROL.encode(NO_PROOF)
        with suppress(OSError):  # it is gone
            end.sendall(encode_header(kind, OF_TRANSPORT, len(body), 0) + body)
        return None
    except OSError:
        return None
    except BaseException:
        end.close()
        raise


def _late(ranks: Sequence[int], deed: str) -> PeerTimeout:
    return PeerTimeout(f"{ranks_named(ranks)} did not {deed} in time; is a firewall in between?", ranks[0])


def no_group() -> SharedGroup:
    raise UserError("workers on several hosts cannot share memory")


def share_group(rendezvous: Rendezvous, purpose: str, timeout_s: float) -> SharedGroup:
    with share_group_files(rendezvous, purpose, timeout_s) as files:
        return attach_group(files, rendezvous, timeout_s)


def attach_group(files: SharedGroupFiles, rendezvous: Rendezvous, timeout_s: float) -> SharedGroup:
    """Attach this worker to what `share_group_files` shared; the files stay the caller's."""
    return SharedGroup(
        control=os.dup(files.control),
        arena=os.dup(files.arena),
        rank=rendezvous.local_rank,
        world=len(rendezvous.here),
        timeout_s=timeout_s,
        roles=rendezvous.here,
    )


def share_group_files(rendezvous: Rendezvous, purpose: str, timeout_s: float) -> SharedGroupFiles:
    """Collective: shared memory for the workers of this host, whose waits any process can end (`abort`)."""
    world = len(rendezvous.here)
    with ExitStack() as made:

        def make() -> list[tuple[int, int]]:
            return [made.enter_context(SharedGroupFiles.create(world)).descriptors] * world

        control, arena = rendezvous.share(purpose, make, timeout_s)
    return SharedGroupFiles(Segment.attach(control), arena, world)


def share_links(
    rendezvous: Rendezvous, timeout_s: float, *, network: bool = False, purpose: str = "link"
) -> Mapping[int, Link]:
    """Collective: a link to every other worker of this host, by rank; over loopback if a `network` is requested."""
    places = range(len(rendezvous.here))
    kind = mesh_kind(network=network)
    with ExitStack() as made:

        def make() -> list[list[int]]:
            mesh = made.enter_context(kind(len(rendezvous.here)))
            return [
                [one for _, link in sorted(mesh.descriptors(place).items()) for one in link]
                for place in places
            ]

        descriptors = rendezvous.share(purpose, make, timeout_s)
    peers = [rank for rank in rendezvous.here if rank != rendezvous.rank]
    width = len(kind.parts)
    ends = [descriptors[begin : begin + width] for begin in range(0, len(descriptors), width)]
    return kind.attach(rendezvous.rank, dict(zip(peers, ends, strict=True)))
