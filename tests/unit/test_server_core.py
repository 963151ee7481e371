"""A shard's state machine: entries in, steps and rows out, the same on every replica."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import UserError
from manyhands.strategies.common.consistency import parse_consistency
from manyhands.strategies.ps.actions import Apply, Drop, Log, Outcome
from manyhands.strategies.ps.log_rows import LateRow, LostRow, Row, SkippedRow, StepRow
from manyhands.strategies.ps.pending_steps import Change, ShardConfig
from manyhands.strategies.ps.ps_messages import (
    Assigned,
    Chosen,
    ChosenKept,
    Closing,
    Entry,
    Generation,
    Push,
    SlotsChanged,
    Update,
    UpdatesLost,
    Work,
    WorkKind,
)
from manyhands.strategies.ps.shard_core import ShardCore
from manyhands.strategies.ps.work_plan import Hold


def core(consistency: str, *, shard: int = 0, shards: int = 1, slots: int = 3, steps: int = 100) -> ShardCore:
    policy = parse_consistency(consistency)
    return ShardCore(
        ShardConfig(shard=shard, num_shards=shards, policy=policy, steps=steps, slots=tuple(range(slots)))
    )


def push(slot: int, clock: int, *, shard: int = 0, read: int = 0, parts: int = 1, skip: bool = False) -> Push:
    return Push(
        shard=shard,
        slot=slot,
        member=slot + 10,
        clock=clock,
        read_version=read,
        batch=clock,
        part=slot if parts > 1 else 0,
        parts=parts,
        weight=1 / parts,
        skip=skip,
    )


def chosen(number: int, *updates: tuple[int, int], shard: int = 1, step: int = 0, kept: int = 0) -> Chosen:
    return Chosen(
        shard=shard,
        term=0,
        number=number,
        kept=kept,
        generations=(Generation(start=0, base=0, slots=(0, 1, 2)),),
        step=step,
        updates=tuple(Update(slot=slot, clock=clock) for slot, clock in updates),
    )


def steps_of(change: Change) -> list[list[tuple[int, int]]]:
    return [
        [(part.slot, part.clock) for part in action.row.updates]
        for action in change.actions
        if isinstance(action, Apply)
    ]


def rows_of(change: Change) -> list[Row]:
    return [action.row for action in change.actions if isinstance(action, Log | Apply)]


def train(clock: int, batch: int, part: int = 0, parts: int = 1) -> Work:
    return Work(kind=WorkKind.TRAIN, clock=clock, batch=batch, part=part, parts=parts)


def test_sync_sums_in_slot_order_once_all_are_there() -> None:
    shard = core("sync")
    for slot in (2, 0):
        change = shard.commit(push(slot, 0, parts=3))
        assert (steps_of(change), change.outcome) == ([], Outcome.ACCEPTED)
        assert shard.work.answer(slot, 1) is Hold.OWN
    assert shard.work.answer(1, 0) == train(0, 0, part=1, parts=3)
    change = shard.commit(push(1, 0, parts=3))
    assert steps_of(change) == [[(0, 0), (1, 0), (2, 0)]]
    assert (change.outcome, shard.version) == (Outcome.APPLIED, 1)
    assert shard.work.answer(1, 1) == train(1, 1, part=1, parts=3)
    assert shard.work.answer(1, 2) is Hold.OWN


def test_bounded_reads_wait_for_the_slowest() -> None:
    shard = core("bounded:2")
    for clock in range(3):
        assert shard.work.answer(0, clock) == train(clock, clock * 3)
        assert steps_of(shard.commit(push(0, clock))) == [[(0, clock)]]
    assert shard.work.answer(0, 3) is Hold.OTHERS
    shard.commit(push(1, 0))
    assert shard.work.answer(0, 3) is Hold.OTHERS
    shard.commit(push(2, 0))
    assert shard.work.answer(0, 3) == train(3, 9)
    assert shard.version == 5


def test_async_gives_batches_out_in_the_order_of_asking_and_the_same_again() -> None:
    shard = core("async", steps=3)
    for slot, batch in ((2, 0), (0, 1)):
        assert shard.work.answer(slot, 0) is Hold.BATCH
        shard.commit(Assigned(slot=slot, clock=0))
        assert shard.work.answer(slot, 0) == train(0, batch)
    shard.commit(Assigned(slot=2, clock=0))
    shard.commit(push(2, 0))
    assert shard.work.answer(2, 0) == train(0, 0), "a successor repeats what another shard may lack"
    shard.commit(Assigned(slot=2, clock=1))
    assert shard.work.answer(2, 1) == train(1, 2)
    assert shard.work.answer(1, 0) == Work(kind=WorkKind.FINISHED)


def test_softsync_takes_the_first_to_arrive_and_at_the_end_the_rest() -> None:
    shard = core("softsync:1", slots=2, steps=3)
    for slot, clock in ((1, 0), (0, 0), (1, 1)):
        shard.commit(Assigned(slot=slot, clock=clock))
    assert steps_of(shard.commit(push(1, 0))) == []
    assert shard.work.answer(1, 1) == train(1, 2), "a reader does not wait for its group"
    change = shard.commit(push(0, 0))
    assert steps_of(change) == [[(1, 0), (0, 0)]]
    factors = [
        part.factor for action in change.actions if isinstance(action, Apply) for part in action.row.updates
    ]
    assert factors == [0.5, 0.5]
    assert steps_of(shard.commit(push(1, 1))) == [[(1, 1)]], "no more will come"


def test_backup_workers_are_late_and_sent_ahead() -> None:
    shard = core("sync:1", shards=2)
    shard.commit(push(2, 0, parts=3))
    change = shard.commit(push(0, 0, parts=3))
    assert steps_of(change) == [[(0, 0), (2, 0)]]
    assert [row for row in rows_of(change) if isinstance(row, LateRow)] == [
        LateRow(shard=0, term=0, sequence=2, slot=1, clock=0)
    ]
    assert [(d.number, d.step, d.updates) for d in change.decisions] == [
        (1, 0, (Update(slot=0, clock=0), Update(slot=2, clock=0)))
    ]
    assert shard.outcome_of(1, 0) is Outcome.LATE
    assert shard.outcome_of(0, 0) is Outcome.DUPLICATE
    assert shard.work.answer(1, 0) == train(1, 1, part=1, parts=3)
    late = shard.commit(push(1, 0, parts=3))
    assert (late.outcome, late.actions) == (Outcome.LATE, [Drop(shard=0, slot=1, clock=0)])


def test_a_follower_takes_groups_in_the_order_chosen_and_waits_for_their_updates() -> None:
    shard = core("softsync:1", shard=1, shards=2)
    for slot in (0, 1, 2):
        assert steps_of(shard.commit(push(slot, 0, shard=1))) == []
    assert steps_of(shard.commit(chosen(1, (0, 0)))) == [[(0, 0)]]
    assert steps_of(shard.commit(chosen(2, (2, 0), (0, 1)))) == []
    assert steps_of(shard.commit(chosen(3, (1, 0)))) == []
    assert steps_of(shard.commit(chosen(3, (1, 0)))) == []
    assert shard.kept_answer(0).number == 3
    assert steps_of(shard.commit(push(0, 1, shard=1))) == [[(2, 0), (0, 1)], [(1, 0)]]


def test_a_follower_takes_one_by_one_what_was_chosen_in_a_life_that_is_lost() -> None:
    shard = core("softsync:1", shard=1, shards=2)
    shard.commit(push(0, 0, shard=1))
    shard.commit(push(1, 0, shard=1))
    change = shard.commit(chosen(1, (0, 1), (2, 0))._replace(freely=True))
    assert steps_of(change) == [[(0, 0)]]
    shard = ShardCore.from_state(shard.config, json.loads(json.dumps(shard.state())))
    assert steps_of(shard.commit(push(0, 1, shard=1))) == [[(0, 1)]]
    assert steps_of(shard.commit(push(0, 2, shard=1))) == [], "this one is still to be chosen"
    assert steps_of(shard.commit(chosen(2, (1, 0), (0, 2)))) == [[(1, 0), (0, 2)]]


def test_a_lead_frees_what_it_can_not_choose_any_more() -> None:
    shard = core("softsync:1", shards=2)
    shard.commit(push(0, 0))
    change = shard.commit(UpdatesLost(slot=0, until=5))
    assert [(d.freely, d.updates) for d in change.decisions] == [(True, (Update(slot=0, clock=4),))]
    for slot in (1, 2):
        change = shard.commit(push(slot, 0))
    assert [d.updates for d in change.decisions] == [tuple(Update(slot=slot, clock=0) for slot in (0, 1, 2))]
    shard.commit(push(1, 1))
    kept = ChosenKept(shard=1, term=0, number=2, generations=(), top_clock=0, top_batch=0, asks=False)
    shard.commit(kept)
    [greeting] = shard.greetings_to(1, 0)
    assert (greeting.number, greeting.kept, greeting.freely) == (2, 2, True)
    assert greeting.updates == (Update(slot=0, clock=4), Update(slot=1, clock=0), Update(slot=2, clock=0))


def test_a_greeting_leaves_to_its_group_what_is_chosen_and_not_yet_kept() -> None:
    shard = core("softsync:1", shards=2)
    for clock in (0, 1):
        for slot in (0, 1, 2):
            shard.commit(push(slot, clock))
    shard.commit(ChosenKept(shard=1, term=0, number=1, generations=(), top_clock=0, top_batch=0))
    greeting, second = shard.greetings_to(1, 0)
    assert greeting.updates == tuple(Update(slot=slot, clock=0) for slot in (0, 1, 2))
    assert (second.number, second.freely) == (2, False)


def test_a_follower_that_lost_choices_goes_on_by_a_greeting_alone_and_is_given_them_back_with_it() -> None:
    shard = core("softsync:1", shard=1, shards=2)
    for slot in (0, 1, 2):
        shard.commit(push(slot, 0, shard=1))
    report = chosen(3, (0, 1), (1, 1), (2, 1), kept=2)
    assert steps_of(shard.commit(report)) == []
    assert shard.kept_answer(0).number == 0, "that was for an earlier life of this shard"
    greeting = chosen(2, (0, 0), (2, 0), kept=2)._replace(freely=True)
    assert steps_of(shard.commit(greeting)) == [[(0, 0)], [(2, 0)]]
    assert shard.kept_answer(0).number == 2
    assert steps_of(shard.commit(chosen(3, (1, 0), kept=2))) == [[(1, 0)]]
    assert shard.is_old(greeting), "who lacks nothing is freed of nothing"


def test_where_each_gradient_is_a_step_a_read_includes_its_own_at_every_shard() -> None:
    alone = core("softsync:1", shard=1, shards=2, slots=1)
    alone.commit(push(0, 0, shard=1))
    assert alone.work.answer(0, 0) == Work(kind=WorkKind.UNKNOWN), "a successor asks again"
    assert alone.work.answer(0, 1) is Hold.OWN
    change = alone.commit(chosen(1, (0, 0)))
    assert change.moved == [0]
    assert alone.work.answer(0, 1) == Work(kind=WorkKind.UNKNOWN)
    grouped = core("softsync:1", shard=1, shards=2, slots=2)
    grouped.commit(push(0, 0, shard=1))
    assert grouped.work.answer(0, 1) == Work(kind=WorkKind.UNKNOWN)


def test_a_follower_that_lost_decisions_goes_on_from_where_the_lead_believes_it() -> None:
    shard = core("sync:1", shard=1, shards=2)
    shard.commit(push(0, 0, shard=1, parts=3))
    report = chosen(8, (0, 7), (1, 7), step=7, kept=7)
    assert shard.commit(report).actions == [], "of what lies between, a greeting tells"
    change = shard.commit(chosen(7, step=7, kept=7))
    shard.commit(report)
    assert shard.steps.step == 7
    assert Drop(shard=1, slot=0, clock=0) in change.actions
    assert all(isinstance(row, LostRow) for row in rows_of(change))
    assert len(rows_of(change)) == 7 * 3
    shard.commit(push(0, 7, shard=1, parts=3))
    assert steps_of(shard.commit(push(1, 7, shard=1, parts=3))) == [[(0, 7), (1, 7)]]


def test_a_push_without_gradient_has_its_place_in_a_step() -> None:
    shard = core("sync", slots=2)
    assert shard.commit(push(0, 0, parts=2, skip=True)).outcome is Outcome.SKIPPED
    change = shard.commit(push(1, 0, parts=2))
    assert steps_of(change) == [[(1, 0)]]
    skipped, step = rows_of(change)
    assert isinstance(skipped, SkippedRow)
    assert isinstance(step, StepRow)
    assert (skipped.slot, skipped.clock, step.updates[0].factor) == (0, 0, 2.0)
    nothing = core("async")
    change = nothing.commit(push(0, 0, skip=True))
    assert (steps_of(change), nothing.version, nothing.next_clock(0)) == ([], 0, 1)


def test_what_was_lost_is_not_waited_for() -> None:
    shard = core("sync", slots=2)
    shard.commit(UpdatesLost(slot=0, until=2))
    change = shard.commit(push(1, 0, parts=2))
    assert steps_of(change) == [[(1, 0)]]
    assert [(row.slot, row.first) for row in rows_of(change) if isinstance(row, LostRow)] == [(0, 0)]
    change = shard.commit(UpdatesLost(slot=1, until=2))
    assert [(row.slot, row.first) for row in rows_of(change) if isinstance(row, LostRow)] == [(0, 1), (1, 1)]
    assert (shard.steps.step, shard.version) == (2, 1)
    free = core("bounded:1", slots=2)
    assert rows_of(free.commit(UpdatesLost(slot=0, until=3))) == [
        LostRow(shard=0, term=0, sequence=1, slot=0, first=0, until=3)
    ]


def test_slots_change_at_a_clock_that_nobody_has_begun() -> None:
    shard = core("bounded:1", shards=2, slots=2)
    shard.commit(push(0, 0))
    change = shard.commit(SlotsChanged(slots=(0, 2)))
    assert shard.table.generations[-1] == Generation(start=2, base=4, slots=(0, 2))
    assert [decision.updates for decision in change.decisions] == [None]
    assert shard.next_clock(2) == 2
    shard.commit(push(1, 0))
    shard.commit(push(0, 1))
    shard.commit(push(1, 1))
    assert shard.work.answer(1, 2) == Work(kind=WorkKind.RETIRED, clock=2)
    assert shard.work.answer(0, 2) is Hold.SHARDS, "another shard might not know yet"
    report = shard.messages_to(1, change.decisions, 0)[0]
    shard.commit(
        ChosenKept(shard=1, term=0, number=1, generations=report.generations, top_clock=2, top_batch=4)
    )
    assert shard.work.answer(0, 2) == train(2, 4)
    assert shard.work.answer(2, 2) == train(2, 5)
    shard.commit(push(0, 2))
    shard.commit(push(0, 3))
    assert shard.work.answer(0, 4) is Hold.OTHERS, "now the new slot is waited for"


def test_a_follower_learns_the_slots_from_the_lead() -> None:
    shard = core("sync", shard=1, shards=2, slots=2)
    table = (Generation(start=0, base=0, slots=(0, 1)), Generation(start=2, base=2, slots=(0,)))
    report = Chosen(shard=1, term=0, number=1, kept=0, generations=table, step=0)
    assert not shard.is_old(report)
    shard.commit(report)
    assert shard.is_old(report)
    for clock in (0, 1):
        shard.commit(push(0, clock, shard=1, parts=2))
        assert steps_of(shard.commit(push(1, clock, shard=1, parts=2))) == [[(0, clock), (1, clock)]]
    assert steps_of(shard.commit(push(0, 2, shard=1))) == [[(0, 2)]]


def test_a_follower_says_when_it_waits_for_nobody_because_the_slot_is_at_its_end() -> None:
    """Only by its table, which may be an old one: here the lead has just removed slot 1, and slot 0 trains on."""
    shard = core("bounded:1", shard=1, shards=2, slots=2, steps=5)
    for clock in range(3):
        shard.commit(push(0, clock, shard=1))
    assert shard.work.answer(0, 3) == Work(kind=WorkKind.FINISHED, clock=3)
    table = (Generation(start=0, base=0, slots=(0, 1)), Generation(start=2, base=4, slots=(0,)))
    shard.commit(Chosen(shard=1, term=0, number=1, kept=0, generations=table, step=0))
    assert shard.work.answer(0, 2) is Hold.OTHERS, "update 0 of slot 1"


def test_every_table_of_slots_is_kept_before_it_counts() -> None:
    """Two changes, one right after the other: the clock between them belongs to the first."""
    shard = core("sync", shards=2, slots=2)
    shard.commit(SlotsChanged(slots=(0, 1, 2)))
    shard.commit(SlotsChanged(slots=(0, 1)))
    assert [generation.start for generation in shard.table.generations] == [0, 1, 2]
    for slot in (0, 1):
        shard.commit(push(slot, 0, parts=2))
    assert shard.work.answer(0, 1) is Hold.SHARDS
    shard.commit(ChosenKept(shard=1, term=0, number=1, generations=(), top_clock=0, top_batch=0))
    assert shard.work.answer(0, 1) == train(1, 1, part=0, parts=3)
    for slot in (0, 1, 2):
        shard.commit(push(slot, 1, parts=3))
    assert shard.work.answer(0, 2) is Hold.SHARDS


def test_the_end_of_a_run_is_reported_at_every_consistency() -> None:
    finished = Work(kind=WorkKind.FINISHED, clock=1)
    bounded = core("bounded:1", slots=2, steps=3)
    bounded.commit(push(0, 0))
    bounded.commit(push(1, 0))
    assert bounded.work.answer(1, 1) == finished
    assert bounded.work.answer(0, 1) == train(1, 2)
    sync = core("sync", slots=1, steps=1)
    sync.commit(push(0, 0))
    assert sync.work.answer(0, 1) == finished
    assert core("async", steps=0).work.answer(0, 0) == Work(kind=WorkKind.FINISHED, clock=0)


def test_nobody_is_let_go_before_every_shard_keeps_the_last_choice() -> None:
    shard = core("softsync:1", shards=2, slots=2, steps=2)
    for slot in (0, 1):
        shard.commit(Assigned(slot=slot, clock=0))
    shard.commit(push(0, 0))
    assert shard.work.answer(0, 1) is Hold.SHARDS, "its group is not complete"
    shard.commit(push(1, 0))
    assert shard.work.answer(0, 1) is Hold.SHARDS, "the other shard might not know of it"
    shard.commit(ChosenKept(shard=1, term=0, number=1, generations=(), top_clock=0, top_batch=0))
    assert shard.work.answer(0, 1) == Work(kind=WorkKind.FINISHED, clock=1)


def test_the_worker_of_a_removed_slot_may_be_the_last_one_to_leave() -> None:
    """Two joins, one leave and a slow link: the choice of its last update was on its way when the run ended."""
    shard = core("softsync:1", shards=2, slots=2, steps=2)
    shard.commit(Assigned(slot=1, clock=0))
    shard.commit(SlotsChanged(slots=(0,)))
    shard.commit(ChosenKept(shard=1, term=0, number=1, generations=(), top_clock=0, top_batch=0))
    assert shard.work.answer(1, 1) is Hold.OWN
    shard.commit(Assigned(slot=0, clock=0))
    shard.commit(push(0, 0))
    shard.commit(push(1, 0))
    assert shard.work.answer(1, 1) is Hold.SHARDS, "the other shard might not know of its last update"
    shard.commit(ChosenKept(shard=1, term=0, number=3, generations=(), top_clock=0, top_batch=0))
    assert shard.work.answer(1, 1) == Work(kind=WorkKind.RETIRED, clock=1)


def test_an_update_that_was_given_out_and_lost_is_not_said_to_be_here() -> None:
    shard = core("async")
    for clock in (0, 1):
        shard.commit(Assigned(slot=0, clock=clock))
    shard.commit(push(0, 0))
    shard.commit(UpdatesLost(slot=0, until=3))
    shard = ShardCore.from_state(shard.config, json.loads(json.dumps(shard.state())))
    assert shard.outcome_of(0, 0) is Outcome.DUPLICATE
    assert shard.outcome_of(0, 1) is Outcome.LATE, (
        "its worker said that it was settled: it went with a server"
    )
    assert shard.work.answer(0, 1) == train(1, 1), "another shard may lack it"


def test_what_waits_when_everyone_has_left_is_the_last_step() -> None:
    shard = core("softsync:1", slots=2)
    shard.commit(Assigned(slot=0, clock=0))
    assert steps_of(shard.commit(push(0, 0))) == []
    assert steps_of(shard.commit(Closing())) == [[(0, 0)]]
    assert steps_of(shard.commit(push(1, 0))) == [], "somebody came all the same: groups are as before"


def test_a_restored_shard_closes_no_step_before_it_knows_the_slots() -> None:
    """The lead was restored too, and greets without a table: what a slot that was added lost must be said later."""
    shard = core("sync:1", shard=1, shards=2, slots=1)
    shard.restore(term=5)
    table = (Generation(start=0, base=0, slots=(0,)), Generation(start=2, base=2, slots=(0, 1)))
    greeting = Chosen(shard=1, term=3, number=7, kept=7, generations=(), step=4)
    assert rows_of(shard.commit(greeting)) == []
    assert shard.awaiting, "who leads does not know the slots either"
    assert rows_of(shard.commit(chosen(8)._replace(generations=table))) == [], "of an older term"
    lost = [
        (row.slot, row.first)
        for row in rows_of(shard.commit(greeting._replace(generations=table)))
        if isinstance(row, LostRow)
    ]
    assert lost == [(0, 0), (0, 1), (0, 2), (1, 2), (0, 3), (1, 3)]


def test_a_slot_that_begins_before_the_steps_that_are_closed_is_not_waited_for() -> None:
    """A shard and its lead went back to the start, and the lead added the slot before it heard how far others are."""
    shard = core("sync", shard=1, shards=2, slots=1)
    shard.commit(UpdatesLost(slot=0, until=3))
    assert shard.steps.step == 3
    table = (Generation(start=0, base=0, slots=(0,)), Generation(start=1, base=1, slots=(0, 1)))
    change = shard.commit(chosen(1)._replace(updates=None, generations=table))
    assert [(row.slot, row.first, row.until) for row in rows_of(change) if isinstance(row, LostRow)] == [
        (1, 1, 3)
    ]
    assert shard.outcome_of(1, 1) is Outcome.LATE
    assert shard.work.answer(1, 2) == Work(kind=WorkKind.UNKNOWN), "it goes on where the lead lets it train"
    shard.commit(push(0, 3, shard=1, parts=2))
    assert steps_of(shard.commit(push(1, 3, shard=1, parts=2))) == [[(0, 3), (1, 3)]]


def test_an_update_beyond_the_end_of_its_slot_counts_for_nothing() -> None:
    shard = core("bounded:1", slots=2)
    shard.commit(SlotsChanged(slots=(0,)))
    shard.commit(UpdatesLost(slot=1, until=4))
    change = shard.commit(push(1, 4))
    assert (change.outcome, steps_of(change)) == (Outcome.LATE, [])
    assert [type(row) for row in rows_of(change)] == [LateRow]
    assert shard.work.answer(1, 5) == Work(kind=WorkKind.RETIRED, clock=5)
    assert shard.outcome_of(1, 3) is Outcome.LATE, "it was lost"


def test_an_update_whose_batch_the_slots_of_this_run_have_taken_counts_for_nothing() -> None:
    """It was begun before a restore; this time a slot came earlier, and the batches end before its clock."""
    shard = core("bounded:1", slots=1, steps=3)
    shard.commit(SlotsChanged(slots=(0, 1)))
    shard.commit(push(0, 0))
    shard.commit(UpdatesLost(slot=0, until=2))
    change = shard.commit(push(0, 2))
    assert (change.outcome, steps_of(change)) == (Outcome.LATE, [])
    assert [type(row) for row in rows_of(change)] == [LateRow]


@pytest.mark.parametrize("consistency", ["sync", "bounded:1", "async"])
def test_an_update_from_before_its_slot_began_is_not_said_to_be_here(consistency: str) -> None:
    """It began earlier in a life that is lost: its worker sends what it computed then."""
    shard = core(consistency, slots=2)
    for clock in range(3):
        for slot in range(2):
            shard.commit(push(slot, clock, parts=2 if consistency == "sync" else 1))
    shard.commit(SlotsChanged(slots=(0, 1, 2)))
    shard = ShardCore.from_state(shard.config, json.loads(json.dumps(shard.state())))
    first = shard.next_clock(2)
    assert first == (0 if consistency == "async" else 4)
    assert [shard.outcome_of(2, clock) for clock in range(first)] == [Outcome.LATE] * first
    assert shard.outcome_of(0, 2) is Outcome.DUPLICATE
    assert shard.outcome_of(2, first) is None


@pytest.mark.parametrize("consistency", ["sync", "bounded:1"])
def test_what_is_lost_beyond_the_end_of_a_slot_is_reported_too(consistency: str) -> None:
    shard = core(consistency, slots=2)
    shard.commit(SlotsChanged(slots=(0,)))
    rows = rows_of(shard.commit(UpdatesLost(slot=1, until=4)))
    for clock in range(2):
        rows += rows_of(shard.commit(push(0, clock, parts=2)))
    lost = [(row.first, row.until) for row in rows if isinstance(row, LostRow)]
    assert sorted(clock for first, until in lost for clock in range(first, until)) == [0, 1, 2, 3]


def test_a_read_for_what_is_long_forgotten_is_sent_ahead_without_waiting() -> None:
    shard = core("bounded:1")
    for slot, clocks in ((1, 3), (2, 3), (0, 5)):
        for clock in range(clocks):
            shard.commit(push(slot, clock))
    assert shard.work.answer(0, 5) is Hold.OTHERS
    assert shard.work.answer(0, 3) == train(3, 9), "one that it remembers"
    assert shard.work.answer(0, 0) == Work(kind=WorkKind.AHEAD, clock=5)
    shard.commit(push(1, 3))
    shard.commit(push(2, 3))
    assert shard.work.answer(0, 0) == train(5, 15)


def test_who_has_left_owes_what_the_slots_say_up_to_where_the_others_are() -> None:
    shard = core("bounded:3", slots=2, steps=7)
    for clock in range(3):
        shard.commit(push(0, clock))
    assert shard.work.outstanding_until(Update(slot=1, clock=1)) == 3
    shard.commit(push(0, 3))
    assert shard.work.outstanding_until(Update(slot=1, clock=1)) == 3, "there is no batch 7"
    assert shard.work.outstanding_until(Update(slot=1, clock=5)) == 5
    assert core("async").work.outstanding_until(Update(slot=1, clock=2)) == 2


def test_staleness_counts_the_steps_of_this_history_that_were_not_read() -> None:
    shard = core("async")
    for clock in range(3):
        shard.commit(push(0, clock, read=clock))
    shard.restore(term=7)
    taus = []
    for clock, read, term in ((3, 1, 0), (4, 9, 0), (5, 5, 7)):
        change = shard.commit(push(0, clock, read=read)._replace(read_term=term))
        [row] = (row for row in rows_of(change) if isinstance(row, StepRow))
        taus.append(row.updates[0].staleness)
    assert taus == [3 - 1, 4 - 3, 5 - 5], "of version 9 in the lost life, only 3 steps are in this one"
    again = ShardCore.from_state(shard.config, json.loads(json.dumps(shard.state())))
    assert again.state() == shard.state()


def test_a_restored_lead_waits_for_the_others_and_believes_them() -> None:
    lead = core("bounded:1", shards=3, slots=2)
    lead.restore(term=5)
    assert (lead.term, lead.awaiting) == (5, {1, 2})
    assert lead.greetings_to(1, 0)[0].generations == ()
    table = (Generation(start=0, base=0, slots=(0, 1)), Generation(start=4, base=8, slots=(0, 1, 2)))
    for shard in (1, 2):
        lead.commit(ChosenKept(shard=shard, term=5, number=0, generations=table, top_clock=9, top_batch=20))
        assert (not lead.decisions.unkept) == (shard == 1), (
            "the table that one of them knew is for all to keep"
        )
    assert not lead.awaiting
    assert tuple(lead.table.generations) == table
    lead.commit(ChosenKept(shard=1, term=5, number=1, generations=table, top_clock=9, top_batch=20))
    assert lead.decisions.unkept
    lead.commit(ChosenKept(shard=2, term=5, number=1, generations=table, top_clock=9, top_batch=20))
    assert not lead.decisions.unkept
    lead.commit(SlotsChanged(slots=(0, 1)))
    assert lead.table.generations[-1].start == 10


def test_a_removed_slot_does_not_come_back() -> None:
    shard = core("sync")
    shard.commit(SlotsChanged(slots=(0, 1)))
    with pytest.raises(ValueError, match=r"slots \[2\] were removed"):
        shard.commit(SlotsChanged(slots=(0, 1, 2)))


def test_a_config_is_checked() -> None:
    policy = parse_consistency("sync")
    for shard, steps, slots in ((2, 1, (0,)), (0, -1, (0,)), (0, 1, ()), (0, 1, (0, 0)), (0, 1, (-1,))):
        with pytest.raises(UserError):
            ShardConfig(shard=shard, num_shards=2, policy=policy, steps=steps, slots=slots)


CONSISTENCIES = ["sync", "sync:1", "bounded:1", "async", "softsync:1", "aware:softsync:2"]


@pytest.mark.parametrize("consistency", CONSISTENCIES)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_copy_made_at_any_moment_goes_the_same_way(consistency: str, data: st.DataObject) -> None:
    original = core(consistency, steps=30)
    copy: ShardCore | None = None
    for _ in range(data.draw(st.integers(1, 25))):
        slot = data.draw(st.integers(0, 2))
        record = original.table.records[slot]
        entry: Entry = data.draw(
            st.sampled_from(
                [
                    push(
                        slot,
                        record.next_clock,
                        read=original.version,
                        parts=3 if consistency[:4] == "sync" else 1,
                    ),
                    push(slot, record.next_clock, skip=True),
                    UpdatesLost(slot=slot, until=record.next_clock + 2),
                    Assigned(slot=slot, clock=record.next_clock),
                    SlotsChanged(slots=tuple(s for s in original.table.active if s != slot) or (slot,)),
                ]
            )
        )
        if copy is None and data.draw(st.booleans()):
            copy = ShardCore.from_state(original.config, json.loads(json.dumps(original.state())))
        change = original.commit(entry)
        if copy is not None:
            assert copy.commit(entry) == change
            assert copy.state() == original.state()
