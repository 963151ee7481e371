"""What an audit is given besides the logs, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from manyhands.strategies.ps.log_rows import UpdateRow
from manyhands.strategies.ps.update_files import ComputedRow

__all__ = ["Audit", "Evidence", "Fate", "Settled", "ShardSummary", "Verdict", "Violation"]


class Verdict(Enum):
    """What the records of a run prove."""

    COMPLETE = "complete"
    """Every batch of the run is in every shard, once, and no rule was broken."""

    RESTORED = "restored"
    """A shard went back to a snapshot: no rule was broken, and what that cost is counted."""

    INCOMPLETE = "incomplete"
    """No rule was broken as far as the records go, but the run did not come to its end, or they lack something."""

    BROKEN = "broken"
    """The records contradict each other, or a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Something that must not happen, in one sentence that names the shard, the version, the slot and the clock."""

    shard: int
    sentence: str


@dataclass(slots=True, kw_only=True)
class ShardSummary:
    """What one shard's log tells."""

    shard: int
    versions: int = 0
    """The last one."""

    applied: int = 0
    late: int = 0
    skipped: int = 0
    lost: int = 0
    restores: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    """How many updates were so stale."""

    batches: int = 0
    """How many batches of the run it has, with all their parts that count."""


class Fate(Enum):
    """What became of an update at a shard."""

    APPLIED = "applied"
    LATE = "late"
    SKIPPED = "skipped"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Settled:
    """An update that a shard's history accounts for."""

    fate: Fate
    version: int
    """That of the shard then."""

    update: UpdateRow | None = None
    """As it was applied."""

    batch: int | None = None
    """Where the row says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What else is known of a run; what is not there is not compared."""

    computed: Mapping[int, Sequence[ComputedRow]] | None = None
    """By process: what its worker recorded."""

    share: Callable[[int, int, int], float] | None = None
    """The part of its batch that (batch, part, parts) is: what an update weighs."""

    versions: Mapping[int, int] | None = None
    """By shard: its version at the end; None where the run left no summary."""

    recorded: Mapping[str, int] = field(default_factory=dict)
    """By file: how many rows it was written with, as far as its process came to its end."""

    found: Mapping[str, int] = field(default_factory=dict)
    """By file: how many rows are there."""

    unrecorded: Sequence[str] = ()
    """A sentence for each file whose recording ended before the run did."""

    begun: int = 0
    """The first batch that is the shards' own; those before were trained under another strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was found."""

    violations: tuple[Violation, ...]
    """In the order of the log, shard by shard."""

    missing: tuple[str, ...]
    """What the records lack, a sentence each."""

    shards: tuple[ShardSummary, ...]
    lost: int = 0
    """How many batches shards lack after a return to a snapshot, counted at every shard."""

    @property
    def clean(self) -> bool:
        """Whether no rule was broken."""
        return not self.violations

    @property
    def verdict(self) -> Verdict:
        """The worst that holds."""
        if self.violations:
            return Verdict.BROKEN
        if self.missing:
            return Verdict.INCOMPLETE
        return Verdict.RESTORED if any(shard.restores for shard in self.shards) else Verdict.COMPLETE

    @property
    def words(self) -> str:
        """The verdict as one says it."""
        return f"restored, {self.lost} lost" if self.verdict is Verdict.RESTORED else self.verdict.value
