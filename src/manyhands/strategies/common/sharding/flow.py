"""When the values of a unit are fetched and dropped in the course of a step: a state machine, without a tensor.

    forward     a layer begins: its unit is fetched, and, where the last step tells, the one after it; it ends: dropped
    backward    what autograd saved of a unit is asked for: fetched, the next one ahead; its gradient is whole: passed
                on, and the unit dropped
    anything    a parameter that is used outside of its layer's forward is fetched, and stays to the end of the step

The order in which units were needed is remembered for each course (training, evaluation), and is a guess, no more:
what was fetched for nothing is dropped at the end.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["Action", "Await", "Fetch", "Hand", "Release", "UnitFlow"]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Begin to fetch the values of a unit."""

    unit: int


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until the values of a unit are present."""

    unit: int


@dataclass(frozen=True, slots=True)
class Hand:
    """Hand on the gradient of a unit."""

    unit: int


@dataclass(frozen=True, slots=True)
class Release:
    """Free the values of a unit."""

    unit: int


Action = Fetch | Await | Hand | Release


class UnitFlow:
    """The state of all units; `lasting` ones stay from their first use to the end of a step."""

    def __init__(self, count: int, lasting: Collection[int] = (), *, ahead: bool = True) -> None:
        self._lasting = frozenset(lasting)
        self._ahead = ahead
        self._here: set[int] = set()
        self._coming: set[int] = set()
        self._inside = [0] * count
        self._held: set[int] = set()
        self._backward = False
        self._course = ""
        self._order: list[int] = []
        self._known: dict[str, list[int]] = {}

    def is_here(self, unit: int) -> bool:
        """Whether the unit's values are present for use."""
        return unit in self._here

    def begin(self, course: str) -> None:
        """Begin a step of a course whose order is remembered."""
        self._course, self._order, self._backward = course, [], False

    def backward(self) -> None:
        """From here on what a layer's forward needs stays, as where it is computed again for its backward."""
        self._backward = True

    def enter(self, unit: int) -> list[Action]:
        """A layer's forward begins."""
        self._inside[unit] += 1
        return self._need(unit)

    def leave(self, unit: int) -> list[Action]:
        """A layer's forward has ended."""
        self._inside[unit] -= 1
        if self._backward or unit in self._held or unit in self._lasting:
            return []
        return self._drop(unit)

    def touch(self, unit: int) -> list[Action]:
        """A parameter is used outside its layer's forward, or backward needs what was saved of it."""
        if self._inside[unit]:
            return []
        self._held.add(unit)
        return self._need(unit)

    def complete(self, unit: int) -> list[Action]:
        """All gradients of a unit are present."""
        if not self._inside[unit]:
            self._held.discard(unit)
        return [Hand(unit), *self._drop(unit)]

    def end(self) -> list[Action]:
        """The step has ended, successfully or not."""
        self._known[self._course] = self._order
        self._inside = [0] * len(self._inside)
        self._held.clear()
        self._backward = False
        waited: list[Action] = [Await(unit) for unit in sorted(self._coming)]
        left = sorted(self._here | self._coming)
        self._here.clear()
        self._coming.clear()
        return [*waited, *(Release(unit) for unit in left)]

    def _need(self, unit: int) -> list[Action]:
        if unit in self._here:
            return []
        actions: list[Action] = [] if unit in self._coming else [Fetch(unit)]
        self._order.append(unit)
        follower = self._next()
        if follower is not None and follower not in self._here and follower not in self._coming:
            actions.append(Fetch(follower))
            self._coming.add(follower)
        self._coming.discard(unit)
        self._here.add(unit)
        return [*actions, Await(unit)]

    def _next(self) -> int | None:
        """The unit that came after this one in the last step of the course."""
        known, position = self._known.get(self._course, []), len(self._order)
        as_before = self._ahead and known[position - 1 : position] == self._order[-1:]
        return known[position] if as_before and position < len(known) else None

    def _drop(self, unit: int) -> list[Action]:
        if self._inside[unit] or unit not in self._here:
            return []
        self._here.discard(unit)
        return [Release(unit)]
