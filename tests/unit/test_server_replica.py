"""A server's part in a shard: replication, fencing, held reads, takeover, restore; message by message."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from manyhands.strategies.common.consistency import parse_consistency
from manyhands.strategies.ps.actions import (
    Ack,
    Action,
    Apply,
    Discard,
    Drop,
    Keep,
    Load,
    Log,
    Outcome,
    SendMessage,
)
from manyhands.strategies.ps.log_rows import LateRow, LostRow, RestoredRow
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.ps_messages import (
    LAUNCHER,
    Chosen,
    ChosenKept,
    Concluded,
    Fenced,
    Forward,
    Forwarded,
    Hello,
    Install,
    Installed,
    Message,
    NotPrimary,
    Parameters,
    Push,
    Read,
    ShardView,
    SlotView,
    Update,
    View,
    Welcome,
    WorkKind,
    Yield,
)
from manyhands.strategies.ps.shard_replica import ReplicaRole, ServerCore, ShardReplica

FIRST, SECOND, THIRD = 1, 2, 3  # servers
WORKER = 10  # the member in slot 0; slot 1 has the next number


def config(consistency: str = "async", *, shards: int = 1, slots: int = 2, steps: int = 100) -> ShardConfig:
    policy = parse_consistency(consistency)
    return ShardConfig(shard=0, num_shards=shards, policy=policy, steps=steps, slots=tuple(range(slots)))


def view(
    epoch: int,
    *places: tuple[int, int],
    members: tuple[int, ...] = (WORKER, WORKER + 1),
    epochs: tuple[int, ...] = (),
    gone: tuple[Update, ...] = (),
) -> View:
    """The view in which shard j is served by `places[j]`, primary and backup."""
    numbers = epochs or (epoch,) * len(places)
    return View(
        epoch=epoch,
        shards=tuple(
            ShardView(shard=shard, epoch=number, primary=primary, backup=backup)
            for shard, (number, (primary, backup)) in enumerate(zip(numbers, places, strict=True))
        ),
        slots=tuple(SlotView(slot=slot, member=member) for slot, member in enumerate(members)),
        gone=gone,
    )


def push(slot: int, clock: int, *, shard: int = 0, member: int = 0, parts: int = 1) -> Push:
    return Push(
        shard=shard,
        slot=slot,
        member=member or WORKER + slot,
        clock=clock,
        read_version=0,
        batch=0,
        part=0,
        parts=parts,
        weight=1 / parts,
    )


def read(slot: int, clock: int, *, shard: int = 0, member: int = 0) -> Read:
    return Read(shard=shard, slot=slot, member=member or WORKER + slot, clock=clock)


def hello(slot: int, settled: int = 0, *, shard: int = 0, member: int = 0) -> Hello:
    return Hello(shard=shard, slot=slot, member=member or WORKER + slot, settled=settled)


def sent(actions: list[Action]) -> list[tuple[int, Message]]:
    return [(action.to, action.message) for action in actions if isinstance(action, SendMessage)]


def said(actions: list[Action]) -> list[Message]:
    return [message for _, message in sent(actions)]


def acks(actions: list[Action]) -> list[Ack]:
    return [action for action in actions if isinstance(action, Ack)]


def primary(consistency: str = "async", *, backup: int = 0, steps: int = 100) -> ShardReplica:
    replica = ShardReplica(config(consistency, steps=steps), FIRST)
    replica.view(view(1, (FIRST, backup)))
    return replica


def pair(consistency: str = "async") -> tuple[ShardReplica, ShardReplica]:
    """A primary and its installed backup."""
    first = ShardReplica(config(consistency), FIRST)
    second = ShardReplica(config(consistency), SECOND)
    [(to, install)] = sent(first.view(view(1, (FIRST, SECOND))))
    assert to == SECOND
    actions = second.handle(install, FIRST)
    assert actions[0] == Load(shard=0)
    assert (LAUNCHER, Installed(shard=0, epoch=1, member=SECOND)) in sent(actions)
    for to, message in sent(actions):
        if to == FIRST:
            assert first.handle(message, SECOND) == []
    return first, second


def test_without_backup_a_push_is_applied_and_acknowledged_at_once() -> None:
    shard = primary()
    actions = shard.handle(push(0, 0), WORKER)
    assert actions[0] == Keep(shard=0, slot=0, clock=0, copy=False)
    assert [type(action) for action in actions[1:]] == [Apply, Ack]
    assert acks(actions) == [Ack(shard=0, slot=0, clock=0, outcome=Outcome.APPLIED)]


def test_a_push_sent_again_is_acknowledged_and_not_applied() -> None:
    shard = primary()
    shard.handle(push(0, 0), WORKER)
    actions = shard.handle(push(0, 0), WORKER)
    assert actions == [Ack(shard=0, slot=0, clock=0, outcome=Outcome.DUPLICATE)]
    assert shard.core.version == 1


def test_nothing_is_reported_before_the_backup_has_it() -> None:
    first, second = pair()
    actions = first.handle(push(0, 0), WORKER)
    assert not any(isinstance(action, Apply) for action in actions)
    [(to, forward)] = sent(actions)
    assert (to, forward) == (SECOND, Forward(shard=0, epoch=1, sequence=1, entry=push(0, 0)))
    assert first.handle(push(0, 0), WORKER) == [], "in flight: neither twice in the log nor acknowledged yet"
    assert first.handle(read(0, 1), WORKER) == []

    actions = second.handle(forward, FIRST)
    assert [type(action) for action in actions] == [Keep, Apply, SendMessage]
    [(to, forwarded)] = sent(actions)
    assert (to, forwarded) == (FIRST, Forwarded(shard=0, epoch=1, sequence=1))
    assert sent(second.handle(forward, FIRST)) == [(FIRST, forwarded)], "again: answered, not applied"

    actions = first.handle(forwarded, SECOND)
    assert acks(actions) == [Ack(shard=0, slot=0, clock=0, outcome=Outcome.APPLIED)]
    assert isinstance(said(actions)[0], Forward), "the batch of the next read is given out by the log, too"
    assert first.core.state() == second.core.state()


def test_the_backup_takes_over_with_everything_that_was_acknowledged() -> None:
    first, second = pair()
    [(_, forward)] = sent(first.handle(push(0, 0), WORKER))
    second.handle(forward, FIRST)
    assert said(second.handle(push(1, 0), WORKER + 1)) == [NotPrimary(shard=0, epoch=1)]
    second.view(view(2, (SECOND, 0)))
    assert second.role is ReplicaRole.PRIMARY
    assert said(second.handle(hello(0), WORKER)) == [Welcome(shard=0, slot=0, next_clock=1, version=1)]
    assert second.handle(push(0, 0), WORKER) == [Ack(shard=0, slot=0, clock=0, outcome=Outcome.DUPLICATE)]
    [answer] = said(second.handle(read(0, 1), WORKER))
    assert isinstance(answer, Parameters)
    assert (answer.version, answer.work.kind) == (1, WorkKind.TRAIN)


def test_a_dead_backup_is_not_waited_for() -> None:
    first, _ = pair()
    first.handle(push(0, 0), WORKER)
    actions = first.view(view(2, (FIRST, 0)))
    assert acks(actions) == [Ack(shard=0, slot=0, clock=0, outcome=Outcome.APPLIED)]


def test_what_was_in_flight_when_the_backup_died_is_committed_in_its_order() -> None:
    """The first of them lets a read be answered, which needs an entry of its own: behind what is in flight."""
    first, _ = pair()
    first.handle(push(0, 0), WORKER)
    first.handle(push(1, 0), WORKER + 1)
    first.handle(read(0, 1), WORKER)
    [(to, answer)] = sent(first.view(view(2, (FIRST, 0))))
    assert isinstance(answer, Parameters)
    assert (to, answer.version) == (WORKER, 2), "both updates were numbered before the batch was given out"


def test_a_new_backup_is_given_a_copy_and_waited_for() -> None:
    shard = primary()
    shard.handle(push(0, 0), WORKER)
    [(to, install)] = sent(shard.view(view(2, (FIRST, THIRD))))
    assert to == THIRD
    assert isinstance(install, Install)
    assert install.sequence == 1
    assert [type(message) for message in said(shard.handle(push(1, 0), WORKER + 1))] == [Forward]
    assert shard.handle(Forwarded(shard=0, epoch=1, sequence=9), THIRD) == [], "of another epoch"
    third = ShardReplica(config(), THIRD)
    third.handle(install, FIRST)
    assert json.loads(json.dumps(third.core.state())) == json.loads(install.state)


def test_of_two_that_claim_a_shard_the_older_epoch_yields() -> None:
    first, second = pair()
    [(_, forward)] = sent(first.handle(push(0, 0), WORKER))
    second.view(view(2, (SECOND, 0)))
    assert said(second.handle(forward, FIRST)) == [Yield(shard=0, epoch=2)]
    assert first.handle(Yield(shard=0, epoch=2), SECOND) == [Discard(shard=0)]
    assert said(first.handle(read(0, 0), WORKER)) == [NotPrimary(shard=0, epoch=1)]
    assert second.handle(Yield(shard=0, epoch=2), FIRST) == [], "it is of this epoch itself"


def test_a_backup_does_not_refuse_its_own_primary_of_a_newer_view() -> None:
    first, second = pair()
    [(_, forward)] = sent(first.handle(push(0, 0), WORKER))
    second.view(view(3, (FIRST, SECOND)))
    assert second.handle(forward, FIRST) == []


def test_a_successor_fences_the_member_before_it() -> None:
    shard = primary()
    shard.handle(read(0, 1), WORKER)
    shard.view(view(2, (FIRST, 0), members=(20, WORKER + 1), epochs=(1,)))
    for message in (push(0, 0), read(0, 0), hello(0)):
        assert said(shard.handle(message, WORKER)) == [Fenced(shard=0, slot=0, holder=20)]
    assert acks(shard.handle(push(0, 0, member=20), 20))[0] == Ack(
        shard=0, slot=0, clock=0, outcome=Outcome.APPLIED
    )
    assert shard.handle(read(0, 1, member=20), 20), "the old member's read is gone"
    assert acks(shard.handle(push(0, 1, member=30), 30))[0] == Ack(
        shard=0, slot=0, clock=1, outcome=Outcome.APPLIED
    )
    assert said(shard.handle(read(0, 2, member=20), 20)) == [Fenced(shard=0, slot=0, holder=30)]


def test_sync_reads_are_held_until_the_step_is_taken() -> None:
    shard = primary("sync")
    assert [m.clock for m in said(shard.handle(read(0, 0), WORKER)) if isinstance(m, Parameters)] == [0]
    shard.handle(push(0, 0, parts=2), WORKER)
    assert shard.handle(read(0, 1), WORKER) == []
    actions = shard.handle(push(1, 0, parts=2), WORKER + 1)
    order = [type(action).__name__ for action in actions]
    assert order.index("Apply") < order.index("SendMessage"), "parameters are sent as they are after the step"
    [answer] = [message for message in said(actions) if isinstance(message, Parameters)]
    assert (answer.slot, answer.clock, answer.version) == (0, 1, 1)


def test_bounded_reads_are_held_until_the_slowest_has_come() -> None:
    shard = primary("bounded:1")
    for clock in (0, 1):
        shard.handle(push(0, clock), WORKER)
    assert shard.handle(read(0, 2), WORKER) == []
    answers = [m for m in said(shard.handle(push(1, 0), WORKER + 1)) if isinstance(m, Parameters)]
    assert [(answer.slot, answer.clock) for answer in answers] == [(0, 2)]


def test_softsync_gradients_outlive_the_turn() -> None:
    shard = primary("softsync:1")
    assert shard.handle(push(0, 0), WORKER)[0] == Keep(shard=0, slot=0, clock=0, copy=True)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("consistency", ["sync", "sync:1", "bounded:2", "async", "softsync:1"])
def test_a_restored_shard_reports_what_was_lost_and_goes_on(consistency: str, saved: bool) -> None:
    snapshot = json.loads(json.dumps(primary(consistency).state())) if saved else None
    shard = ShardReplica(config(consistency), SECOND)
    shard.restore(snapshot)
    actions = shard.view(view(7, (SECOND, 0)))
    assert Log(row=RestoredRow(shard=0, term=7, sequence=0, version=0)) in actions
    assert Installed(shard=0, epoch=7, member=SECOND) in said(actions)
    rows = []
    for slot in (0, 1):
        actions = shard.handle(hello(slot, settled=3), WORKER + slot)
        rows += [a.row for a in actions if isinstance(a, Log) and isinstance(a.row, LostRow | LateRow)]
        assert said(actions)[-1] == Welcome(shard=0, slot=slot, next_clock=3, version=0)
    report = [row.until - row.first if isinstance(row, LostRow) else 1 for row in rows]
    assert sum(report) == 6
    answers = []
    for slot in (0, 1):
        answers += said(shard.handle(read(slot, 3), WORKER + slot))
    assert [(m.slot, m.work.kind) for m in answers if isinstance(m, Parameters)] == [
        (0, WorkKind.TRAIN),
        (1, WorkKind.TRAIN),
    ]


def test_a_restored_shard_does_not_wait_for_who_has_left() -> None:
    shard = ShardReplica(config("bounded:1"), FIRST)
    shard.restore(primary("bounded:1").state())
    shard.view(view(2, (FIRST, 0), gone=(Update(slot=1, clock=5),)))
    assert shard.core.next_clock(1) == 5
    shard.handle(hello(0, settled=5), WORKER)
    assert [type(message) for message in said(shard.handle(read(0, 5), WORKER))] == [Parameters]


def test_a_slot_that_was_added_and_removed_unseen_is_retired() -> None:
    shard = primary("bounded:1")
    assert said(shard.handle(hello(2), WORKER + 2)) == [], "nobody has told of it yet"
    removed = view(2, (FIRST, 0))._replace(retiring=(SlotView(slot=2, member=WORKER + 2),))
    [welcome] = (m for m in said(shard.view(removed)) if isinstance(m, Welcome))
    assert shard.core.table.active == (0, 1)
    for clock in range(welcome.next_clock):
        for slot in (0, 1):
            shard.handle(push(slot, clock), WORKER + slot)
    shard.handle(push(2, welcome.next_clock), WORKER + 2)
    [answer] = said(shard.handle(read(2, welcome.next_clock + 1), WORKER + 2))
    assert isinstance(answer, Parameters)
    assert answer.work.kind is WorkKind.RETIRED


def test_a_step_does_not_wait_for_a_slot_that_was_left_even_where_it_owes_more_than_before() -> None:
    shard = primary("sync")
    shard.view(view(2, (FIRST, 0), epochs=(1,), gone=(Update(slot=1, clock=0),)))
    for clock in range(3):
        [lost] = (
            action.row
            for action in shard.handle(push(0, clock, parts=2), WORKER)
            if isinstance(action, Log) and isinstance(action.row, LostRow)
        )
        assert (lost.slot, lost.first) == (1, clock)
    assert shard.core.version == 3


def two_shards(consistency: str, steps: int = 100) -> tuple[ServerCore, ServerCore]:
    """The lead on one server, the other shard on another; no replicas."""
    shared = config(consistency, shards=2, steps=steps)
    servers = tuple(ServerCore(shared, member) for member in (FIRST, SECOND))
    for server in servers:
        server.view(view(1, (FIRST, 0), (SECOND, 0)))
    return servers[0], servers[1]


def test_the_lead_tells_the_other_shards_its_choice_until_it_is_kept() -> None:
    lead, other = two_shards("softsync:1")
    lead.handle(push(1, 0), WORKER + 1)
    report = [m for m in sent(lead.handle(push(0, 0), WORKER)) if isinstance(m[1], Chosen)]
    [(to, chosen)] = report
    assert to == SECOND
    assert isinstance(chosen, Chosen)
    assert chosen.updates == (Update(slot=1, clock=0), Update(slot=0, clock=0))

    again = [
        m for m in said(lead.view(view(2, (FIRST, 0), (THIRD, 0), epochs=(1, 2)))) if isinstance(m, Chosen)
    ]
    assert [message.number for message in again] == [0, 1], "a greeting, then what may be lacking"
    assert again[1] == chosen

    other.handle(push(0, 0, shard=1), WORKER)
    other.handle(push(1, 0, shard=1), WORKER + 1)
    actions = other.handle(chosen, FIRST)
    assert [a.row.updates[0].slot for a in actions if isinstance(a, Apply)] == [1]
    [kept] = [m for m in said(actions) if isinstance(m, ChosenKept)]
    assert (kept.shard, kept.number) == (1, 1)
    assert lead.handle(kept, SECOND) == [], "it was replaced: what it keeps went with it"
    lead.handle(kept._replace(epoch=2), THIRD)
    assert [
        m.number
        for m in said(lead.view(view(3, (FIRST, 0), (SECOND, 0), epochs=(1, 3))))
        if isinstance(m, Chosen)
    ] == [1]


def test_a_new_primary_asks_the_lead_for_what_it_missed() -> None:
    lead, _ = two_shards("softsync:1")
    for slot in (0, 1):
        lead.handle(push(slot, 0), WORKER + slot)
    new = ServerCore(config("softsync:1", shards=2), THIRD)
    asks = [
        m
        for m in sent(new.view(view(2, (FIRST, 0), (THIRD, 0), epochs=(1, 2))))
        if isinstance(m[1], ChosenKept)
    ]
    [(to, question)] = asks
    assert to == FIRST
    answers = lead.handle(question, THIRD)
    assert [(to, type(message)) for to, message in sent(answers)] == [(THIRD, Chosen), (THIRD, Chosen)]


def test_a_restored_shard_is_told_what_it_may_take_without_a_choice() -> None:
    lead, other = two_shards("softsync:1")
    snapshot = json.dumps(other.replicas[1].state())
    for slot in (0, 1):
        for message in said(lead.handle(push(slot, 0), WORKER + slot)):
            if isinstance(message, Chosen):
                [kept] = (m for m in said(other.handle(message, FIRST)) if isinstance(m, ChosenKept))
                lead.handle(kept, SECOND)
    back = ServerCore(config("softsync:1", shards=2), THIRD)
    back.restore(1, json.loads(snapshot))
    place = view(2, (FIRST, 0), (THIRD, 0), epochs=(1, 2))
    [asks] = (m for m in said(back.view(place)) if isinstance(m, ChosenKept))
    lead.view(place)
    for message in said(lead.handle(asks, THIRD)):
        back.handle(message, FIRST)
    steps = [a for a in back.handle(push(0, 0, shard=1), WORKER) if isinstance(a, Apply)]
    assert [[part.slot for part in step.row.updates] for step in steps] == [[0]]


def deliver(actions: dict[int, list[Action]], servers: dict[int, ServerCore]) -> list[Action]:
    """Bring what servers say to each other, in order, until nothing is on its way; everything that they did."""
    done: list[Action] = [action for those in actions.values() for action in those]
    letters = [(source, to, m) for source, those in actions.items() for to, m in sent(those)]
    while letters:
        source, to, message = letters.pop(0)
        if to in servers:
            did = servers[to].handle(message, source)
            done += did
            letters += [(to, whom, answer) for whom, answer in sent(did)]
    return done


def test_a_shard_and_a_lead_restored_together_lack_no_choice_although_the_question_came_too_early() -> None:
    """The shard asks a lead that does not know yet that it leads, and which believes that the shard has the choice."""
    lead, other = two_shards("softsync:1")
    servers = {FIRST: lead, SECOND: other}
    older = json.dumps(other.replicas[1].state())
    for slot in (0, 1):
        deliver({FIRST: lead.handle(push(slot, 0), WORKER + slot)}, servers)
    newer = json.dumps(lead.replicas[0].state())
    new_lead, back = (ServerCore(config("softsync:1", shards=2), member) for member in (THIRD, THIRD + 1))
    new_lead.restore(0, json.loads(newer))
    back.restore(1, json.loads(older))
    servers = {THIRD: new_lead, THIRD + 1: back}
    place = view(2, (THIRD, 0), (THIRD + 1, 0))
    [(to, question)] = sent(back.view(place))
    assert (to, new_lead.handle(question, THIRD + 1)) == (THIRD, []), "it does not lead yet"
    deliver({THIRD: new_lead.view(place)}, servers)
    for slot in (0, 1):
        steps = [a for a in back.handle(push(slot, 0, shard=1), WORKER + slot) if isinstance(a, Apply)]
        assert [[part.slot for part in step.row.updates] for step in steps] == [[slot]]


def test_a_worker_is_let_go_when_the_last_choice_is_kept_everywhere() -> None:
    lead, other = two_shards("softsync:1", steps=2)
    for slot in (0, 1):
        lead.handle(read(slot, 0), WORKER + slot)
    lead.handle(push(0, 0), WORKER)
    assert said(lead.handle(read(0, 1), WORKER)) == [], "its group is not complete"
    [chosen] = (m for m in said(lead.handle(push(1, 0), WORKER + 1)) if isinstance(m, Chosen))
    [kept] = (m for m in said(other.handle(chosen, FIRST)) if isinstance(m, ChosenKept))
    [(to, answer)] = sent(lead.handle(kept, SECOND))
    assert isinstance(answer, Parameters)
    assert (to, answer.work.kind) == (WORKER, WorkKind.FINISHED)


def test_a_choice_is_confirmed_to_the_lead_that_serves_now() -> None:
    """The letter of a lead that died since comes last, over a slow link: its successor must hear the answer."""
    lead, other = two_shards("softsync:1")
    [old] = (m for m in said(lead.view(view(1, (FIRST, 0), (SECOND, 0)))) if isinstance(m, Chosen))
    other.view(view(2, (THIRD, 0), (SECOND, 0), epochs=(2, 1)))
    new = Chosen(
        shard=1,
        term=0,
        number=1,
        kept=0,
        generations=old.generations,
        step=0,
        updates=(Update(slot=0, clock=0),),
        epoch=2,
    )
    assert other.handle(old, FIRST) == []
    [(to, kept)] = sent(other.handle(new, THIRD))
    assert (to, type(kept)) == (THIRD, ChosenKept)


@pytest.mark.parametrize("first", ["choice", "view"])
def test_a_choice_in_flight_is_confirmed_to_the_lead_that_came_since(first: str) -> None:
    shared = config("softsync:1", shards=2)
    other = ShardReplica(replace(shared, shard=1), SECOND)
    before = View(
        epoch=1,
        shards=(
            ShardView(shard=0, epoch=1, primary=FIRST),
            ShardView(shard=1, epoch=1, primary=SECOND, backup=FIRST),
        ),
        slots=(SlotView(slot=0, member=WORKER),),
    )
    other.view(before)
    table = tuple(other.core.table.generations)
    old = Chosen(shard=1, term=0, number=1, kept=0, generations=table, step=0, updates=(), epoch=1)
    new = old._replace(epoch=2)
    after = before._replace(epoch=2, shards=(ShardView(shard=0, epoch=2, primary=THIRD), before.shards[1]))
    other.handle(old, FIRST)
    if first == "view":
        other.view(after)
    other.handle(new, THIRD)
    assert other.handle(old, FIRST) == [], "it was replaced"
    answers = sent(other.handle(Forwarded(shard=1, epoch=1, sequence=2), FIRST))
    assert [(to, type(message)) for to, message in answers] == [(THIRD, ChosenKept)] * 2


def test_while_nobody_leads_a_choice_is_confirmed_to_nobody() -> None:
    shared = config("softsync:1", shards=2)
    other = ShardReplica(replace(shared, shard=1), SECOND)
    lead, mine = (
        ShardView(shard=0, epoch=1, primary=FIRST),
        ShardView(shard=1, epoch=1, primary=SECOND, backup=THIRD),
    )
    other.view(View(epoch=1, shards=(lead, mine), slots=(SlotView(slot=0, member=WORKER),)))
    table = tuple(other.core.table.generations)
    other.handle(
        Chosen(shard=1, term=0, number=1, kept=0, generations=table, step=0, updates=(), epoch=1), FIRST
    )
    lost = lead._replace(epoch=2, primary=0)
    other.view(View(epoch=2, shards=(lost, mine), slots=(SlotView(slot=0, member=WORKER),)))
    assert sent(other.handle(Forwarded(shard=1, epoch=1, sequence=1), THIRD)) == []
    found = lead._replace(epoch=3, primary=FIRST + 9)
    actions = other.view(View(epoch=3, shards=(found, mine), slots=(SlotView(slot=0, member=WORKER),)))
    assert [(to, type(message)) for to, message in sent(actions)] == [(FIRST + 9, ChosenKept)]


def test_when_everyone_has_left_the_rest_is_applied_and_the_launcher_is_reported() -> None:
    lead, other = two_shards("softsync:1")
    for server, shard in ((lead, 0), (other, 1)):
        server.handle(push(0, 0, shard=shard), WORKER)
    left = view(
        2,
        (FIRST, 0),
        (SECOND, 0),
        epochs=(1, 1),
        gone=(Update(slot=0, clock=1), Update(slot=1, clock=2)),
    )
    actions = lead.view(left)
    assert [[part.slot for part in a.row.updates] for a in actions if isinstance(a, Apply)] == [[0]]
    assert [
        (a.row.slot, a.row.until) for a in actions if isinstance(a, Log) and isinstance(a.row, LostRow)
    ] == [(1, 2)]
    assert Concluded(shard=0, view=2) not in said(actions), "the other shard might not know"
    other_actions = other.view(left)
    for message in said(actions):
        if isinstance(message, Chosen):
            other_actions += other.handle(message, FIRST)
    assert Concluded(shard=1, view=2) in said(other_actions)
    assert said(other_actions).count(Concluded(shard=1, view=2)) == 1
    report = [
        answer
        for m in said(other_actions)
        if isinstance(m, ChosenKept)
        for answer in said(lead.handle(m, SECOND))
    ]
    assert report.count(Concluded(shard=0, view=2)) == 1


def test_a_lead_that_was_restored_serves_nobody_until_the_others_have_spoken() -> None:
    lead, other = two_shards("bounded:1")
    back = ServerCore(config("bounded:1", shards=2), THIRD)
    back.restore(0, lead.replicas[0].state())
    greetings = [
        m for m in sent(back.view(view(2, (THIRD, 0), (SECOND, 0), epochs=(2, 1)))) if m[0] == SECOND
    ]
    assert said(back.handle(hello(0), WORKER)) == [NotPrimary(shard=0, epoch=2)]
    for _, message in greetings:
        for to, answer in sent(other.handle(message, THIRD)):
            assert to == THIRD
            back.handle(answer, SECOND)
    assert [type(message) for message in said(back.handle(hello(0), WORKER))] == [Welcome]


def test_a_slot_added_is_welcome_once_the_shard_knows_it() -> None:
    lead, other = two_shards("bounded:1")
    larger = view(2, (FIRST, 0), (SECOND, 0), members=(WORKER, WORKER + 1, WORKER + 2), epochs=(1, 1))
    assert other.handle(hello(2, shard=1), WORKER + 2) == []
    [chosen] = [m for m in said(lead.view(larger)) if isinstance(m, Chosen) and m.number == 1]
    assert said(lead.handle(hello(2), WORKER + 2)) == [Welcome(shard=0, slot=2, next_clock=1, version=0)]
    lead.handle(push(0, 0), WORKER)
    lead.handle(push(1, 0), WORKER + 1)
    assert lead.handle(read(0, 1), WORKER) == [], (
        "not from the clock on at which the other shard may not know"
    )
    actions = other.handle(chosen, FIRST)
    assert Welcome(shard=1, slot=2, next_clock=1, version=0) in said(actions)
    [kept] = [m for m in said(actions) if isinstance(m, ChosenKept)]
    assert [type(message) for message in said(lead.handle(kept, SECOND))] == [Parameters]


def test_a_server_without_a_part_in_a_shard_says_so() -> None:
    server = ServerCore(config(shards=2), FIRST)
    assert said(server.handle(read(0, 0, shard=1), WORKER)) == [NotPrimary(shard=1, epoch=-1)]
    assert server.handle(Forwarded(shard=1, epoch=1, sequence=1), SECOND) == []
    with pytest.raises(ValueError, match="does not accept a Welcome"):
        server.handle(Welcome(shard=0, slot=0, next_clock=0, version=0), WORKER)


def test_a_late_gradient_is_dropped_where_it_was_kept() -> None:
    first, second = ShardReplica(config("sync:1"), FIRST), ShardReplica(config("sync:1"), SECOND)
    [(_, install)] = sent(first.view(view(1, (FIRST, SECOND))))
    second.handle(install, FIRST)
    forwards = [said(first.handle(push(slot, 0, parts=2), WORKER + slot))[0] for slot in (0, 1)]
    actions = [action for forward in forwards for action in second.handle(forward, FIRST)]
    assert Drop(shard=0, slot=1, clock=0) in actions
    report = acks(first.handle(Forwarded(shard=0, epoch=1, sequence=2), SECOND))
    assert [(ack.slot, ack.outcome) for ack in report] == [(0, Outcome.APPLIED), (1, Outcome.LATE)]
