"""Those who connected and have proved nothing yet: how many may stay, and how much is said about them. Pure.

Anybody on the machine can connect to a TCP port, as often and for as long as it likes, so neither the places of a hub
nor the attention of its user may be theirs to take.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from manyhands.errors import printable
from manyhands.link.arrivals import TurnedAway

__all__ = ["Newcomers", "Tally"]

_SILENT_PLACES: Final = 128
_KNOCKED_PLACES: Final = 256
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 3600.0

K = TypeVar("K", bound=Hashable)


class Newcomers(Generic[K]):
    """Accepted connections before their proof, in two rooms; where a room is full, the one who has waited longest goes.

    In the first are those who have said nothing that takes the token. A member leaves it with its first message, which
    is here as soon as it is accepted, or soon after; so strangers push out each other, however many hold connections or
    keep coming, and a member only if as many come in the moment between. Then it dials again. In the second room are
    those who have knocked with a good seal, which a stranger can not make.
    """

    def __init__(self, silent: int = _SILENT_PLACES, knocked: int = _KNOCKED_PLACES) -> None:
        self._rooms: tuple[tuple[dict[K, None], int], ...] = (({}, silent), ({}, knocked))

    def arrived(self, one: K) -> K | None:
        """Somebody connected; who must go for it."""
        return self._enter(one, 0)

    def knocked(self, one: K) -> K | None:
        """Its seal was good; who must go for it."""
        self.left(one)
        return self._enter(one, 1)

    def left(self, one: K) -> None:
        """It is gone, or a member now."""
        for inside, _ in self._rooms:
            inside.pop(one, None)

    def oldest(self) -> K | None:
        """Whoever has said nothing for longest; None where everybody has knocked."""
        inside, _ = self._rooms[0]
        return next(iter(inside), None)

    def _enter(self, one: K, room: int) -> K | None:
        inside, places = self._rooms[room]
        inside[one] = None
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
        self._reason, self._claimed = printable(reason), claimed

    def due(self, now_s: float) -> TurnedAway | None:
        """What to tell now."""
        if self.total == self._told or now_s < self._not_before_s:
            return None
        count, self._told = self.total - self._told, self.total
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return TurnedAway(self._reason, self._claimed, count)
