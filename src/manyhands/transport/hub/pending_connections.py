"""Those who connected and have proved nothing yet: how many may stay, and how much is said about them. Pure.

Anybody on the machine can connect to a TCP port, as often and for as long as it likes, so neither the places of a hub
nor the attention of its user may be theirs to take.
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
    """Accepted connections before their proof, in two rooms; where a room is full, the one who has waited longest goes.

    In the first are those who have said nothing that takes the token, each for a moment of grace at least: while the
    room is full of such, nobody is accepted, and who comes waits in the kernel's queue, where the first is the next. A
    member leaves the room with its first message, which is there by then. So strangers push out each other, however
    many hold connections or keep coming, and a member waits a little longer. In the second room are those who have
    knocked with a good seal, which a stranger cannot make.
    """

    def __init__(self, silent: int = _SILENT_PLACES, knocked: int = _KNOCKED_PLACES) -> None:
        self._rooms: tuple[tuple[dict[K, float], int], ...] = (({}, silent), ({}, knocked))

    def has_room(self, now_s: float) -> bool:
        """Whether somebody can be accepted now."""
        inside, places = self._rooms[0]
        return len(inside) < places or now_s - next(iter(inside.values())) >= _GRACE_S

    def arrived(self, one: K, now_s: float) -> K | None:
        """Somebody was accepted; who must go for it."""
        return self._enter(one, 0, now_s)

    def knocked(self, one: K, now_s: float) -> K | None:
        """Its seal was good; who must go for it."""
        self.left(one)
        return self._enter(one, 1, now_s)

    def left(self, one: K) -> None:
        """It is gone, or a member now."""
        for inside, _ in self._rooms:
            inside.pop(one, None)

    def oldest(self) -> K | None:
        """Whoever has said nothing for longest; None where everybody has knocked."""
        inside, _ = self._rooms[0]
        return next(iter(inside), None)

    def _enter(self, one: K, room: int, now_s: float) -> K | None:
        inside, places = self._rooms[room]
        inside[one] = now_s
        return next(iter(inside)) if len(inside) > places else None


class Tally:
    """How many were turned away, told at ever longer intervals: a second, two, four, at most an hour.

    So a day of strangers is a few dozen sentences, and the first one is told at once.
    """

    def __init__(self) -> None:
        self.total = 0
        self._told = 0
        self._reason = ""
        self._claimed: int | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._not_before_s = float("-inf")

    def add(self, reason: str, claimed: int | None) -> None:
        """Somebody was turned away."""
        self.total += 1
        self._reason, self._claimed = reason, claimed

    def due(self, now_s: float) -> Rejected | None:
        """What to tell now."""
        if self.total == self._told or now_s < self._not_before_s:
            return None
        count, self._told = self.total - self._told, self.total
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return Rejected(printable(self._reason), self._claimed, count)
