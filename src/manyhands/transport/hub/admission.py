"""Who a hub dials and lets in: addresses, listening sockets, pending connections, rejections, and when to dial again.

Addresses are text: `unix:NAME`, an abstract Unix socket, and `tcp:HOST:PORT`, with an IPv4 address or a host name. TCP
off loopback would send weights and gradients in the clear. It is refused unless it is encrypted or the user allowed it
(`transport.security.Security`).

Anybody on the host can connect to a TCP port, as often and for as long as they like. So unknown peers must not be able
to use up the capacity of a hub, or flood its user with warnings.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import re
import secrets
import select
import socket
import struct
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from manyhands.errors import UserError, printable
from manyhands.transport.hub.hub_events import Rejected
from manyhands.transport.security import Security, is_loopback

_SILENT_PLACES: Final = 256
_SEALED_PLACES: Final = 256
_GRACE_S: Final = 0.5  # for a first message, on its way already: its process may have to wait for a core
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 3600.0
_ACCEPTED_PER_POLL: Final = 32  # then the existing connections are served
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FIRST_DIAL_PAUSE_S: Final = 0.05
_LONGEST_DIAL_PAUSE_S: Final = 1.0
_SETTLED_S: Final = 5.0
_NEVER_S: Final = float("inf")
_LOOPBACK: Final = "127.0.0.1"
_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")
_BACKLOG: Final = 4096  # the kernel may allow less
_TCP_USER_TIMEOUT: Final = getattr(socket, "TCP_USER_TIMEOUT", 18)

K = TypeVar("K", bound=Hashable)


def listen(address: str, security: Security) -> tuple[socket.socket, str]:
    """Open a listening socket; return it and the address at which others reach it.

    `unix` alone chooses a free name, and `tcp` alone or port 0 a free port; `tcp` alone means loopback. If it
    listens on every address of this host (0.0.0.0), the caller must know which of them others use.
    """
    how, _, place = address.partition(":")
    if how == "unix":
        name = place or f"manyhands-{secrets.token_hex(16)}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = f"\0{name}"
    elif how == "tcp":
        host, port = _place(place or f"{_LOOPBACK}:0", address, security)
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # SO_REUSEADDR: the successor of a process that died listens at the same port while the kernel still closes
        # the old connections.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        target = (host, port)
    else:
        raise _no_address(address)
    try:
        listening.setblocking(False)
        listening.bind(target)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise UserError(f"address {address!r}: cannot listen there: {error}") from error
    if how == "unix":
        return listening, f"unix:{name}"
    host, port = listening.getsockname()
    return listening, f"tcp:{host}:{port}"


def dial(address: str, security: Security) -> socket.socket:
    target = check_address(address, security)
    is_unix = isinstance(target, str)
    end = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET, socket.SOCK_STREAM)
    try:
        end.setblocking(False)
        end.connect(target)
    except BlockingIOError as error:
        if is_unix:  # its backlog is full; unlike TCP, a Unix socket does not connect by itself later
            end.close()
            raise ConnectionRefusedError(f"too many connections wait at {address}") from error
    except OSError:
        end.close()
        raise
    if not same_user(end):  # a predictable name may be taken by another user before its owner listens
        end.close()
        raise ConnectionRefusedError(f"another user listens at {address}")
    return end


def check_address(address: str, security: Security) -> str | tuple[str, int]:
    """Where to connect to; UserError if the address is malformed, or not allowed by `security`."""
    how, _, place = address.partition(":")
    if how == "unix" and place:
        return f"\0{place}"
    if how == "tcp" and place:
        return _place(place, address, security)
    raise _no_address(address)


def tune(end: socket.socket, patience_s: float, unsent_bytes: int = 0) -> None:
    """Disable Nagle's delay, and let the kernel drop a TCP peer that accepts nothing for `patience_s`.

    With `unsent_bytes` the kernel takes no more than that of what it cannot send yet.
    """
    if end.family == socket.AF_INET:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, int(patience_s * 1000))
        if unsent_bytes:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes)


def origin(end: socket.socket) -> str:
    """Which peer connected, as the beginning of a sentence; empty for a process of this host."""
    if end.family == socket.AF_UNIX:
        return ""
    try:
        host, _ = end.getpeername()
    except OSError:
        return ""  # it disconnected at once
    return "" if is_loopback(host) else f"{host}: "


def same_user(end: socket.socket) -> bool:
    """Whether the peer of a Unix socket runs as this user; True for TCP, which cannot tell."""
    if end.family != socket.AF_UNIX:
        return True
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def _place(place: str, address: str, security: Security) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    # An IPv4 address or a valid host name (RFC 1123): the last label of a name is not a number.
    is_name = _NAME.fullmatch(host) is not None and not host.rpartition(".")[2].isdigit()
    if not is_name:
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise _no_address(address) from None
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise _no_address(address)
    security.check_address(host)
    return (_LOOPBACK if host == "localhost" else host), int(port)


def _no_address(address: str) -> UserError:
    return UserError(f"address {address!r} must be unix:NAME or tcp:HOST:PORT, such as tcp:127.0.0.1:0")


class PendingConnections(Generic[K]):
    """Accepted connections before their proof, in two pools; when a pool is full, the longest waiting one is closed.

    The first pool holds connections that have not shown the token, each for at least a short grace period. While it is
    full of those, nothing is accepted, and new connections wait in the kernel's backlog, first come first served. A
    member leaves the pool with its first message, which usually arrives with the connection. So unknown peers only
    displace each other, and a member waits slightly longer. The second pool holds connections whose first message has a
    valid seal, which an unknown peer cannot make.
    """

    def __init__(self, silent: int = _SILENT_PLACES, sealed: int = _SEALED_PLACES) -> None:
        self._pools: tuple[tuple[dict[K, float], int], ...] = (({}, silent), ({}, sealed))

    def has_room(self, now_s: float) -> bool:
        inside, places = self._pools[0]
        return len(inside) < places or now_s - next(iter(inside.values())) >= _GRACE_S

    def arrived(self, one: K, now_s: float, *, sealed: bool = False) -> K | None:
        """Add an accepted connection, or move one with a valid seal to the second pool; which to close for it."""
        self.left(one)
        inside, places = self._pools[sealed]
        inside[one] = now_s
        return next(iter(inside)) if len(inside) > places else None

    def left(self, one: K) -> None:
        for inside, _ in self._pools:
            inside.pop(one, None)

    def oldest(self) -> K | None:
        return next(iter(self._pools[0][0]), None)


class Rejections:
    """Counts rejected connections; reports the first at once, others after a second, two, four, at most an hour."""

    def __init__(self) -> None:
        self.total = self.unreported = 0
        self._last: tuple[str, int | None] = "", None
        self._pause_s = _FIRST_PAUSE_S
        self._not_before_s = -_NEVER_S

    def add(self, reason: str, claimed: int | None) -> None:
        self.total += 1
        self.unreported += 1
        self._last = reason, claimed

    def due(self, now_s: float) -> Rejected | None:
        if not self.unreported or now_s < self._not_before_s:
            return None
        count, self.unreported = self.unreported, 0
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        reason, claimed = self._last
        return Rejected(printable(reason), claimed, count)


class HubListener(Generic[K]):
    """The listening sockets in an epoll object, the connections that they accepted, and how many were rejected."""

    def __init__(self, epoll: select.epoll, security: Security) -> None:
        self._epoll = epoll
        self._security = security
        self._listening: dict[int, socket.socket] = {}
        self._rests = self._lacks_descriptors = False
        self.pending: PendingConnections[K] = PendingConnections()
        self.rejections = Rejections()

    def __contains__(self, descriptor: object) -> bool:
        return descriptor in self._listening

    def listen(self, address: str) -> str:
        listening, reached_at = listen(address, self._security)
        self._listening[listening.fileno()] = listening
        self._epoll.register(listening, select.EPOLLIN)
        return reached_at

    def accept(self, descriptor: int, now_s: float) -> Iterator[socket.socket]:
        """Accept pending connections, up to a fair share; without capacity they stay in the backlog until `wake`."""
        for _ in range(_ACCEPTED_PER_POLL):
            if not self.pending.has_room(now_s):
                self._watch(0)
                return
            try:
                end, _ = self._listening[descriptor].accept()
            except OSError as error:  # nobody is waiting any more
                if error.errno in _NO_DESCRIPTORS:
                    self._watch(0)
                    self._lacks_descriptors = True
                return
            if same_user(end):
                end.setblocking(False)
                yield end
            else:
                end.close()
                self.rejections.add("a process of another user", None)

    def wake(self) -> K | None:
        """Listen again if that was suspended; which connection to close, so that the next one gets a descriptor."""
        if not self._rests:
            return None
        self._watch(select.EPOLLIN)
        lacked, self._lacks_descriptors = self._lacks_descriptors, False
        return self.pending.oldest() if lacked else None

    def close(self) -> None:
        for listening in self._listening.values():
            listening.close()
        self._listening.clear()

    def _watch(self, mask: int) -> None:
        self._rests = mask == 0
        for listening in self._listening.values():
            self._epoll.modify(listening, mask)


@dataclass(slots=True)
class _Attempt:
    address: str
    since_s: float
    due_s: float
    pause_s: float
    tries: int = 0


class Dialer:
    """The members that one hub dials; each is either due or being tried."""

    def __init__(self, patience_s: float, chance: random.Random) -> None:
        self._patience_s = patience_s
        self._chance = chance
        self._attempts: dict[int, _Attempt] = {}
        self._answered: dict[int, tuple[float, float]] = {}  # by member: when it answered, and the next pause
        self.next_s = _NEVER_S  # when the first of them is due

    def __contains__(self, member: object) -> bool:
        return member in self._attempts

    def begin(self, member: int, address: str, now_s: float) -> None:
        """Dial a member; at once, unless it answered a moment ago and was lost since."""
        answered_s, pause_s = self._answered.pop(member, (-_NEVER_S, _FIRST_DIAL_PAUSE_S))
        attempt = _Attempt(address, now_s, now_s, _FIRST_DIAL_PAUSE_S)
        if now_s - answered_s < _SETTLED_S:
            attempt.pause_s = pause_s
            self._postpone(attempt, now_s)
        self._attempts[member] = attempt
        self._look()

    def due(self, now_s: float) -> list[tuple[int, str]]:
        """The members to dial now, with their addresses; each is being tried until `answered` or `failed`."""
        due = [(member, attempt) for member, attempt in self._attempts.items() if attempt.due_s <= now_s]
        for _, attempt in due:
            attempt.due_s, attempt.tries = _NEVER_S, attempt.tries + 1
        self._look()
        return [(member, attempt.address) for member, attempt in due]

    def answered(self, member: int, now_s: float) -> None:
        attempt = self._attempts.pop(member, None)
        if attempt is not None:
            self._answered[member] = (now_s, attempt.pause_s)
        self._look()

    def failed(self, member: int, reason: str, now_s: float) -> str | None:
        """An attempt failed; None if there will be another, else the sentence with which dialling ends."""
        attempt = self._attempts.get(member)
        if attempt is None:
            return reason
        waited_s = now_s - attempt.since_s
        if waited_s >= self._patience_s:
            self.end(member)
            tries = f"within {waited_s:.1f} s, in {attempt.tries} tries"
            return f"not reached at {attempt.address} {tries}; last error: {reason}"
        self._postpone(attempt, now_s)
        attempt.due_s = min(attempt.due_s, attempt.since_s + self._patience_s)
        self._look()
        return None

    def end(self, member: int) -> None:
        self._attempts.pop(member, None)
        self._answered.pop(member, None)
        self._look()

    def _postpone(self, attempt: _Attempt, now_s: float) -> None:
        """Try later, by a random part of the pause, so that many do not come at once; the next pause is longer."""
        attempt.due_s = now_s + attempt.pause_s * (0.5 + 0.5 * self._chance.random())
        attempt.pause_s = min(2 * attempt.pause_s, _LONGEST_DIAL_PAUSE_S)

    def _look(self) -> None:
        self.next_s = min((attempt.due_s for attempt in self._attempts.values()), default=_NEVER_S)
