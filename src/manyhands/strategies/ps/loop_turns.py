"""What each worker of a recorded loop of the user's own did, batch by batch: pure, from the rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from manyhands.strategies.ps.log_rows import Row, SkippedRow
from manyhands.strategies.ps.replay_order import ReplayImpossible, ReplayOrder
from manyhands.strategies.ps.update_files import ComputedRow


class LoopTurn(NamedTuple):
    """A batch that was a worker's, and what came of it."""

    clock: int
    batch: int
    stepped: bool  # whether the loop took a step with it, or went on to the next batch
    applied: bool  # whether a shard took the gradient
    versions: tuple[int, ...] = ()  # of the shards, that it was computed from


def loop_turns(
    slot: int,
    order: ReplayOrder,
    computed: Mapping[int, Sequence[ComputedRow]],
    lead: Iterable[Iterable[Row]],
) -> list[LoopTurn]:
    """The turns of a slot, in the order of its clock; what a dead worker began counts where a shard has it."""
    taken = set().union(*order.applied_as)
    found: dict[int, LoopTurn] = {}
    for row in (row for rows in lead for row in rows):
        if isinstance(row, SkippedRow) and row.slot == slot:
            found[row.clock] = LoopTurn(row.clock, row.batch, stepped=False, applied=False)
    for one in (one for rows in computed.values() for one in rows if one.slot == slot):
        before, applied = found.get(one.clock), one.name in taken
        if before is not None and before.applied and applied:
            raise ReplayImpossible(
                f"slot {slot}, clock {one.clock}: two members computed it, each for some shards, which a script cannot "
                "do again"
            )
        if before is None or not before.applied:
            found[one.clock] = LoopTurn(one.clock, one.batch, True, applied, one.versions)
    return [found[clock] for clock in sorted(found)]
