"""Which batches a run that resumes from its shards' snapshots will compute: pure, from the state of their cores.

Under `sync` these are all from one batch on. Otherwise workers are at different batches when a snapshot is taken:
a slow one has an early batch outstanding, a fast one has done later ones. The history of the run keeps its rows
of all that is done, and only those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.strategies.common.consistency import Policy
from manyhands.strategies.ps.ps_messages import LEAD
from manyhands.strategies.ps.slots import SlotTable

__all__ = ["ToCome", "batches_to_come"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToCome:
    """The batches that will be computed; test with `in`."""

    start: int  # all batches from this one on will be computed
    before: frozenset[int] = field(default_factory=frozenset)  # earlier batches that will be computed, too

    def __contains__(self, batch: int) -> bool:
        return batch >= self.start or batch in self.before

    def wants(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of the history stays, because what it reports is done and will not be computed again.

        The loss at step k is that of batch k - 1. An evaluation at step k comes before batch k, and remains valid
        if all batches before it are done.
        """
        step = int(row["step"])
        if "metrics" in row:
            return step not in self or step <= min([self.start, *self.before])
        return step - 1 not in self


def batches_to_come(policy: Policy, cores: Sequence[Mapping[str, Any]]) -> ToCome:
    """What a run that resumes from these states (`ShardCore.state`), by shard, will compute."""
    lead = cores[LEAD]
    table = SlotTable.from_state(lead["table"])
    if policy.stepwise:
        return ToCome(start=lead["steps"]["step"])
    if policy.by_clock:
        return _by_clock(policy, table)
    owed = {
        batch
        for record in table.records.values()
        for clock, batch in record.recent.items()
        if clock >= record.next_clock
    }
    # A lead that goes back asks the others first, and gives out nothing that one of them has seen.
    start = max(int(core["next_batch"]) for core in cores)
    return ToCome(start=start, before=frozenset(batch for batch in owed if batch < start))


def _by_clock(policy: Policy, table: SlotTable) -> ToCome:
    """Every slot continues at its clock, and slot and clock determine the batch."""
    generations = table.generations
    top = max((record.next_clock for record in table.records.values()), default=0)
    top = max(top, generations[-1].start)
    last = generations[-1]
    start = policy.place(0, len(last.slots), top, (last.start, last.base)).batch
    owed = set()
    for index, generation in enumerate(generations):
        end = generations[index + 1].start if index + 1 < len(generations) else top
        for rank, slot in enumerate(generation.slots):
            first = max(generation.start, table.records[slot].next_clock)
            for clock in range(first, end):
                place = policy.place(rank, len(generation.slots), clock, (generation.start, generation.base))
                owed.add(place.batch)
    return ToCome(start=start, before=frozenset(batch for batch in owed if batch < start))
