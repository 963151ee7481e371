"""The input of an audit besides the logs, and its findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from manyhands.strategies.ps.log_rows import UpdateRow
from manyhands.strategies.ps.update_files import ComputedRow

__all__ = ["Audit", "Evidence", "Fate", "Settled", "ShardSummary", "Verdict", "Violation"]


class Verdict(Enum):
    """The overall result of an audit."""

    COMPLETE = "complete"
    """Every batch of the run is in every shard, once, and no rule was broken."""

    RESTORED = "restored"
    """A shard went back to a snapshot: no rule was broken, and the lost batches are counted."""

    INCOMPLETE = "incomplete"
    """No rule was broken as far as the records go, but the run did not finish or the records lack something."""

    BROKEN = "broken"
    """The records contradict each other or a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A broken rule, in one sentence that names the shard, the version, the slot and the clock."""

    shard: int
    sentence: str


@dataclass(slots=True, kw_only=True)
class ShardSummary:
    """Counts from one shard's log."""

    shard: int
    versions: int = 0
    """The last version."""

    applied: int = 0
    late: int = 0
    skipped: int = 0
    lost: int = 0
    restores: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    """The number of updates by staleness."""

    batches: int = 0
    """How many batches of the run the shard has, with all their parts that count."""


class Fate(Enum):
    """What happened to an update at a shard."""

    APPLIED = "applied"
    LATE = "late"
    SKIPPED = "skipped"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Settled:
    """An update that a shard's log accounts for."""

    fate: Fate
    version: int
    """The shard's version at that point."""

    update: UpdateRow | None = None
    """The update's row, if it was applied."""

    batch: int | None = None
    """The batch, if the row names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a run besides its logs; an absent item is not compared."""

    computed: Mapping[int, Sequence[ComputedRow]] | None = None
    """The rows that workers recorded, by process."""

    share: Callable[[int, int, int], float] | None = None
    """The share of its batch that (batch, part, parts) is: the weight of an update."""

    versions: Mapping[int, int] | None = None
    """The final version by shard; None if the run left no summary."""

    recorded: Mapping[str, int] = field(default_factory=dict)
    """The number of rows written, by file, for processes that ended in order."""

    found: Mapping[str, int] = field(default_factory=dict)
    """The number of rows that were read, by file."""

    unrecorded: Sequence[str] = ()
    """A sentence for each file whose recording ended before the run did."""

    begun: int = 0
    """The first batch that these shards trained; earlier ones were trained under another strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The findings of an audit."""

    violations: tuple[Violation, ...]
    """In the order of the log, shard by shard."""

    missing: tuple[str, ...]
    """A sentence for each thing that the records lack."""

    shards: tuple[ShardSummary, ...]
    lost: int = 0
    """How many batches shards lack after a return to a snapshot, summed over shards."""

    @property
    def clean(self) -> bool:
        """Whether no rule was broken."""
        return not self.violations

    @property
    def verdict(self) -> Verdict:
        if self.violations:
            return Verdict.BROKEN
        if self.missing:
            return Verdict.INCOMPLETE
        return Verdict.RESTORED if any(shard.restores for shard in self.shards) else Verdict.COMPLETE

    @property
    def words(self) -> str:
        """The verdict as text, with the number of lost batches after a restore."""
        return f"restored, {self.lost} lost" if self.verdict is Verdict.RESTORED else self.verdict.value
