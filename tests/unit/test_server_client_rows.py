"""How a worker reads rows of tables, message by message: once the batch is known, and again wherever it has to."""

from __future__ import annotations

import pytest

from manyhands.errors import ManyhandsError
from manyhands.strategies.common.consistency import Sync
from manyhands.strategies.ps.actions import SendMessage
from manyhands.strategies.ps.client_core import ClientAction, ClientCore, Compute, Leave, Wait
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.ps_messages import (
    Fenced,
    Hello,
    Message,
    NotPrimary,
    Parameters,
    Push,
    Read,
    ReadRows,
    RowsUnknown,
    RowValues,
    ShardView,
    SlotView,
    View,
    Welcome,
    Work,
    WorkKind,
)
from manyhands.strategies.ps.shard_replica import ServerCore

SLOT, MEMBER, CLOCK = 2, 7, 4
WORK = Work(kind=WorkKind.TRAIN, clock=CLOCK, batch=100)


def view(epoch: int, *primaries: int) -> View:
    shards = tuple(ShardView(shard=number, epoch=epoch, primary=one) for number, one in enumerate(primaries))
    return View(epoch=epoch, shards=shards, slots=(SlotView(slot=SLOT, member=MEMBER),))


def welcome(shard: int) -> Welcome:
    return Welcome(shard=shard, slot=SLOT, next_clock=CLOCK, version=0)


def asked(shard: int, whole: bool = False) -> ReadRows:
    return ReadRows(shard=shard, slot=SLOT, member=MEMBER, clock=CLOCK, whole=whole)


def values(shard: int, version: int, clock: int = CLOCK) -> RowValues:
    return RowValues(shard=shard, slot=SLOT, clock=clock, version=version)


def unknown(shard: int, clock: int = CLOCK) -> RowsUnknown:
    return RowsUnknown(shard=shard, slot=SLOT, clock=clock, names=("ab",))


def sent(actions: list[ClientAction]) -> list[tuple[int, Message]]:
    assert all(isinstance(action, SendMessage) for action in actions), actions
    return [(action.to, action.message) for action in actions if isinstance(action, SendMessage)]


def computing() -> ClientCore:
    """A worker of shards 0 (on member 1) and 1 (on member 2) that is about to compute its update."""
    core = ClientCore(slot=SLOT, member=MEMBER, num_shards=2)
    core.view(view(1, 1, 2))
    core.handle(welcome(0), 1)
    core.handle(welcome(1), 2)
    unknown_work = Work(kind=WorkKind.UNKNOWN)
    core.handle(Parameters(shard=1, slot=SLOT, clock=CLOCK, version=21, work=unknown_work), 2)
    actions = core.handle(Parameters(shard=0, slot=SLOT, clock=CLOCK, version=11, work=WORK), 1)
    assert actions == [Compute(work=WORK, versions=(11, 21))]
    return core


def pushes(actions: list[ClientAction]) -> list[Push]:
    return [message for _, message in sent(actions) if isinstance(message, Push)]


def test_reads_from_the_shards_that_have_rows_and_pushes_the_versions_it_read() -> None:
    core = computing()
    assert sent(core.read_rows([1])) == [(2, asked(1))]
    assert core.waiting_for
    assert core.waiting_for == (1,)
    assert core.awaits(values(1, 23), 2)
    assert core.handle(values(1, 23), 2) == []
    assert not core.waiting_for
    assert [push.rows_version for push in pushes(core.computed(weight=1.0))] == [-1, 23]


def test_a_later_read_replaces_what_an_earlier_one_found() -> None:
    core = computing()
    assert sent(core.read_rows([0, 1], whole=True)) == [(1, asked(0, True)), (2, asked(1, True))]
    core.handle(values(0, 12), 1)
    core.handle(values(1, 22), 2)
    core.read_rows([0])
    core.handle(values(0, 13), 1)
    assert [push.rows_version for push in pushes(core.computed(weight=1.0))] == [13, -1]


def test_answers_that_nobody_waits_for_count_for_nothing() -> None:
    core = computing()
    core.read_rows([0])
    assert not core.awaits(values(0, 5, clock=CLOCK - 1), 1)
    assert not core.awaits(values(1, 5), 2)
    assert not core.awaits(values(0, 5), 2), "it is not that shard's primary"
    for message, source in ((values(0, 5, clock=CLOCK - 1), 1), (values(1, 5), 2), (unknown(1), 2)):
        assert core.handle(message, source) == []
    assert core.waiting_for


def test_a_new_primary_is_greeted_and_then_asked_again() -> None:
    core = computing()
    core.read_rows([0, 1])
    core.handle(values(1, 23), 2)
    hello = Hello(shard=0, slot=SLOT, member=MEMBER, settled=CLOCK)
    assert sent(core.view(view(2, 3, 2))) == [(3, hello)]
    assert core.handle(values(0, 99), 1) == [], "the former primary is too late"
    assert core.waiting_for
    assert sent(core.handle(welcome(0), 3)) == [(3, asked(0))]
    core.handle(values(0, 14), 3)
    assert [push.rows_version for push in pushes(core.computed(weight=1.0))] == [14, 23]


def test_who_does_not_know_that_it_serves_is_asked_again_a_moment_later() -> None:
    core = computing()
    core.read_rows([1])
    assert core.handle(NotPrimary(shard=1, epoch=0), 2) == [Wait(shard=1)]
    assert sent(core.again(1)) == [(2, Hello(shard=1, slot=SLOT, member=MEMBER, settled=CLOCK))]
    assert sent(core.handle(welcome(1), 2)) == [(2, asked(1))]


def test_what_named_an_unknown_set_is_sent_again() -> None:
    core = computing()
    core.read_rows([0])
    assert sent(core.handle(unknown(0), 1)) == [(1, asked(0))]
    core.handle(values(0, 12), 1)
    [first, *_] = pushes(core.computed(weight=1.0))
    assert sent(core.handle(unknown(0), 1)) == [(1, first)], "the Read behind it still waits there"
    assert core.handle(unknown(0, clock=CLOCK - 1), 1) == []


def test_a_worker_that_is_fenced_while_it_reads_waits_no_longer() -> None:
    core = computing()
    core.read_rows([0])
    [left] = core.handle(Fenced(shard=0, slot=SLOT, holder=MEMBER + 1), 1)
    assert isinstance(left, Leave)
    assert not core.waiting_for
    assert core.read_rows([0]) == []


def test_rows_are_read_for_an_update_only() -> None:
    core = ClientCore(slot=SLOT, member=MEMBER, num_shards=1)
    with pytest.raises(ManyhandsError, match="reads rows but has no work"):
        core.read_rows([0])


def test_a_primary_answers_at_once_a_backup_refers_and_an_old_holder_is_fenced() -> None:
    config = ShardConfig(shard=0, num_shards=2, policy=Sync(), steps=9, slots=(SLOT,))
    server = ServerCore(config, 1)
    server.view(view(1, 1, 2))
    read = Read(shard=0, slot=SLOT, member=MEMBER, clock=0)
    server.handle(read, MEMBER)
    assert server.handle(asked(0), MEMBER) == [SendMessage(to=MEMBER, message=values(0, 0))]
    assert server.handle(asked(1), MEMBER) == [SendMessage(to=MEMBER, message=NotPrimary(shard=1, epoch=-1))]
    old = ReadRows(shard=0, slot=SLOT, member=MEMBER - 1, clock=0)
    assert server.handle(old, MEMBER - 1) == [
        SendMessage(to=MEMBER - 1, message=Fenced(shard=0, slot=SLOT, holder=MEMBER))
    ]
    server.view(view(2, 3, 2))
    assert server.handle(asked(0), MEMBER) == [SendMessage(to=MEMBER, message=NotPrimary(shard=0, epoch=2))]
