"""What each worker of a recorded loop did, from rows alone."""

from __future__ import annotations

import pytest

from manyhands.strategies.ps.log_rows import SkippedRow, StepRow, UpdateRow
from manyhands.strategies.ps.replay_order import LoopTurn, ReplayImpossible, ReplayOrder, loop_turns
from manyhands.strategies.ps.update_files import ComputedRow


def computed(member: int, clock: int, *versions: int) -> ComputedRow:
    hashes = ("0" * 16,) * len(versions)
    return ComputedRow(member, 1, member, clock, 10 + clock, 0, 1, versions, (-1,) * len(versions), hashes)


def step(shard: int, version: int, row: ComputedRow) -> StepRow:
    name = (row.slot, row.clock, row.batch, row.part, row.parts, row.member, row.versions[shard])
    return StepRow(shard, 1, version, version, 1.0, (UpdateRow(*name, 0, 1.0, 1.0),))


def test_turns_are_those_of_the_slot_in_order_with_what_its_successor_computed() -> None:
    rows = {4: [computed(4, 0, 0), computed(4, 2, 1)], 6: [computed(6, 2, 1), computed(6, 3, 2)]}
    order = ReplayOrder([[step(0, 1, rows[4][0]), step(0, 2, rows[6][0])]], rows)
    skipped = [SkippedRow(0, 1, 9, 1, 1, 11, 4), SkippedRow(0, 1, 9, 2, 1, 99, 5)]
    assert loop_turns(1, order, rows, [skipped]) == [
        LoopTurn(0, 10, stepped=True, applied=True, versions=(0,)),
        LoopTurn(1, 11, stepped=False, applied=False),
        LoopTurn(2, 12, stepped=True, applied=True, versions=(1,)),
        LoopTurn(3, 13, stepped=True, applied=False, versions=(2,)),
    ]
    assert loop_turns(0, order, rows, [skipped]) == []


def test_an_update_that_two_members_computed_for_different_shards_is_no_script_to_repeat() -> None:
    rows = {4: [computed(4, 0, 0, 0)], 6: [computed(6, 0, 0, 0)]}
    order = ReplayOrder([[step(0, 1, rows[4][0])], [step(1, 1, rows[6][0])]], rows)
    with pytest.raises(ReplayImpossible, match="slot 1, clock 0: two members"):
        loop_turns(1, order, rows, [])
