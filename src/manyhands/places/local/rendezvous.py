"""Rendezvous of processes that share only a store: which ranks exist, on which hosts, and shared memory per host.

Each rank writes its entry into the store (its host's identity and process), and reads the entries of all. On each host
the lowest rank listens on a Unix socket with a random abstract name, and the others of that host connect to it:

    store    rank/0 … rank/3            host identity, process, world        every rank
             address/0, address/2       socket name and secret               the lowest rank of each host
    socket   rank ◄── handshake ──► lowest rank                              both have the secret and one user id
             ◄── descriptors (SCM_RIGHTS) ──                                 `Rendezvous.share`
             ── farewell, or the kernel's end of file ──                     `Rendezvous.watch`

Only descriptors and fixed short messages are sent; nothing received is ever executed or unpickled. Once all ranks
have read them, the keys are deleted, so that the name may be used again.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from manyhands.errors import ManyhandsError, PeerTimeout, UserError
from manyhands.native.closeable import Closeable
from manyhands.native.version import __version__
from manyhands.native.wait_sign import LongWait
from manyhands.places.local.host import host_identity
from manyhands.transport.hub.admission import same_user
from manyhands.transport.hub.handshake import Credentials, HandshakeRefused, authenticate
from manyhands.transport.liveness import RendezvousStore, forget_in_children
from manyhands.transport.messages import ProtocolError

_FRAME: Final = struct.Struct("!?I")  # whether the sharing succeeded, how many descriptors there are in all
_FAREWELL: Final = b"farewell"
_STOP_S: Final = 30.0  # for a callback that is under way when the rendezvous is closed
_DESCRIPTORS_PER_FRAME: Final = 200  # the kernel takes 253
_TEXT_BYTES: Final = 4096
_FIRST_PAUSE_S: Final = 0.001  # between two looks into the store, doubled up to the longest
_LONGEST_PAUSE_S: Final = 0.05
_CLEARING_S: Final = 2.0
_PENDING_S: Final = 2.0  # how long a pending connection may take to identify itself


class RankEntry(NamedTuple):
    """What a rank writes into the store for all others."""

    host: str
    pid: int
    world: int
    version: str

    def to_text(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> Self:
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, list) or [type(value) for value in values] != [str, int, int, str]:
            raise ManyhandsError(
                f"the store has {text[:80]!r} in place of a rank of manyhands; give each job its own store"
            )
        return cls(*values)


def ranks_named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def hosts_of(identities: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, given each rank's host; hosts in the order of their lowest ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        ranks.setdefault(identity, []).append(rank)
    return tuple(tuple(members) for members in ranks.values())


class Rendezvous(Closeable):
    """The ranks that met, and the sockets between those of this host; a context manager, `close` is idempotent.

    `hosts` are the ranks of each host, `here` those of this one, `local_rank` this rank's index among them. The
    lowest rank of a host holds a socket to each other rank of it; the others hold one, to the lowest.
    """

    def __init__(
        self, *, name: str, rank: int, hosts: tuple[tuple[int, ...], ...], sockets: dict[int, socket.socket]
    ) -> None:
        """Made by `meet`; owns the sockets."""
        self.name = name
        self.rank = rank
        self.world = sum(map(len, hosts))
        self.hosts = hosts
        self.here = next(ranks for ranks in hosts if rank in ranks)
        self.local_rank = self.here.index(rank)
        self._sockets = sockets
        self._watcher: threading.Thread | None = None
        self._stop_watcher, self._stopped = -1, False
        forget_in_children(self)

    def share(
        self, purpose: str, make: Callable[[], Sequence[Sequence[int]]], timeout_s: float
    ) -> tuple[int, ...]:
        """Collective among the ranks of this host: the lowest makes descriptors, and each rank gets its own.

        Comes before `watch`. `make` is called by the lowest rank and returns descriptors for each rank of the host, in
        order, which stay its own. The caller owns what is returned. If `make` raises, so does the lowest rank, and
        the others raise ManyhandsError.
        """
        deadline = time.monotonic() + timeout_s
        if self.local_rank != 0:
            return self._receive(purpose, deadline)
        try:
            made = make()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".encode()[: _TEXT_BYTES // 2]
            for end in self._sockets.values():
                _send(end, _FRAME.pack(False, 0) + text, (), deadline)
            raise
        for rank, descriptors in zip(self.here[1:], made[1:], strict=True):
            frame = _FRAME.pack(True, len(descriptors)) + purpose.encode()
            for begin in range(0, len(descriptors) or 1, _DESCRIPTORS_PER_FRAME):
                piece = descriptors[begin : begin + _DESCRIPTORS_PER_FRAME]
                _send(self._sockets[rank], frame, piece, deadline)
        return tuple(os.dup(descriptor) for descriptor in made[0])

    def _receive(self, purpose: str, deadline: float) -> tuple[int, ...]:
        leader = self.here[0]
        end, who = self._sockets[leader], f"group {self.name!r}: rank {leader}"
        descriptors: list[int] = []
        try:
            while True:
                end.settimeout(max(deadline - time.monotonic(), 0.001))
                frame, received, _, _ = socket.recv_fds(end, _TEXT_BYTES, _DESCRIPTORS_PER_FRAME)
                descriptors += received
                for descriptor in received:
                    os.set_inheritable(descriptor, False)  # Python forgets to ask the kernel for it
                if len(frame) < _FRAME.size:
                    raise ManyhandsError(f"{who} left before it shared {purpose}")
                good, total = _FRAME.unpack_from(frame)
                said = frame[_FRAME.size :].decode(errors="replace")
                if not good:
                    raise ManyhandsError(f"{who} could not share {purpose}: {said}")
                if said != purpose:
                    raise ManyhandsError(
                        f"{who} shares {said}, but rank {self.rank} expects {purpose}; all ranks must open the group "
                        "in the same way"
                    )
                if len(descriptors) >= total:
                    return tuple(descriptors)
        except BaseException as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, TimeoutError):
                raise PeerTimeout(f"{who} did not share {purpose} in time", leader) from None
            raise

    def watch(self, on_end: Callable[[int, bool], None]) -> None:
        """Call `on_end(rank, in_peace)`, in another thread, when a rank at the other end of a socket is gone.

        One that leaves in good order says farewell first; for one that is killed the kernel closes its end. The lowest
        rank of a host learns of every other rank, the others of the lowest: it must tell the rest.
        """
        if self._sockets:
            self._stop_watcher = os.eventfd(0, os.EFD_CLOEXEC)
            self._watcher = threading.Thread(
                target=self._watch, args=(on_end,), name="manyhands rendezvous", daemon=True
            )
            self._watcher.start()

    def _watch(self, on_end: Callable[[int, bool], None]) -> None:
        poll = select.poll()
        ranks = {end.fileno(): rank for rank, end in self._sockets.items()}
        for descriptor in (self._stop_watcher, *ranks):
            poll.register(descriptor, select.POLLIN)
        while ranks:
            for descriptor, _ in poll.poll():
                if self._stopped or descriptor == self._stop_watcher:
                    return
                rank = ranks[descriptor]
                try:
                    said = self._sockets[rank].recv(64, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                except OSError:
                    said = b""
                poll.unregister(descriptor)
                del ranks[descriptor]
                on_end(rank, said == _FAREWELL)

    def close(self) -> None:
        self._stopped = True
        if self._watcher is not None:
            os.eventfd_write(self._stop_watcher, 1)
            if self._watcher is not threading.current_thread():
                # Before the sockets go: the watcher must not miss one, nor read from another of its number.
                self._watcher.join(_STOP_S)
                if self._watcher.is_alive():
                    raise PeerTimeout(
                        f"group {self.name!r}: its watcher thread did not end within {_STOP_S:g} s",
                        self.rank,
                    )
            os.close(self._stop_watcher)
            self._watcher = None
        sockets, self._sockets = self._sockets, {}
        for end in sockets.values():
            with suppress(OSError):  # the other one left first
                end.send(_FAREWELL, socket.MSG_DONTWAIT)
            end.close()

    def let_go_in_child(self) -> None:
        """In a forked child, which has no such thread: the sockets it holds would hide its parent's death."""
        for end in self._sockets.values():
            end.close()
        if self._watcher is not None:
            os.close(self._stop_watcher)
        self._sockets, self._watcher = {}, None


def meet(store: RendezvousStore, *, rank: int, world: int, name: str, timeout_s: float) -> Rendezvous:
    """Collective over `world` ranks that have the same `store`: learn each rank's host, and connect those of one host.

    `name` is the group's, for errors; two simultaneous rendezvous need separate stores (prefixes). PeerTimeout
    names a rank that did not come, UserError if another process has taken this rank.
    """
    if not 0 <= rank < world:
        raise UserError(f"group {name!r}: rank={rank} must be at least 0 and less than world={world}")
    table = _Table(store, rank, world, name, time.monotonic() + timeout_s)
    table.enter()
    sockets: dict[int, socket.socket] = {}
    try:
        keys = [f"rank/{other}" for other in range(world)]
        table.wait(keys, range(world), "join the rendezvous")
        entries = [RankEntry.from_text(text.decode().partition(" ")[2]) for text in store.multi_get(keys)]
        for other, entry in enumerate(entries):
            if (entry.world, entry.version) != (world, __version__):
                raise UserError(
                    f"group {name!r}: rank {other} runs manyhands {entry.version} in a group of {entry.world}, but "
                    f"rank {rank} runs manyhands {__version__} in a group of {world}"
                )
        hosts = hosts_of([entry.host for entry in entries])
        here = next(ranks for ranks in hosts if rank in ranks)
        if rank == here[0]:
            _accept(table, here[1:], sockets)
        else:
            sockets[here[0]] = _connect(table, here[0])
        table.clear([ranks[0] for ranks in hosts])
    except BaseException as error:
        for end in sockets.values():
            end.close()
        if not isinstance(error, UserError):  # an entry that does not fit stays, for the others to see
            with suppress(RuntimeError, ManyhandsError):  # the store is gone, and the entry with it
                store.delete_key(f"rank/{rank}")
        raise
    return Rendezvous(name=name, rank=rank, hosts=hosts, sockets=sockets)


@dataclass(slots=True)
class _Table:
    """The keys of one rendezvous in the store; each wait ends at `deadline`."""

    store: RendezvousStore
    rank: int
    world: int
    name: str
    deadline: float
    began: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def enter(self) -> None:
        mine = RankEntry(host=host_identity(), pid=os.getpid(), world=self.world, version=__version__)
        text = f"{secrets.token_hex(8)} {mine.to_text()}"  # no two are equal, so the answer says whose it is
        patience = time.monotonic() + min(self.left_s(), _CLEARING_S)
        while (there := self.store.compare_set(f"rank/{self.rank}", "", text).decode()) != text:
            if time.monotonic() < patience:  # the last rendezvous of this name may still be deleting its keys
                time.sleep(_LONGEST_PAUSE_S)
                continue
            other = RankEntry.from_text(there.partition(" ")[2])
            raise UserError(
                f"two groups are named {self.name!r}: process {other.pid} of a group of {other.world} already has "
                f"rank {self.rank}, which process {mine.pid} claims in a group of {mine.world}; give each group "
                "its own name, or each job its own store"
            )

    def clear(self, leaders: Iterable[int]) -> None:
        """The last to have read everything deletes it; entries last, so that who enters anew finds no address."""
        if self.store.add("read", 1) == self.world:
            addresses = (f"address/{leader}" for leader in leaders)
            entries = (f"rank/{rank}" for rank in range(self.world))
            for key in (*addresses, "read", *entries):
                self.store.delete_key(key)

    def wait(self, keys: Sequence[str], ranks: Sequence[int], deed: str) -> None:
        """Poll for keys that the `ranks` write when they `deed`: a wait in the store would lock out other threads."""
        pause_s = _FIRST_PAUSE_S
        with LongWait() as wait:
            while not self.store.check(list(keys)):
                is_over = time.monotonic() >= self.deadline
                if is_over or wait.is_long:
                    both = zip(ranks, keys, strict=True)
                    late = [rank for rank, key in both if not self.store.check([key])] or ranks
                    if is_over:
                        raise self.timeout(late, deed)
                    wait.goes_on(late[0])
                time.sleep(min(pause_s, self.left_s()))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def timeout(self, late: Sequence[int], deed: str) -> PeerTimeout:
        return PeerTimeout(
            f"group {self.name!r}: {ranks_named(late)} of {self.world} did not {deed} within "
            f"{time.monotonic() - self.began:.1f} s; check that it was started with the same store and world size",
            late[0],
        )


def _accept(table: _Table, ranks: Sequence[int], sockets: dict[int, socket.socket]) -> None:
    """Listen until all `ranks` are connected; a peer that cannot prove to be one is rejected."""
    if not ranks:
        return
    secret = secrets.token_bytes(32)
    address = f"manyhands-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen(len(ranks))
        table.store.set(f"address/{table.rank}", f"{address} {secret.hex()}")
        while len(sockets) < len(ranks):
            listener.settimeout(table.left_s())
            try:
                end, _ = listener.accept()
            except TimeoutError:
                raise table.timeout([rank for rank in ranks if rank not in sockets], "connect") from None
            try:
                deadline = min(table.deadline, time.monotonic() + _PENDING_S)
                rank = _authenticated(end, table, secret, None, deadline)
            except (OSError, ProtocolError, HandshakeRefused):  # an unknown peer
                rank = -1
            if rank in ranks and rank not in sockets:
                sockets[rank] = end
            else:
                end.close()


def _connect(table: _Table, leader: int) -> socket.socket:
    """Connect to the lowest rank of this host."""
    table.wait([f"address/{leader}"], [leader], "publish its address")
    address, _, secret = table.store.get(f"address/{leader}").decode().partition(" ")
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.settimeout(table.left_s())
        while True:
            try:
                end.connect(f"\0{address}")
                break
            except BlockingIOError:  # its queue is full, and a Unix socket does not wait for a place in it
                if time.monotonic() >= table.deadline:
                    raise TimeoutError from None
                time.sleep(_FIRST_PAUSE_S)
        _authenticated(end, table, bytes.fromhex(secret), leader, table.deadline)
    except BaseException as error:
        end.close()
        if isinstance(error, TimeoutError):
            raise table.timeout([leader], "answer at its address") from None
        if isinstance(error, OSError):
            raise ManyhandsError(
                f"group {table.name!r}: rank {table.rank} cannot reach rank {leader} on this host: {error}"
            ) from error
        if isinstance(error, ProtocolError | HandshakeRefused):
            raise ManyhandsError(
                f"group {table.name!r}: the process at rank {leader}'s address is not rank {leader}: {error}"
            ) from error
        raise
    return end


def _authenticated(
    end: socket.socket, table: _Table, secret: bytes, expected: int | None, deadline: float
) -> int:
    """The rank at the other end, once both have proved that they know the secret and are of one user."""
    if not same_user(end):
        raise ProtocolError("user", "it belongs to another user")
    role, protocol = f"rank {table.rank}", "manyhands rendezvous"
    mine = Credentials(member=table.rank, role=role, token=secret, fingerprint=protocol)
    return authenticate(end, mine, expected, deadline).member


def _send(end: socket.socket, frame: bytes, descriptors: Sequence[int], deadline: float) -> None:
    end.settimeout(max(deadline - time.monotonic(), 0.001))
    with suppress(OSError):  # it is gone, or does not read, which its own deadline shows
        socket.send_fds(end, [frame], list(descriptors))
    end.settimeout(None)
