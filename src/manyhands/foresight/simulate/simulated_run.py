"""Result of a simulated run: the log of every shard, waiting times, and what happened when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manyhands.foresight.simulate.models import Store
from manyhands.strategies.ps.log_rows import Row, StepRow

__all__ = ["SimulatedHappening", "SimulatedRun", "WorkerTimes"]


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

    @property
    def waiting_share(self) -> float:
        """The time waiting for parameters, as a share of the total."""
        total = self.computing_s + self.waiting_s
        return self.waiting_s / total if total else 0.0


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
        """The number of optimizer steps of the lead shard."""
        return sum(isinstance(row, StepRow) for row in self.logs[0])

    @property
    def num_batches(self) -> int:
        """The number of global batches with an applied update."""
        return len({u.batch for row in self.logs[0] if isinstance(row, StepRow) for u in row.updates})

    @property
    def updates_per_s(self) -> float:
        """Optimizer steps of the lead shard per second of training."""
        return self.num_steps / (self.seconds - self.began_s)

    def staleness(self, shard: int = 0) -> Counter[int]:
        """Return a histogram of the staleness of a shard's applied updates."""
        rows = (row for row in self.logs[shard] if isinstance(row, StepRow))
        return Counter(update.staleness for row in rows for update in row.updates)
