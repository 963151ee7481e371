"""An update of a lockstep run counts at every shard or at none: what a shard holds back, and who decides about it."""

from __future__ import annotations

import pytest

from manyhands.strategies.common.consistency import parse_consistency
from manyhands.strategies.ps.actions import Ack, Action, Apply, Drop, Keep, SendMessage
from manyhands.strategies.ps.client_core import ClientAction, ClientCore, Compute, Flush
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.ps_messages import (
    Fenced,
    Forward,
    Hello,
    Message,
    NotPrimary,
    Parameters,
    Push,
    Read,
    ShardView,
    SlotView,
    View,
    Welcome,
    Work,
    WorkKind,
)
from manyhands.strategies.ps.shard_replica import ShardReplica
from manyhands.strategies.ps.unconfirmed import Unconfirmed

FIRST, SECOND, BACKUP = 1, 2, 3  # servers
OLD, NEW = 10, 11  # members of slot 0, one after the other


def push(clock: int, *, member: int = OLD, shard: int = 0, skip: bool = False) -> Push:
    return Push(
        shard=shard,
        slot=0,
        member=member,
        clock=clock,
        read_version=clock,
        batch=clock,
        part=0,
        parts=1,
        weight=1.0,
        skip=skip,
    )


def read(clock: int, *, member: int = OLD, shard: int = 0) -> Read:
    return Read(shard=shard, slot=0, member=member, clock=clock)


def view(epoch: int, member: int, *, backup: int = 0, first: int = FIRST, second: int = SECOND) -> View:
    return View(
        epoch=epoch,
        shards=(
            ShardView(shard=0, epoch=1, primary=first, backup=backup),
            ShardView(shard=1, epoch=epoch if second != SECOND else 1, primary=second),
        ),
        slots=(SlotView(slot=0, member=member),),
    )


def shard_of(consistency: str = "sync", *, shards: int = 2, backup: int = 0) -> ShardReplica:
    """The lead shard of a run with one worker."""
    policy = parse_consistency(consistency)
    config = ShardConfig(shard=0, num_shards=shards, policy=policy, steps=9, slots=(0,))
    replica = ShardReplica(config, FIRST)
    replica.view(view(1, OLD, backup=backup))
    return replica


def said(actions: list[Action] | list[ClientAction]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, SendMessage)]


def kinds(actions: list[Action]) -> list[type]:
    return [type(action.message) if isinstance(action, SendMessage) else type(action) for action in actions]


# ── what is held ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_push_waits_for_a_read_of_a_later_clock() -> None:
    held = Unconfirmed(needed=True)
    assert held.awaits(push(3), -1)
    assert held.awaits(push(3), 3), "that is the one it was computed from"
    assert not held.awaits(push(3), 4), "sent again, behind what confirmed it"
    assert not Unconfirmed(needed=False).awaits(push(3), -1)


def test_one_push_of_a_slot_is_held_and_what_it_replaces_is_named() -> None:
    held = Unconfirmed(needed=True)
    assert held.arrived(0) == 0
    assert held.hold(push(3)) is None
    assert held.arrived(0) == 4
    assert held.hold(push(3, member=NEW)) is None, "its gradient takes the place of the other's"
    assert held.hold(push(3, member=NEW, skip=True)) == push(3, member=NEW), "this one brings none"
    assert held.hold(push(4, member=NEW)) == push(3, member=NEW, skip=True)
    assert held.resolve(0) == push(4, member=NEW)
    assert held.resolve(0) is None


def test_who_lost_its_slot_is_heard_until_its_successor_has_spoken() -> None:
    held = Unconfirmed(needed=True)
    held.meet(0, OLD)
    assert held.hears(push(3))
    held.meet(0, NEW)
    assert not held.hears(push(3))
    held.meet(0, OLD)  # said before, heard later
    assert not held.hears(push(3))
    assert held.hears(push(3, member=NEW))


# ── a shard ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_of_a_push_is_logged_applied_or_reported_before_the_read_behind_it() -> None:
    shard = shard_of()
    shard.handle(read(0), OLD)
    assert kinds(shard.handle(push(0), OLD)) == [Keep]
    assert (shard.sequence, shard.core.version) == (0, 0)
    actions = shard.handle(read(1), OLD)
    assert [kind for kind in kinds(actions) if kind in (Apply, Ack, Parameters)] == [Apply, Ack, Parameters]
    assert shard.core.version == 1


@pytest.mark.parametrize(
    ("consistency", "shards"), [("sync", 1), ("async", 2), ("bounded:2", 2), ("sync:1", 2)]
)
def test_one_shard_and_other_policies_confirm_nothing(consistency: str, shards: int) -> None:
    shard = shard_of(consistency, shards=shards)
    shard.handle(read(0), OLD)
    assert Ack in kinds(shard.handle(push(0), OLD))


def test_a_push_sent_again_counts_at_once_where_the_read_waits_already() -> None:
    shard = shard_of()
    shard.handle(read(1), OLD)
    assert {Keep, Apply, Parameters} < set(kinds(shard.handle(push(0), OLD)))


def test_a_backup_hears_of_a_push_when_it_counts() -> None:
    shard = shard_of(backup=BACKUP)
    assert kinds(shard.handle(push(0), OLD)) == [Keep]
    [forward] = said(shard.handle(read(1), OLD))
    assert isinstance(forward, Forward)
    assert forward.entry == push(0)


def test_a_successor_is_told_what_has_arrived_and_its_read_confirms_it() -> None:
    shard = shard_of()
    shard.handle(push(0), OLD)
    shard.view(view(2, NEW))
    [welcome] = said(shard.handle(Hello(shard=0, slot=0, member=NEW, settled=0), NEW))
    assert welcome == Welcome(shard=0, slot=0, next_clock=0, version=0, arrived=1)
    actions = shard.handle(read(1, member=NEW), NEW)
    assert {Apply, Parameters} < set(kinds(actions))
    assert Drop not in kinds(actions)


def test_a_successor_that_computes_the_update_again_has_the_old_one_dropped() -> None:
    shard = shard_of()
    shard.handle(push(0), OLD)
    shard.view(view(2, NEW))
    shard.handle(Hello(shard=0, slot=0, member=NEW, settled=0), NEW)
    actions = shard.handle(read(0, member=NEW), NEW)
    assert kinds(actions) == [Drop, Parameters]
    assert shard.core.version == 0


def test_an_unconfirmed_skip_has_no_gradient_to_keep_or_drop() -> None:
    shard = shard_of()
    assert shard.handle(push(0, skip=True), OLD) == []
    assert kinds(shard.handle(read(0), OLD)) == [Parameters]


def test_what_a_fenced_worker_pushed_late_is_held_unless_its_successor_has_spoken() -> None:
    """Another shard, which did not know yet, may have heard the Read behind it."""
    shard = shard_of()
    shard.view(view(2, NEW))
    assert shard.keeps(push(0))
    assert kinds(shard.handle(push(0), OLD)) == [Keep, Fenced]
    assert kinds(shard.handle(read(1), OLD)) == [Fenced], (
        "it does not confirm what it has to leave to another"
    )
    [welcome] = said(shard.handle(Hello(shard=0, slot=0, member=NEW, settled=0), NEW))
    assert isinstance(welcome, Welcome)
    assert welcome.arrived == 1
    later = push(0)._replace(clock=1)
    assert not shard.keeps(later)
    assert kinds(shard.handle(later, OLD)) == [Fenced]


def test_what_a_slot_reports_as_settled_elsewhere_is_not_held_any_more() -> None:
    shard = shard_of()
    shard.handle(push(0), OLD)
    actions = shard.handle(Hello(shard=0, slot=0, member=OLD, settled=2), OLD)
    assert Drop in kinds(actions)
    assert Apply not in kinds(actions)
    assert Welcome(shard=0, slot=0, next_clock=2, version=0) in said(actions)


# ── a worker ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def worker(*welcomes: tuple[int, int]) -> tuple[ClientCore, list[ClientAction]]:
    """One that was welcomed by each shard with (next_clock, arrived), and what it did then."""
    core = ClientCore(slot=0, member=NEW, num_shards=2, confirms=True)
    core.view(view(1, NEW))
    actions: list[ClientAction] = []
    for shard, (next_clock, arrived) in enumerate(welcomes):
        welcome = Welcome(shard=shard, slot=0, next_clock=next_clock, version=0, arrived=arrived)
        actions = core.handle(welcome, (FIRST, SECOND)[shard])
    return core, actions


def answer(core: ClientCore, shard: int, clock: int) -> list[ClientAction]:
    work = Work(kind=WorkKind.TRAIN, clock=clock, batch=clock) if shard == 0 else Work(kind=WorkKind.UNKNOWN)
    message = Parameters(shard=shard, slot=0, clock=clock, version=clock, work=work)
    return core.handle(message, (FIRST, SECOND)[shard])


def clocks(actions: list[ClientAction]) -> list[tuple[type, int, int]]:
    messages = [message for message in said(actions) if isinstance(message, Push | Read)]
    return [(type(message), message.shard, message.clock) for message in messages]


@pytest.mark.parametrize(
    ("welcomes", "begins"),
    [
        (((4, 0), (4, 0)), 4),  # nothing is in question
        (((5, 0), (4, 5)), 5),  # it counts at one shard, so the other has it
        (((4, 5), (4, 5)), 5),  # it counts nowhere yet, and all have it
        (((4, 5), (4, 0)), 4),  # one lacks it, so it counts nowhere
        (((5, 0), (4, 0)), 4),  # one lost it with its server
    ],
)
def test_a_successor_begins_where_every_shard_has_what_lies_before(
    welcomes: tuple[tuple[int, int], ...], begins: int
) -> None:
    _, actions = worker(*welcomes)
    assert clocks(actions) == [(Read, 0, begins), (Read, 1, begins)]


def test_no_read_leaves_before_all_pushes_have() -> None:
    core, _ = worker((4, 0), (4, 0))
    answer(core, 0, 4)
    assert any(isinstance(action, Compute) for action in answer(core, 1, 4))
    actions = core.computed(weight=1.0)
    assert clocks(actions) == [(Push, 0, 4), (Push, 1, 4)]
    assert actions[-1] == Flush()
    assert clocks(core.flushed()) == [(Read, 0, 5), (Read, 1, 5)]
    assert core.flushed() == [], "once is enough"


def test_reads_wait_for_a_shard_that_nobody_serves_when_its_push_is_due() -> None:
    core, _ = worker((4, 0), (4, 0))
    answer(core, 0, 4)
    answer(core, 1, 4)
    core.handle(NotPrimary(shard=1, epoch=1), SECOND)
    actions = core.computed(weight=1.0)
    assert clocks(actions) == [(Push, 0, 4)]
    assert Flush() not in actions
    core.again(1)
    actions = core.handle(Welcome(shard=1, slot=0, next_clock=4, version=4), SECOND)
    assert clocks(actions) == [(Push, 1, 4)]
    assert actions[-1] == Flush()
    assert clocks(core.flushed()) == [(Read, 0, 5), (Read, 1, 5)]


def test_a_push_sent_again_to_a_new_primary_has_its_read_behind_it() -> None:
    core, _ = worker((4, 0), (4, 0))
    answer(core, 0, 4)
    answer(core, 1, 4)
    core.computed(weight=1.0)
    core.flushed()
    core.view(view(2, NEW, second=BACKUP))
    actions = core.handle(Welcome(shard=1, slot=0, next_clock=4, version=4), BACKUP)
    assert clocks(actions) == [(Push, 1, 4), (Read, 1, 5)]


def test_who_is_fenced_between_its_pushes_and_reads_sends_none() -> None:
    core, _ = worker((4, 0), (4, 0))
    answer(core, 0, 4)
    answer(core, 1, 4)
    core.computed(weight=1.0)
    core.view(view(2, NEW + 1))
    assert core.flushed() == []


def test_what_had_arrived_and_went_with_its_server_is_computed_again() -> None:
    """The successor counted on a push that its shard held; a new primary has never heard of it."""
    core, actions = worker((4, 5), (4, 5))
    assert clocks(actions) == [(Read, 0, 5), (Read, 1, 5)]
    answer(core, 0, 5)
    [hello] = said(core.view(view(2, NEW, second=BACKUP)))
    assert hello == Hello(shard=1, slot=0, member=NEW, settled=4), "it was never settled there"
    actions = core.handle(Welcome(shard=1, slot=0, next_clock=4, version=4), BACKUP)
    assert clocks(actions) == [(Read, 0, 4), (Read, 1, 4)]
