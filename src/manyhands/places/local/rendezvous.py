"""Rendezvous of processes that share only a store: which ranks exist, on which hosts, and shared memory per host.

Each rank claims its seat in the store (its host's identity and process), and reads the seats of all. On each host
the lowest rank listens on a Unix socket with a random abstract name, and the others of that host connect to it:

    store    seat/0 … seat/3            host identity, process, world        every rank
             address/0, address/2       socket name and secret               the lowest rank of each host
    socket   rank ── join, HMAC ──►  lowest rank ── welcome, HMAC ──►        both have the secret and one user id
             ◄── descriptors (SCM_RIGHTS) ──                                 `Rendezvous.share`
             ── farewell, or the kernel's end of file ──                     `Rendezvous.watch`

Only descriptors and fixed short messages are sent; nothing received is ever executed or unpickled. Once all ranks
have read them, the keys are deleted, so that the name may be used again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self

from manyhands.errors import ManyhandsError, PeerTimeout, UserError
from manyhands.native.closeable import Closeable
from manyhands.native.version import __version__
from manyhands.native.wait_sign import LongWait
from manyhands.places.local import lifelines
from manyhands.places.local.host import host_identity

__all__ = ["Rendezvous", "RendezvousStore", "hosts_of", "meet"]

_HELLO: Final = struct.Struct("!I32s")  # rank, proof
_FRAME: Final = struct.Struct("!?I")  # whether the sharing succeeded, how many descriptors there are in all
_DESCRIPTORS_PER_FRAME: Final = 200  # the kernel takes 253
_TEXT_BYTES: Final = 4096
_FIRST_PAUSE_S: Final = 0.001  # between two looks into the store, doubled up to the longest
_LONGEST_PAUSE_S: Final = 0.05
_CLEARING_S: Final = 2.0
_PENDING_S: Final = 2.0  # how long a pending connection may take to identify itself

_ShareMaker = Callable[[], Sequence[Sequence[int]]]
"""Called by the lowest rank of a host: descriptors for each rank of the host, in order; they stay the maker's."""


class RendezvousStore(Protocol):
    """What a rendezvous needs of a store: torch's stores have it, and so does the leader's."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if its value is as expected, or if it is absent and nothing is expected; return the result."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist."""

    def get(self, key: str, /) -> bytes:
        """The value of an existing key."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter; return its new value."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What a rank writes into the store for all others."""

    host: str
    pid: int
    world: int
    version: str

    def to_text(self) -> str:
        return json.dumps([self.host, self.pid, self.world, self.version])

    @classmethod
    def from_text(cls, text: str) -> Self:
        try:
            host, pid, world, version = json.loads(text)
        except ValueError:
            host = None
        if host is None or [type(value) for value in (host, pid, world, version)] != [str, int, int, str]:
            raise ManyhandsError(
                f"the store holds {text[:80]!r} where manyhands keeps who has a rank; give each job a store of its own"
            )
        return cls(host=host, pid=pid, world=world, version=version)


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

    def share(self, purpose: str, make: _ShareMaker, timeout_s: float) -> tuple[int, ...]:
        """Collective among the ranks of this host: the lowest makes descriptors, and each rank gets its own.

        Comes before `watch`. The caller owns what is returned. If `make` raises, so does the lowest rank, and the
        others raise ManyhandsError.
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
            pieces = [*_pieces(descriptors, _DESCRIPTORS_PER_FRAME)] or [()]
            for piece in pieces:
                frame = _FRAME.pack(True, len(descriptors)) + purpose.encode()
                _send(self._sockets[rank], frame, piece, deadline)
        return tuple(os.dup(descriptor) for descriptor in made[0])

    def watch(self, on_end: Callable[[int, bool], None]) -> None:
        """Call `on_end(rank, in_peace)`, in another thread, when a rank at the other end of a socket is gone.

        The lowest rank of a host learns of every other rank, the others of the lowest: it must tell the rest.
        """
        for rank, end in self._sockets.items():
            lifelines.watch(end, lambda in_peace, rank=rank: on_end(rank, in_peace))  # type: ignore[misc]

    def close(self) -> None:
        sockets, self._sockets = self._sockets, {}
        for end in sockets.values():
            lifelines.forget(end)
            try:
                end.send(lifelines.FAREWELL, socket.MSG_DONTWAIT)
            except OSError:  # the other one left first
                pass
            end.close()

    def _receive(self, purpose: str, deadline: float) -> tuple[int, ...]:
        leader = self.here[0]
        end = self._sockets[leader]
        descriptors: list[int] = []
        try:
            while True:
                end.settimeout(max(deadline - time.monotonic(), 0.001))
                frame, received, _, _ = socket.recv_fds(end, _TEXT_BYTES, _DESCRIPTORS_PER_FRAME)
                descriptors += received
                for descriptor in received:
                    os.set_inheritable(descriptor, False)  # Python forgets to ask the kernel for it
                if len(frame) < _FRAME.size:
                    raise ManyhandsError(
                        f"group {self.name!r}: rank {leader} left before it shared {purpose}"
                    )
                good, total = _FRAME.unpack_from(frame)
                said = frame[_FRAME.size :].decode(errors="replace")
                if not good:
                    raise ManyhandsError(
                        f"group {self.name!r}: rank {leader} could not share {purpose}: {said}"
                    )
                if said != purpose:
                    raise ManyhandsError(
                        f"group {self.name!r}: rank {leader} shares {said} where rank {self.rank} expects {purpose}; "
                        "all ranks must open the group alike"
                    )
                if len(descriptors) >= total:
                    return tuple(descriptors)
        except BaseException as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, TimeoutError):
                raise PeerTimeout(
                    f"group {self.name!r}: rank {leader} did not share {purpose} in time", leader
                ) from None
            raise


def meet(store: RendezvousStore, *, rank: int, world: int, name: str, timeout_s: float) -> Rendezvous:
    """Collective over `world` ranks that have the same `store`: learn each rank's host, and connect those of one
    host.

    `name` is the group's, for errors; two simultaneous rendezvous need separate stores (prefixes). PeerTimeout
    names a rank that did not come, UserError if another process has taken this rank's seat.
    """
    if not 0 <= rank < world:
        raise UserError(f"group {name!r}: rank={rank} must be at least 0 and less than world={world}")
    table = _Table(store, rank, world, name, time.monotonic() + timeout_s)
    table.sit_down()
    sockets: dict[int, socket.socket] = {}
    try:
        hosts = hosts_of([seat.host for seat in table.read_seats()])
        here = next(ranks for ranks in hosts if rank in ranks)
        if rank == here[0]:
            _accept_guests(table, here[1:], sockets)
        else:
            sockets[here[0]] = _knock(table, here[0])
        table.clear([ranks[0] for ranks in hosts])
    except BaseException as error:
        for end in sockets.values():
            end.close()
        if not isinstance(error, UserError):  # a seat that does not fit stays, for the others to see
            table.stand_up()
        raise
    return Rendezvous(name=name, rank=rank, hosts=hosts, sockets=sockets)


class _Table:
    """The keys of one rendezvous in the store; each wait ends at `deadline`."""

    def __init__(self, store: RendezvousStore, rank: int, world: int, name: str, deadline: float) -> None:
        self.rank = rank
        self.name = name
        self.deadline = deadline
        self._store = store
        self._world = world
        self._began = time.monotonic()

    def left_s(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def sit_down(self) -> None:
        mine = Seat(host=host_identity(), pid=os.getpid(), world=self._world, version=__version__)
        text = f"{secrets.token_hex(8)} {mine.to_text()}"  # no two are equal, so the answer says whose it is
        patience = time.monotonic() + min(self.left_s(), _CLEARING_S)
        while (there := self._store.compare_set(f"seat/{self.rank}", "", text).decode()) != text:
            if time.monotonic() < patience:  # the last rendezvous of this name may still be deleting its keys
                time.sleep(_LONGEST_PAUSE_S)
                continue
            other = Seat.from_text(there.partition(" ")[2])
            raise UserError(
                f"two groups are named {self.name!r}: process {other.pid} of a group of {other.world} already is "
                f"rank {self.rank}, as process {mine.pid} wants to be in a group of {mine.world}; give each group "
                "a name, or each job a store, of its own"
            )

    def stand_up(self) -> None:
        """Leave the seat to others, after a failure."""
        try:
            self._store.delete_key(f"seat/{self.rank}")
        except (RuntimeError, ManyhandsError):  # the store is gone, and the seat with it
            pass

    def read_seats(self) -> list[Seat]:
        """Wait for everyone, and see that all expect the same."""
        keys = [f"seat/{rank}" for rank in range(self._world)]
        self.wait(keys, range(self._world), "come to the meeting")
        seats = [Seat.from_text(self._store.get(key).decode().partition(" ")[2]) for key in keys]
        for rank, seat in enumerate(seats):
            if (seat.world, seat.version) != (self._world, __version__):
                raise UserError(
                    f"group {self.name!r}: rank {rank} is manyhands {seat.version} in a group of {seat.world}, rank "
                    f"{self.rank} is manyhands {__version__} in a group of {self._world}"
                )
        return seats

    def publish_address(self, address: str, secret: bytes) -> None:
        self._store.set(f"address/{self.rank}", f"{address} {secret.hex()}")

    def read_address(self, leader: int) -> tuple[str, bytes]:
        self.wait([f"address/{leader}"], [leader], "publish its address")
        address, _, secret = self._store.get(f"address/{leader}").decode().partition(" ")
        return address, bytes.fromhex(secret)

    def clear(self, leaders: Iterable[int]) -> None:
        """The last to have read everything deletes it; the seats last, so that who sits down anew finds no address."""
        if self._store.add("read", 1) == self._world:
            addresses = (f"address/{leader}" for leader in leaders)
            seats = (f"seat/{rank}" for rank in range(self._world))
            for key in (*addresses, "read", *seats):
                self._store.delete_key(key)

    def wait(self, keys: Sequence[str], ranks: Sequence[int], deed: str) -> None:
        """Wait for keys, which the `ranks` write when they `deed`.

        Asks again and again: a store's own wait keeps all other threads of this process from the store meanwhile.
        """
        pause_s = _FIRST_PAUSE_S
        with LongWait() as wait:
            while not self._store.check(list(keys)):
                is_over = time.monotonic() >= self.deadline
                if is_over or wait.is_long:
                    late = [
                        rank for rank, key in zip(ranks, keys, strict=True) if not self._store.check([key])
                    ]
                    if is_over:
                        raise self.timeout(late or ranks, deed)
                    wait.goes_on((late or ranks)[0])
                time.sleep(min(pause_s, self.left_s()))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def timeout(self, late: Sequence[int], deed: str) -> PeerTimeout:
        who = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        return PeerTimeout(
            f"group {self.name!r}: {who} of {self._world} did not {deed} within "
            f"{time.monotonic() - self._began:.1f} s; see whether it was started, with the same store and world size",
            late[0],
        )


def _accept_guests(table: _Table, guests: Sequence[int], sockets: dict[int, socket.socket]) -> None:
    """Listen until all `guests` are connected; a peer that cannot prove to be one is rejected."""
    if not guests:
        return
    secret = secrets.token_bytes(32)
    address = f"manyhands-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen(len(guests))
        table.publish_address(address, secret)
        while len(sockets) < len(guests):
            listener.settimeout(table.left_s())
            try:
                end, _ = listener.accept()
            except TimeoutError:
                raise table.timeout([rank for rank in guests if rank not in sockets], "knock") from None
            rank = _admit(end, secret, table)
            if rank is not None and rank in guests and rank not in sockets:
                sockets[rank] = end
            else:
                end.close()


def _admit(end: socket.socket, secret: bytes, table: _Table) -> int | None:
    """The rank at the other end, once both have proved that they know the secret; None for an unknown peer."""
    if _user_of(end) != os.geteuid():
        return None
    end.settimeout(min(table.left_s(), _PENDING_S))
    try:
        hello = end.recv(_HELLO.size)
        if len(hello) != _HELLO.size:
            return None
        rank, proof = _HELLO.unpack(hello)
        if not hmac.compare_digest(proof, _proof(secret, b"join", rank)):
            return None
        end.send(_proof(secret, b"welcome", rank))
    except OSError:
        return None
    end.settimeout(None)
    return int(rank)


def _knock(table: _Table, leader: int) -> socket.socket:
    """Connect to the lowest rank of this host."""
    address, secret = table.read_address(leader)
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.settimeout(table.left_s())
        _connect(end, f"\0{address}", table)
        end.send(_HELLO.pack(table.rank, _proof(secret, b"join", table.rank)))
        answer = end.recv(hashlib.sha256().digest_size)
    except TimeoutError:
        end.close()
        raise table.timeout([leader], "answer at its address") from None
    except OSError as error:
        end.close()
        raise ManyhandsError(
            f"group {table.name!r}: rank {table.rank} cannot reach rank {leader} on this host: {error}"
        ) from error
    expected = _proof(secret, b"welcome", table.rank)
    if _user_of(end) != os.geteuid() or not hmac.compare_digest(answer, expected):
        end.close()
        raise ManyhandsError(
            f"group {table.name!r}: who answers at rank {leader}'s address is not rank {leader}, or is another user's"
        )
    end.settimeout(None)
    return end


def _connect(end: socket.socket, address: str, table: _Table) -> None:
    """A Unix socket whose queue is full does not let one wait for a place in it: try again."""
    while True:
        try:
            end.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() >= table.deadline:
                raise TimeoutError from None
            time.sleep(_FIRST_PAUSE_S)


def _proof(secret: bytes, word: bytes, rank: int) -> bytes:
    return hmac.digest(secret, word + rank.to_bytes(4, "big"), "sha256")


def _user_of(end: socket.socket) -> int:
    """The user id of the process at the other end, from the kernel."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


def _send(end: socket.socket, frame: bytes, descriptors: Sequence[int], deadline: float) -> None:
    end.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        socket.send_fds(end, [frame], list(descriptors))
    except OSError:  # it is gone, which the lifeline tells, or does not read, which its own deadline tells
        pass
    finally:
        end.settimeout(None)


def _pieces(items: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    return (items[start : start + size] for start in range(0, len(items), size))
