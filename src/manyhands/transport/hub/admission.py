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

__all__ = ["Calls", "Entrance"]

_SILENT_PLACES: Final = 256
_KNOCKED_PLACES: Final = 256
_GRACE_S: Final = (
    0.5  # for a first message: a member's is on its way, but its process may have to wait for a core
)
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 3600.0

K = TypeVar("K", bound=Hashable)


class Newcomers(Generic[K]):
    """Accepted connections before their proof, in two pools; when a pool is full, the longest waiting one is closed.

    The first pool holds connections that have not shown the token, each for at least a short grace period. While it
    is full of those, nothing is accepted, and new connections wait in the kernel's backlog, first come first
    served. A member leaves the pool with its first message, which usually arrives with the connection. So unknown
    peers only displace each other, however many there are, and a member waits slightly longer. The second pool
    holds connections whose knock has a valid seal, which an unknown peer cannot make.
    """

    def __init__(self, silent: int = _SILENT_PLACES, knocked: int = _KNOCKED_PLACES) -> None:
        self._rooms: tuple[tuple[dict[K, float], int], ...] = (({}, silent), ({}, knocked))

    def has_room(self, now_s: float) -> bool:
        inside, places = self._rooms[0]
        return len(inside) < places or now_s - next(iter(inside.values())) >= _GRACE_S

    def arrived(self, one: K, now_s: float) -> K | None:
        """Add an accepted connection; return the one to close for it, if any."""
        return self._enter(one, 0, now_s)

    def knocked(self, one: K, now_s: float) -> K | None:
        """Move a connection with a valid seal to the second pool; return the one to close for it, if any."""
        self.left(one)
        return self._enter(one, 1, now_s)

    def left(self, one: K) -> None:
        for inside, _ in self._rooms:
            inside.pop(one, None)

    def oldest(self) -> K | None:
        """The connection that has been silent longest; None if all have knocked."""
        inside, _ = self._rooms[0]
        return next(iter(inside), None)

    def _enter(self, one: K, room: int, now_s: float) -> K | None:
        inside, places = self._rooms[room]
        inside[one] = now_s
        return next(iter(inside)) if len(inside) > places else None


class Tally:
    """Counts rejected connections and reports them at growing intervals: a second, two, four, at most an hour.

    So a day of unknown peers makes a few dozen sentences, and the first is reported at once.
    """

    def __init__(self) -> None:
        self.total = 0
        self._reported = 0
        self._reason = ""
        self._claimed: int | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._not_before_s = float("-inf")

    def add(self, reason: str, claimed: int | None) -> None:
        self.total += 1
        self._reason, self._claimed = reason, claimed

    def due(self, now_s: float) -> Rejected | None:
        if self.total == self._reported or now_s < self._not_before_s:
            return None
        count, self._reported = self.total - self._reported, self.total
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return Rejected(printable(self._reason), self._claimed, count)


_ACCEPTED_PER_POLL: Final = 32  # then the existing connections are served
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Entrance(Generic[K]):
    """The listening sockets in an epoll object; `newcomers` are the pending connections, `away` counts the rejected
    ones.
    """

    def __init__(self, epoll: select.epoll, security: Security) -> None:
        self._epoll = epoll
        self._security = security
        self._listening: dict[int, socket.socket] = {}
        self._rests = self._lacks_descriptors = False
        self.newcomers: Newcomers[K] = Newcomers()
        self.rejections = Tally()

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
            if not self.newcomers.has_room(now_s):
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
        """Listen again if that was suspended; return the connection to close, so that the next one gets a
        descriptor.
        """
        if not self._rests:
            return None
        self._watch(select.EPOLLIN)
        lacked, self._lacks_descriptors = self._lacks_descriptors, False
        return self.newcomers.oldest() if lacked else None

    def close(self) -> None:
        for listening in self._listening.values():
            listening.close()
        self._listening.clear()

    def _watch(self, mask: int) -> None:
        self._rests = mask == 0
        for listening in self._listening.values():
            self._epoll.modify(listening, mask)


_FIRST_DIAL_PAUSE_S: Final = 0.05
_LONGEST_DIAL_PAUSE_S: Final = 1.0
_SETTLED_S: Final = 5.0
_NEVER_S: Final = float("inf")


@dataclass(slots=True)
class _Call:
    address: str
    since_s: float
    due_s: float
    pause_s: float
    tries: int = 0


class Calls:
    """The calls of one hub, by member; each is either due or in progress."""

    def __init__(self, patience_s: float, chance: random.Random) -> None:
        self._patience_s = patience_s
        self._chance = chance
        self._calls: dict[int, _Call] = {}
        self._answered: dict[int, tuple[float, float]] = {}  # by member: when it answered, and the next pause
        self.next_s = _NEVER_S
        """When the first of them is due."""

    def __contains__(self, member: object) -> bool:
        return member in self._calls

    def begin(self, member: int, address: str, now_s: float) -> None:
        """Call a member; at once, unless it answered a moment ago and was lost since."""
        answered_s, pause_s = self._answered.pop(member, (-_NEVER_S, _FIRST_DIAL_PAUSE_S))
        if now_s - answered_s >= _SETTLED_S:
            self._calls[member] = _Call(address, now_s, now_s, _FIRST_DIAL_PAUSE_S)
        else:
            self._calls[member] = _Call(address, now_s, now_s + self._cut(pause_s), _longer(pause_s))
        self._look()

    def due(self, now_s: float) -> list[tuple[int, str]]:
        """The members to dial now, with their addresses; each is in progress until `answered` or `failed`."""
        due = [(member, call) for member, call in self._calls.items() if call.due_s <= now_s]
        for _, call in due:
            call.due_s, call.tries = _NEVER_S, call.tries + 1
        self._look()
        return [(member, call.address) for member, call in due]

    def answered(self, member: int, now_s: float) -> None:
        """The member is connected: its call has ended."""
        call = self._calls.pop(member, None)
        if call is not None:
            self._answered[member] = (now_s, call.pause_s)
        self._look()

    def failed(self, member: int, reason: str, now_s: float) -> str | None:
        """An attempt failed; None if there will be another, else the sentence with which the call ends."""
        call = self._calls.get(member)
        if call is None:
            return reason
        waited_s = now_s - call.since_s
        if waited_s >= self._patience_s:
            self.end(member)
            return f"not reached at {call.address} within {waited_s:.1f} s, in {call.tries} tries; the last: {reason}"
        call.due_s = min(now_s + self._cut(call.pause_s), call.since_s + self._patience_s)
        call.pause_s = _longer(call.pause_s)
        self._look()
        return None

    def end(self, member: int) -> None:
        self._calls.pop(member, None)
        self._answered.pop(member, None)
        self._look()

    def _cut(self, pause_s: float) -> float:
        return pause_s * (0.5 + 0.5 * self._chance.random())

    def _look(self) -> None:
        self.next_s = min((call.due_s for call in self._calls.values()), default=_NEVER_S)


def _longer(pause_s: float) -> float:
    return min(2 * pause_s, _LONGEST_DIAL_PAUSE_S)
