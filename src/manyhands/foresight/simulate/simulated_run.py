"""Result of a simulated run: the log of every shard, waiting times, and what happened when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.foresight.simulate.faults import FaultRole
from manyhands.foresight.simulate.models import Store
from manyhands.strategies.ps.actions import Ack
from manyhands.strategies.ps.host_group import GroupMessage
from manyhands.strategies.ps.log_rows import Row, StepRow
from manyhands.strategies.ps.ps_messages import Message, Work

__all__ = ["Observer", "SimulatedHappening", "SimulatedRun", "UpdateNames", "WorkerTimes"]

UpdateNames = Iterable[tuple[int, int]]  # slot and clock of each


@dataclass(frozen=True, slots=True)
class SimulatedHappening:
    """An event of a member: a fault, a recovery, a loss."""

    at_s: float
    what: str
    member: int
    slot: int = -1  # of a worker that was struck: the slot that it held, if any


@dataclass(slots=True)
class WorkerTimes:
    """How the workers of a slot spent their time, from the first Read on."""

    computing_s: float = 0.0
    waiting_s: float = 0.0
    num_computed: int = 0


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """A run that has ended, at `seconds` of virtual time; training began at `began_s`."""

    began_s: float
    seconds: float
    logs: Sequence[Sequence[Row]]  # the rows of each shard, as the last server that served it has them
    written: Mapping[int, Sequence[Sequence[Row]]]
    """By shard: what each server that ever was wrote to its own log, for `audit`."""
    stores: Sequence[Store]  # the store of each shard, likewise
    backups: Sequence[Store | None]
    """The store of each shard on its backup, where one was known to have all of it when the run ended."""
    held: Sequence[frozenset[tuple[int, int]]]
    """By shard: the updates (slot, clock) that were in no step when the run ended."""
    times: Mapping[int, WorkerTimes]  # by slot
    happenings: Sequence[SimulatedHappening] = field(default_factory=tuple)
    num_events: int = 0

    @property
    def waiting_share(self) -> float:
        """The share of all workers' time that they waited for parameters."""
        waiting_s = sum(times.waiting_s for times in self.times.values())
        total_s = waiting_s + sum(times.computing_s for times in self.times.values())
        return waiting_s / total_s if total_s else 0.0

    @property
    def num_steps(self) -> int:
        return sum(isinstance(row, StepRow) for row in self.logs[0])

    @property
    def num_batches(self) -> int:
        """The number of global batches with an applied update."""
        return len({u.batch for row in self.logs[0] if isinstance(row, StepRow) for u in row.updates})

    @property
    def updates_per_s(self) -> float:
        return self.num_steps / (self.seconds - self.began_s)

    def staleness(self, shard: int = 0) -> Counter[int]:
        rows = (row for row in self.logs[shard] if isinstance(row, StepRow))
        return Counter(update.staleness for row in rows for update in row.updates)


class Observer:
    """Callbacks for the events of a simulated run, without effect on it; tests override those they need."""

    def starts(self, member: int, role: FaultRole) -> None:
        """A process is started."""

    def waited(self, slot: int, work: Work, waited_for: int, since_s: float, now_s: float) -> None:
        """A worker has all values; the last shard to answer had waited for a slot, or for nobody (-1)."""

    def computes(self, slot: int, work: Work, read: list[Any], now_s: float) -> None:
        """A worker begins to compute from what it has read of each shard."""

    def computed(self, slot: int, work: Work, began_s: float, now_s: float) -> None:
        """The worker has the gradient, and pushes it now."""

    def sends(self, source: int, to: int, message: Message | GroupMessage, now_s: float) -> None:
        """A member sends a message."""

    def arrives(
        self, source: int, to: int, message: Message | GroupMessage, num_bytes: int, now_s: float
    ) -> None:
        """A message arrives with its payload; the receiver may be busy with another."""

    def acknowledges(self, ack: Ack) -> None:
        """The primary of a shard says that a push is durable."""

    def steps(self, server: int, row: StepRow, began_s: float, took_s: float) -> None:
        """The primary of a shard takes an optimizer step."""

    def serves(self, shard: int, server: int, store: Store, held: UpdateNames, now_s: float) -> None:
        """A server has learned that it serves a shard from now on: with this store, and updates in no step yet."""

    def restores(self, shard: int) -> None:
        """No replica of a shard was left: a server is told to continue from its last snapshot."""

    def over(self, shard: int, store: Store, held: UpdateNames) -> None:
        """Training is over, possibly repeated: the shard's server is to leave it as it is."""

    def happens(self, happening: SimulatedHappening) -> None:
        """A fault, a recovery or a loss has happened."""
