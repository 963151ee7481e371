"""Where roles are placed, and for how many workers a cluster has capacity: decisions without Ray."""

from __future__ import annotations

import queue
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from manyhands.errors import UserError
from manyhands.places.place import AddWorker, Command, RemoveWorker

_MOST_IN_A_ROW = 5
_IN_A_ROW_S = 60.0
_FIRST_DELAY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundles:
    """A placement group: so many equal bundles, put together or apart."""

    role: str
    count: int
    strategy: str  # Ray's word: PACK or SPREAD
    bundle: Mapping[str, float]
    first: int = 0  # the index of the role that has the first bundle
    single: bool = False
    """Whether each bundle is a group of its own: Ray finds places for the bundles of one group for all or none."""


def bundles(
    roles: Mapping[str, range],
    ways: Mapping[str, str],
    cpus: int,
    gpus: Mapping[str, int],
    single: Collection[str] = (),
) -> list[Bundles]:
    """A placement group for each kind of role; of the kinds in `single`, members may come and go one by one."""
    return [
        Bundles(
            role=role,
            count=len(indices),
            first=indices.start,
            strategy=ways[role].upper(),
            single=role in single,
            bundle={"CPU": cpus, **({"GPU": gpus[role]} if gpus.get(role) else {})},
        )
        for role, indices in roles.items()
        if indices
    ]


def room_for(free: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many more such bundles fit into the resources of one node."""
    return max(0, min(int(free.get(name, 0.0) // needed) for name, needed in bundle.items() if needed))


class Bounds(NamedTuple):
    """How many workers a run may have while the cluster grows and shrinks."""

    least: int
    most: int

    @classmethod
    def of(cls, workers: int, least: int | None, most: int | None) -> Bounds | None:
        """As asked for; None where the number is fixed. UserError where it makes no sense."""
        if least is None and most is None:
            return None
        least, most = least if least is not None else workers, most if most is not None else workers
        if not 1 <= least <= most:
            raise UserError(f"min_workers={least} must be at least 1 and at most max_workers={most}")
        if not least <= workers <= most:
            raise UserError(f"workers={workers} must be between min_workers={least} and max_workers={most}")
        return cls(least, most)

    def change(self, now: int, room: int) -> int:
        """How many to add to `now` workers, or below 0 to remove, with room for `room` more (below 0: too few)."""
        return min(self.most, max(self.least, now + room)) - now


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start the role once more, at this time."""

    role: str
    index: int
    at_s: float


class GivenUp(NamedTuple):
    """A role will not come back, for this reason."""

    sentence: str


class RestartPolicy:
    """Which roles are started again: what survives a death has each role again, but not for ever.

    The first successor comes almost at once, so that its predecessor's end is noticed before; those that follow in a
    row, twice as late each.
    """

    def __init__(self, *, survives: bool) -> None:
        self.survives = survives
        self._ends: dict[tuple[str, int], list[float]] = {}

    def ended(self, role: str, index: int, sentence: str, now_s: float) -> Restart | GivenUp | None:
        """What to do about a role that has ended; None where its part was done (no `sentence`)."""
        if not sentence:
            return None
        if not self.survives:
            return GivenUp(sentence)
        ends = [at_s for at_s in self._ends.get((role, index), []) if now_s - at_s < _IN_A_ROW_S]
        self._ends[role, index] = [*ends, now_s]
        if len(ends) >= _MOST_IN_A_ROW:
            return GivenUp(
                f"{sentence} ({len(ends) + 1} times within {_IN_A_ROW_S:.0f} s, so it is not restarted)"
            )
        return Restart(role=role, index=index, at_s=now_s + _FIRST_DELAY_S * 2 ** len(ends))


_EVERY_S = 2.0
_UNPLACED_S = 20.0


class SlotChange(NamedTuple):
    """A slot to start a worker for (`added`), or without which the run continues once its pending work is finished."""

    slot: int
    added: bool


class Space(Protocol):
    """What `RayRoles` says of the cluster: which actors wait for a place since when, and how many more it has."""

    def waiting(self, role: str, now_s: float) -> dict[int, float]: ...
    def room(self, role: str) -> int: ...


class Autoscaler:
    """Decides from the free capacity, and asks the run by its `commands`, one at a time; slots are never reused."""

    def __init__(
        self, bounds: Bounds | None, workers: int, commands: queue.SimpleQueue[Command] | None
    ) -> None:
        self._bounds, self._commands = bounds, commands
        self._slots = set(range(workers))
        self._pending: Command | None = None
        self._next_s = 0.0

    def look(self, space: Space, now_s: float) -> list[SlotChange]:
        """What to do now; asks the cluster every few seconds, and nothing while the run has not answered."""
        if self._bounds is None or self._commands is None:
            return []
        if self._pending is not None:
            return self._answered(self._pending)
        if now_s < self._next_s:
            return []
        self._next_s = now_s + _EVERY_S
        waiting = space.waiting("worker", now_s)
        unplaced = sorted(
            slot
            for slot, since_s in waiting.items()
            if slot in self._slots and now_s - since_s >= _UNPLACED_S
        )
        room = -len(unplaced) if unplaced else 0 if waiting else space.room("worker")
        change = self._bounds.change(len(self._slots), room)
        if change > 0 or (change < 0 and unplaced):
            self._pending = Command(AddWorker() if change > 0 else RemoveWorker(slot=unplaced[-1]))
            self._commands.put(self._pending)
        return []

    def _answered(self, command: Command) -> list[SlotChange]:
        if not command.done.done():
            return []
        self._pending = None
        adds = isinstance(command.change, AddWorker)
        if command.done.exception() is not None:
            self._bounds = None if adds else self._bounds  # as many were added as can be in one run
            return []
        slot = command.done.result()
        self._slots = self._slots | {slot} if adds else self._slots - {slot}
        return [SlotChange(slot, adds)]
