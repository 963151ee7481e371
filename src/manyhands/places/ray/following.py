"""Workers follow the size of a cluster: one more if there is capacity, one less if its place is gone."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Protocol

from manyhands.places.ray.actor_placement import Bounds
from manyhands.places.run_commands import AddWorker, Command, RemoveWorker

__all__ = ["Less", "More", "SizeFollower"]

_EVERY_S = 2.0
_HOMELESS_S = 20.0


@dataclass(frozen=True, slots=True)
class More:
    """Start a worker for this slot, which the run has been asked to make."""

    slot: int


@dataclass(frozen=True, slots=True)
class Less:
    """The run continues without this slot: a successor there only finishes its pending work."""

    slot: int


class Space(Protocol):
    """What is asked of the cluster."""

    def waiting(self, role: str, now_s: float) -> dict[int, float]:
        """Since when which actors of a role have been without a place."""

    def room(self, role: str) -> int:
        """For how many more there is room."""


class SizeFollower:
    """Decides from the free capacity, and asks the run through its `commands`; one change at a time.

    Slots are never reused, so the number of workers that can be added in all is fixed.
    """

    def __init__(
        self, bounds: Bounds | None, workers: int, commands: queue.SimpleQueue[Command] | None
    ) -> None:
        self._bounds, self._commands = bounds, commands
        self._slots = set(range(workers))
        self._asked: Command | None = None
        self._next_s = 0.0

    def look(self, space: Space, now_s: float) -> list[More | Less]:
        """What to do now; asks the cluster every few seconds, and nothing while the run has not answered."""
        if self._bounds is None or self._commands is None:
            return []
        if self._asked is not None:
            return self._answered(self._asked)
        if now_s < self._next_s:
            return []
        self._next_s = now_s + _EVERY_S
        waiting = space.waiting("worker", now_s)
        homeless = sorted(
            slot
            for slot, since_s in waiting.items()
            if slot in self._slots and now_s - since_s >= _HOMELESS_S
        )
        room = -len(homeless) if homeless else 0 if waiting else space.room("worker")
        change = self._bounds.change(len(self._slots), room)
        if change > 0:
            self._ask(Command(AddWorker()))
        elif change < 0 and homeless:
            self._ask(Command(RemoveWorker(slot=homeless[-1])))
        return []

    def _ask(self, command: Command) -> None:
        assert self._commands is not None, "nothing is asked of a run that cannot be asked"
        self._asked = command
        self._commands.put(command)

    def _answered(self, asked: Command) -> list[More | Less]:
        if not asked.done.done():
            return []
        self._asked = None
        if asked.done.exception() is not None:
            if isinstance(asked.change, AddWorker):
                self._bounds = None  # as many were added as can be in one run
            return []
        slot = asked.done.result()
        if isinstance(asked.change, AddWorker):
            self._slots.add(slot)
            return [More(slot)]
        self._slots.discard(slot)
        return [Less(slot)]
