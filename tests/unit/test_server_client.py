"""What a worker decides, message by message: no server, no clock, no tensor."""

from __future__ import annotations

import pytest

from manyhands.errors import ManyhandsError
from manyhands.strategies.ps.actions import SendMessage
from manyhands.strategies.ps.client_core import ClientAction, ClientCore, Compute, Leave, Reason, Wait
from manyhands.strategies.ps.ps_messages import (
    CopyShard,
    Fenced,
    Hello,
    Message,
    NotPrimary,
    Parameters,
    Push,
    Read,
    Refused,
    ShardView,
    SlotView,
    View,
    Welcome,
    Work,
    WorkKind,
    Yield,
)

SLOT, MEMBER = 2, 7
UNKNOWN = Work(kind=WorkKind.UNKNOWN)


def view(epoch: int, *primaries: int, holder: int = MEMBER) -> View:
    shards = tuple(
        ShardView(shard=shard, epoch=epoch, primary=primary) for shard, primary in enumerate(primaries)
    )
    return View(epoch=epoch, shards=shards, slots=(SlotView(slot=SLOT, member=holder),))


def train(clock: int, batch: int | None = None) -> Work:
    return Work(kind=WorkKind.TRAIN, clock=clock, batch=100 + clock if batch is None else batch)


def welcome(shard: int, next_clock: int) -> Welcome:
    return Welcome(shard=shard, slot=SLOT, next_clock=next_clock, version=0)


def parameters(shard: int, clock: int, version: int = 0, work: Work = UNKNOWN) -> Parameters:
    return Parameters(shard=shard, slot=SLOT, clock=clock, version=version, work=work)


def read(shard: int, clock: int) -> Read:
    return Read(shard=shard, slot=SLOT, member=MEMBER, clock=clock)


def sent(actions: list[ClientAction]) -> list[tuple[int, Message]]:
    assert all(isinstance(action, SendMessage) for action in actions), actions
    return [(action.to, action.message) for action in actions if isinstance(action, SendMessage)]


def client(num_shards: int = 2, *, skip_nonfinite: bool = False) -> ClientCore:
    return ClientCore(slot=SLOT, member=MEMBER, num_shards=num_shards, skip_nonfinite=skip_nonfinite)


def computing(clock: int = 4) -> ClientCore:
    """A worker of shards 0 (on member 1) and 1 (on member 2) that computes its update `clock`."""
    core = client()
    core.view(view(1, 1, 2))
    core.handle(welcome(0, clock), 1)
    core.handle(welcome(1, clock), 2)
    core.handle(parameters(1, clock, version=21), 2)
    actions = core.handle(parameters(0, clock, version=11, work=train(clock)), 1)
    assert actions == [Compute(work=train(clock), versions=(11, 21))]
    return core


def test_greets_every_primary_and_starts_at_the_lowest_clock_that_a_shard_lacks() -> None:
    core = client()
    hello = Hello(shard=0, slot=SLOT, member=MEMBER, settled=0)
    assert sent(core.view(view(1, 1, 0))) == [(1, hello)]
    assert core.waiting_for == (0, 1)
    assert core.handle(welcome(0, 9), 1) == []
    assert sent(core.view(view(2, 1, 3))) == [(3, Hello(shard=1, slot=SLOT, member=MEMBER, settled=0))]
    assert core.clock is None
    assert sent(core.handle(welcome(1, 8), 3)) == [(1, read(0, 8)), (3, read(1, 8))]
    assert core.clock == 8


@pytest.mark.parametrize("kind", [WorkKind.FINISHED, WorkKind.RETIRED])
def test_reads_again_where_a_shard_waited_for_nobody_by_an_older_table_of_slots(kind: WorkKind) -> None:
    core = computing(clock=4)
    core.computed(weight=1.0)
    assert core.handle(parameters(1, 5, version=22, work=Work(kind=kind, clock=5)), 2) == []
    assert sent(core.handle(parameters(0, 5, version=12, work=train(5)), 1)) == [(2, read(1, 5))]
    assert core.waiting_for == (1,)
    actions = core.handle(parameters(1, 5, version=25), 2)
    assert actions == [Compute(work=train(5), versions=(12, 25))]


def test_reads_again_no_more_than_once() -> None:
    """The lead said so before it was restored: the shards will not count the update, and tell the worker then."""
    core = computing(clock=4)
    core.computed(weight=1.0)
    retired = parameters(1, 5, version=22, work=Work(kind=WorkKind.RETIRED, clock=5))
    core.handle(parameters(0, 5, version=12, work=train(5)), 1)
    assert sent(core.handle(retired, 2)) == [(2, read(1, 5))]
    assert core.handle(retired, 2) == [Compute(work=train(5), versions=(12, 22))]


def test_a_push_and_the_read_behind_it_are_one_message() -> None:
    core = computing(clock=4)
    assert core.waiting_for == ()
    messages = sent(core.computed(weight=0.25))
    push = Push(
        shard=0,
        slot=SLOT,
        member=MEMBER,
        clock=4,
        read_version=11,
        batch=104,
        part=0,
        parts=1,
        weight=0.25,
        pulls=True,
    )
    assert messages == [(1, push), (2, push._replace(shard=1, read_version=21))]
    assert core.waiting_for == (0, 1)
    assert core.handle(parameters(0, 5, 12, train(5)), 1) == []
    assert core.waiting_for == (1,)
    assert core.handle(parameters(1, 5, 22), 2) == [Compute(work=train(5), versions=(12, 22))]


def test_a_new_primary_is_told_again_exactly_what_its_shard_has_not_answered() -> None:
    core = computing(clock=4)
    pushed = sent(core.computed(weight=1.0))
    core.handle(parameters(0, 5, 12, train(5)), 1)
    assert sent(core.view(view(2, 1, 9))) == [(9, Hello(shard=1, slot=SLOT, member=MEMBER, settled=4))]
    assert core.handle(parameters(1, 5, 99), 2) == [], "the old primary's last words count for nothing"
    assert sent(core.handle(welcome(1, 4), 9)) == [(9, pushed[1][1])]
    assert core.handle(parameters(1, 5, 22), 9) == [Compute(work=train(5), versions=(12, 22))]
    # while it computes nothing is unanswered: it only greets
    assert sent(core.view(view(3, 8, 9))) == [(8, Hello(shard=0, slot=SLOT, member=MEMBER, settled=5))]
    assert core.handle(welcome(0, 5), 8) == []


def test_what_is_computed_while_a_shard_has_no_primary_is_pushed_when_it_has_one() -> None:
    core = computing(clock=4)
    assert core.view(view(2, 1, 0)) == []
    assert [to for to, _ in sent(core.computed(weight=1.0))] == [1]
    assert [to for to, _ in sent(core.view(view(3, 1, 9)))] == [9]
    [(_, push)] = sent(core.handle(welcome(1, 4), 9))
    assert isinstance(push, Push)
    assert (push.clock, push.pulls) == (4, True)


def test_a_server_that_does_not_know_yet_is_asked_again() -> None:
    core = client(1)
    core.view(view(1, 1))
    refusal = NotPrimary(shard=0, epoch=0)
    assert core.handle(refusal, 1) == [Wait(shard=0)]
    assert core.handle(refusal, 1) == [], "one Wait for one mistake"
    assert [message for _, message in sent(core.again(0))] == [
        Hello(shard=0, slot=SLOT, member=MEMBER, settled=0)
    ]
    assert core.again(0) == [], "it waits for the answer now"
    core.handle(refusal, 1)
    core.view(view(2, 5))
    assert core.again(0) == [], "a view came first"


def test_a_late_worker_goes_ahead_and_reads_the_other_shards_where_the_lead_is() -> None:
    core = computing(clock=4)
    pushed = sent(core.computed(weight=0.5))
    core.handle(parameters(1, 5, version=5), 2)
    ahead = Hello(shard=1, slot=SLOT, member=MEMBER, settled=8)
    report = sent(core.handle(parameters(0, 5, version=8, work=train(8)), 1))
    assert report == [(2, ahead), (2, read(1, 8))], "nobody will send 5 to 7"
    assert core.handle(welcome(1, 8), 2) == []
    assert core.handle(parameters(1, 5, version=5), 2) == [], "the answer to a question of the past"
    assert core.handle(parameters(1, 8, version=8), 2) == [Compute(work=train(8), versions=(8, 8))]
    push = sent(core.computed(weight=0.5))[0][1]
    assert isinstance(push, Push)
    assert (push.clock, push.read_version, push.batch) == (8, 8, 108)
    assert pushed[0][1] != push


def test_a_late_worker_still_owes_the_other_shards_what_the_lead_may_have_counted() -> None:
    core = computing(clock=4)
    pushed = sent(core.computed(weight=0.5))
    core.handle(parameters(0, 5, version=8, work=train(8)), 1)
    assert sent(core.view(view(2, 1, 9))) == [(9, Hello(shard=1, slot=SLOT, member=MEMBER, settled=4))]
    assert sent(core.handle(welcome(1, 4), 9)) == [(9, pushed[1][1])]
    ahead = Hello(shard=1, slot=SLOT, member=MEMBER, settled=8)
    assert sent(core.handle(parameters(1, 5, version=5), 9)) == [(9, ahead), (9, read(1, 8))]


def test_a_worker_that_goes_ahead_while_a_shard_changes_hands_is_welcomed_there_at_its_new_clock() -> None:
    core = computing(clock=4)
    core.computed(weight=0.5)
    core.handle(parameters(1, 5, version=5), 2)
    core.view(view(2, 1, 9))
    core.handle(parameters(0, 5, version=8, work=train(8)), 1)
    assert core.handle(welcome(1, 5), 9) == [], "the answer to the first of two greetings"
    assert sent(core.handle(welcome(1, 8), 9)) == [(9, read(1, 8))]


def test_a_worker_that_is_sent_ahead_to_the_end_lets_every_shard_know_what_nobody_will_send() -> None:
    core = computing(clock=4)
    core.computed(weight=1.0)
    core.handle(parameters(1, 5, 22), 2)
    report = sent(core.handle(parameters(0, 5, 12, Work(kind=WorkKind.FINISHED, clock=9)), 1))
    assert report == [(2, Hello(shard=1, slot=SLOT, member=MEMBER, settled=9)), (2, read(1, 9))]
    (leave,) = core.handle(parameters(1, 9, 22), 2)
    assert isinstance(leave, Leave)


@pytest.mark.parametrize(
    ("kind", "reason"), [(WorkKind.FINISHED, Reason.FINISHED), (WorkKind.RETIRED, Reason.RETIRED)]
)
def test_leaves_only_when_every_shard_has_settled_its_last_push(kind: WorkKind, reason: Reason) -> None:
    core = computing(clock=4)
    core.computed(weight=1.0)
    assert core.handle(parameters(0, 5, 12, Work(kind=kind, clock=5)), 1) == []
    (leave,) = core.handle(parameters(1, 5, 22), 2)
    assert isinstance(leave, Leave)
    assert leave.reason is reason
    assert core.view(view(2, 9, 9)) == []
    assert core.again(0) == []


def test_it_does_not_leave_a_restored_shard_without_a_word() -> None:
    core = computing(clock=4)
    core.computed(weight=1.0)
    core.handle(parameters(0, 5, 12, Work(kind=WorkKind.FINISHED, clock=5)), 1)
    core.view(view(2, 9, 2))
    assert core.handle(parameters(1, 5, 22), 2) == [], "the lead's new server does not know how far we were"
    assert core.waiting_for == (0,)
    (leave,) = core.handle(welcome(0, 5), 9)
    assert isinstance(leave, Leave)


def test_what_the_lead_alone_lacks_when_all_is_done_is_lost_there() -> None:
    core = client(2)
    core.view(view(1, 1, 2))
    core.handle(welcome(0, 3), 1)
    core.handle(welcome(1, 5), 2)
    core.handle(parameters(1, 3, 22), 2)
    report = sent(core.handle(parameters(0, 3, 12, Work(kind=WorkKind.FINISHED, clock=3)), 1))
    lost = [Hello(shard=shard, slot=SLOT, member=MEMBER, settled=5) for shard in (0, 1)]
    assert report == [(1, lost[0]), (1, read(0, 5)), (2, lost[1]), (2, read(1, 5))]
    core.handle(parameters(1, 5, 22), 2)
    (leave,) = core.handle(parameters(0, 5, 12, Work(kind=WorkKind.FINISHED, clock=5)), 1)
    assert isinstance(leave, Leave)


def test_sent_ahead_before_the_lead_can_say_more_it_reads_everywhere_again() -> None:
    core = client(2)
    core.view(view(1, 1, 2))
    core.handle(welcome(0, 4), 1)
    core.handle(welcome(1, 0), 2)
    report = sent(core.handle(parameters(0, 0, 12, Work(kind=WorkKind.AHEAD, clock=4)), 1))
    assert report == [(1, Hello(shard=0, slot=SLOT, member=MEMBER, settled=4)), (1, read(0, 4))]
    report = sent(core.handle(parameters(1, 0, 2), 2))
    assert report == [(2, Hello(shard=1, slot=SLOT, member=MEMBER, settled=4)), (2, read(1, 4))]
    core.handle(parameters(1, 4, 2), 2)
    assert core.handle(parameters(0, 4, 13, train(4)), 1) == [Compute(work=train(4), versions=(13, 2))]


def test_a_later_holder_of_the_slot_fences_it() -> None:
    core = computing()
    assert core.handle(Fenced(shard=0, slot=SLOT, holder=MEMBER), 1) == []
    (leave,) = core.handle(Fenced(shard=0, slot=SLOT, holder=12), 1)
    assert isinstance(leave, Leave)
    assert leave.reason is Reason.FENCED
    assert "12" in leave.sentence
    assert core.computed(weight=1.0) == [], "what it was computing is nobody's business any more"


def test_a_view_with_a_later_holder_fences_it_too() -> None:
    (leave,) = computing().view(view(2, 1, 2, holder=12))
    assert isinstance(leave, Leave)
    assert leave.reason is Reason.FENCED


def test_views_of_the_past_count_for_nothing() -> None:
    core = computing()
    assert core.view(view(1, 5, 6)) == []
    assert core.view(view(0, 5, 6, holder=99)) == []


def test_a_refused_gradient_ends_the_worker_or_becomes_a_skip() -> None:
    refusal = Refused(shard=1, slot=SLOT, clock=4, reason="not finite: layer.weight")
    core = computing(clock=4)
    core.computed(weight=1.0)
    (leave,) = core.handle(refusal, 2)
    assert isinstance(leave, Leave)
    assert leave.reason is Reason.REFUSED
    assert "layer.weight" in leave.sentence
    assert "batch 104" in leave.sentence

    core = client(1, skip_nonfinite=True)
    core.view(view(1, 2))
    core.handle(welcome(0, 4), 2)
    core.handle(parameters(0, 4, 11, train(4)), 2)
    core.computed(weight=1.0)
    refusal = Refused(shard=0, slot=SLOT, clock=4, reason="not finite")
    ((to, push),) = sent(core.handle(refusal, 2))
    assert to == 2
    assert isinstance(push, Push)
    assert push.skip
    assert push.clock == 4
    assert core.handle(refusal, 2) == [], "told twice"


def test_what_can_not_be_is_an_error() -> None:
    core = computing(clock=4)
    with pytest.raises(ManyhandsError, match="Yield"):
        core.handle(Yield(shard=0, epoch=1), 1)
    core.computed(weight=1.0)
    with pytest.raises(ManyhandsError, match="not asked"):
        core.computed(weight=1.0)


def test_a_worker_reads_for_the_same_update_again_and_is_given_the_newer_parameters() -> None:
    core = computing(clock=4)
    assert sent(core.read_again()) == [(1, read(0, 4)), (2, read(1, 4))]
    core.handle(parameters(1, 4, version=22), 2)
    actions = core.handle(parameters(0, 4, version=12, work=train(4)), 1)
    assert actions == [Compute(work=train(4), versions=(12, 22))]
    [first, _] = sent(core.computed(weight=1.0, settings="{}"))
    assert isinstance(first[1], Push)
    assert first[1].clock == 4
    assert first[1].settings == "{}"


def test_every_primary_is_asked_for_a_copy_of_its_shard() -> None:
    asked = sent(computing().copy_shards("/folder", 3))
    assert asked == [(1, CopyShard(0, "/folder", 3)), (2, CopyShard(1, "/folder", 3))]
