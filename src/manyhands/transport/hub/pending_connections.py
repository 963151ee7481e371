"""Pending connections, which have proved nothing yet: how many may stay, and how they are reported. Does no I/O.

Anybody on the host can connect to a TCP port, as often and for as long as they like. So unknown peers must not be
able to use up the capacity of a hub, or flood its user with warnings.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from manyhands.errors import printable
from manyhands.transport.hub.arrivals import Rejected

__all__ = ["Newcomers", "Tally"]

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
        """Whether a connection can be accepted now."""
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
        """Remove a connection that was closed or admitted."""
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
        self._told = 0
        self._reason = ""
        self._claimed: int | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._not_before_s = float("-inf")

    def add(self, reason: str, claimed: int | None) -> None:
        """Count a rejected connection."""
        self.total += 1
        self._reason, self._claimed = reason, claimed

    def due(self, now_s: float) -> Rejected | None:
        """What to report now, or None."""
        if self.total == self._told or now_s < self._not_before_s:
            return None
        count, self._told = self.total - self._told, self.total
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return Rejected(printable(self._reason), self._claimed, count)
