"""Who a hub dials and lets in: listening sockets, pending connections, rejections, and when to dial again.

Anybody on the host can connect to a TCP port, as often and for as long as they like. So unknown peers must not be
able to use up the capacity of a hub, or flood its user with warnings.
"""

from __future__ import annotations

import errno
import random
import select
import socket
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from manyhands.errors import printable
from manyhands.transport.hub import addresses
from manyhands.transport.hub.hub_events import Rejected
from manyhands.transport.security import Security

__all__ = ["Dialer", "HubListener"]

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

K = TypeVar("K", bound=Hashable)


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
    """Counts rejected connections and reports them at growing intervals: a second, two, four, at most an hour.

    So a day of unknown peers makes a few dozen sentences, and the first is reported at once.
    """

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
        listening, reached_at = addresses.listen(address, self._security)
        self._listening[listening.fileno()] = listening
        self._epoll.register(listening, select.EPOLLIN)
        return reached_at

    def accept(self, descriptor: int, now_s: float) -> Iterator[socket.socket]:
        """Accept pending connections from a listening socket, up to a fair share.

        Without capacity, or without a free descriptor, they stay in the kernel's backlog until `wake`.
        """
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
            if addresses.same_user(end):
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
        self.next_s = _NEVER_S
        """When the first of them is due."""

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
            return f"not reached at {attempt.address} {tries}; the last: {reason}"
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
