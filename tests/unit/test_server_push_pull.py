"""A push-pull is its Push and its Read: one message or two leave the same state and the same actions.

The two go through the same code, so this is the proof that nothing between them depends on the message: whatever else
comes, and whatever policy, number of shards, backup, successor or restore there is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import pytest

from manyhands.strategies.common.consistency import Policy, parse_consistency
from manyhands.strategies.ps.actions import Ack, Action, Apply, SendMessage
from manyhands.strategies.ps.log_rows import row_from_json, row_to_json
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.ps_messages import (
    LAUNCHER,
    Fenced,
    Forward,
    Forwarded,
    Hello,
    Install,
    Message,
    NotPrimary,
    Parameters,
    Push,
    Read,
    ReadRows,
    ShardView,
    SlotView,
    Update,
    View,
    WorkKind,
)
from manyhands.strategies.ps.shard_replica import ServerCore

SERVER, BACKUP, OTHER = 1, 2, 3
MEMBERS = 10  # slot s begins with member 10 + s; a successor has a number that nobody had
EVERY_POLICY = [
    "sync",
    "sync:1",
    "bounded:2",
    "async",
    "softsync:1",
    "softsync:2",
    "aware:async",
    "aware:sync",
]


def config(consistency: str, *, shards: int = 1, slots: int = 2, steps: int = 60) -> ShardConfig:
    policy = parse_consistency(consistency)
    return ShardConfig(shard=0, num_shards=shards, policy=policy, steps=steps, slots=tuple(range(slots)))


def read_behind(push: Push) -> Read:
    return Read(shard=push.shard, slot=push.slot, member=push.member, clock=push.clock + 1)


_PLAIN = frozenset({str, int, float, bool, type(None)})


@cache
def _field_names(kind: type) -> list[str] | None:
    """None for a value that nobody changes: two of them are compared field by field as they are."""
    params: Any = vars(kind)["__dataclass_params__"]
    return None if params.frozen else [field.name for field in fields(kind)]


def everything(value: Any) -> Any:
    """All that an object holds, as values that can be compared."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is Push:  # how it came is nothing that its shard goes by
        return value._replace(pulls=False)
    if kind is tuple or kind is list:
        return [everything(one) for one in value]
    if is_dataclass(kind):
        names = _field_names(kind)
        return value if names is None else (kind, [everything(getattr(value, name)) for name in names])
    if isinstance(value, Mapping):
        return [(everything(key), everything(one)) for key, one in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(map(everything, value), key=repr)
    if isinstance(value, (Enum, Policy, type)):
        return value
    if hasattr(value, "__dict__"):
        return type(value), [(name, everything(one)) for name, one in vars(value).items()]
    return [everything(one) for one in value]


class Twins:
    """Two servers that are told the same, the first in two messages where the second is told in one."""

    def __init__(self, configuration: ShardConfig) -> None:
        self.apart, self.joined = ServerCore(configuration, SERVER), ServerCore(configuration, SERVER)
        self.rows: list[str] = []
        self.num_answered = self.num_held = 0
        self._num_compared = 0

    def both(self, handle: Callable[[ServerCore], list[Action]]) -> list[Action]:
        return self._compare(handle(self.apart), handle(self.joined))

    def push_pull(self, push: Push) -> list[Action]:
        sender = push.member
        first = self.apart.handle(push._replace(pulls=False), sender)
        second = self.apart.handle(read_behind(push), sender)
        refused = [one for one in first if isinstance(one, SendMessage)]
        if refused and isinstance(refused[-1].message, Fenced | NotPrimary):
            second = []  # one message is turned down once
        actions = self._compare(first + second, self.joined.handle(push, sender))
        answered = any(
            isinstance(one, SendMessage) and isinstance(one.message, Parameters) for one in actions
        )
        self.num_answered += answered
        self.num_held += not answered
        return actions

    def _compare(self, expected: list[Action], found: list[Action]) -> list[Action]:
        assert [_unpulled(one) for one in found] == [_unpulled(one) for one in expected]
        self._num_compared += 1
        if self._num_compared % 7 == 0:  # what differs stays so, and looking costs more than all the rest
            self.compare_state()
        self.rows += [row_to_json(one.row) for one in expected if isinstance(one, Apply)]
        return found

    def compare_state(self) -> None:
        assert everything(self.joined) == everything(self.apart)


def _unpulled(action: Action) -> Action:
    """A forward of a push says how it came, which no backup looks at."""
    if isinstance(action, SendMessage) and isinstance(action.message, Forward):
        entry = action.message.entry
        if isinstance(entry, Push):
            forward = Forward(
                shard=action.message.shard,
                epoch=action.message.epoch,
                sequence=action.message.sequence,
                entry=entry._replace(pulls=False),
            )
            return action._replace(message=forward)
    return action


class Course:
    """A run drawn from a seed: mostly what workers do, and now and then everything else that may come."""

    def __init__(self, configuration: ShardConfig, seed: int, oddities: float) -> None:
        self.twins = Twins(configuration)
        self.config, self.draw, self.oddities = configuration, random.Random(seed), oddities
        self.members = {slot: MEMBERS + slot for slot in configuration.slots}
        self.newest = max(self.members.values())
        self.epoch = self.shard_epoch = 0
        self.primary, self.backup = SERVER, 0
        self.retiring: list[int] = []
        self.gone: list[Update] = []
        self.works: dict[tuple[int, int], Parameters] = {}
        self.view()
        for slot in configuration.slots:
            self.greet(slot)

    def view(self) -> None:
        self.follow(self.look())

    def look(self) -> list[Action]:
        """What both servers do about the next view."""
        self.epoch += 1
        active = [slot for slot in self.members if slot not in self.retiring]
        view = View(
            epoch=self.epoch,
            shards=tuple(
                ShardView(shard=shard, epoch=self.shard_epoch, primary=self.primary, backup=self.backup)
                for shard in range(self.config.num_shards)
            ),
            slots=tuple(SlotView(slot=slot, member=self.members[slot]) for slot in active),
            retiring=tuple(SlotView(slot=slot, member=self.members[slot]) for slot in self.retiring),
            gone=tuple(self.gone),
        )
        return self.twins.both(lambda core: core.view(view))

    def restore(self) -> list[Action]:
        """Two new servers begin at a snapshot of now, and have yet to hear of each other's shards."""
        states = {shard: replica.state() for shard, replica in self.twins.apart.replicas.items()}
        for name in ("apart", "joined"):
            core = ServerCore(self.config, SERVER)
            for shard, state in states.items():
                core.restore(shard, state)
            setattr(self.twins, name, core)
        self.shard_epoch += 1
        self.backup = 0
        return self.look()

    def say(self, message: Message, sender: int) -> None:
        self.follow(self.twins.both(lambda core: core.handle(message, sender)))

    def follow(self, actions: list[Action]) -> None:
        """Do as others would: hear answers, and speak for the backup and for this server's other shards."""
        for action in actions:
            if not isinstance(action, SendMessage) or action.to == LAUNCHER:
                continue
            message = action.message
            if isinstance(message, Parameters):
                self.works[message.shard, message.slot] = message
            elif isinstance(message, Forward | Install) and self.draw.random() < 0.9:
                kept = Forwarded(shard=message.shard, epoch=message.epoch, sequence=message.sequence)
                self.say(kept, BACKUP)
            elif action.to == SERVER:
                self.say(message, SERVER)

    def greet(self, slot: int) -> None:
        for shard in range(self.config.num_shards):
            replica = self.twins.apart.replicas[shard]
            settled = replica.core.next_clock(slot) or 0
            hello = Hello(shard=shard, slot=slot, member=self.members[slot], settled=settled)
            self.say(hello, hello.member)
            self.say(
                Read(shard=shard, slot=slot, member=self.members[slot], clock=settled), self.members[slot]
            )

    def next_push(self, shard: int, slot: int) -> Push:
        core = self.twins.apart.replicas[shard].core
        clock = core.next_clock(slot) or 0
        report = self.works.get((shard, slot))
        lead = self.works.get((0, slot), report)
        work = lead.work if lead is not None else None
        fits = work is not None and work.clock == clock
        return Push(
            shard=shard,
            slot=slot,
            member=self.members[slot],
            clock=clock,
            read_version=report.version if report is not None else 0,
            batch=work.batch if work is not None and fits else clock,
            part=work.part if work is not None and fits else 0,
            parts=work.parts if work is not None and fits else 1,
            weight=1.0 / (work.parts if work is not None and fits else 1),
            read_term=report.term if report is not None else 0,
            rows_version=-1,
            pulls=True,
        )

    def go(self, count: int) -> None:
        for _ in range(count):
            slot = self.draw.choice(list(self.members))
            shard = self.draw.randrange(self.config.num_shards)
            push = self.next_push(shard, slot)
            if self.draw.random() >= self.oddities:
                self.follow(self.twins.push_pull(push))
            else:
                self.odd(self.draw.randrange(24), push)
        self.twins.compare_state()

    def odd(self, number: int, push: Push) -> None:
        match number:
            case 0:  # a duplicate
                self.follow(self.twins.push_pull(push._replace(clock=max(0, push.clock - 1))))
            case 1:  # a gap
                self.follow(self.twins.push_pull(push._replace(clock=push.clock + self.draw.randint(1, 3))))
            case 2:  # of a member before it
                self.follow(self.twins.push_pull(push._replace(member=push.member - 1)))
            case 3:  # of a successor that no view has named
                self.newest += 1
                self.members[push.slot] = self.newest
                self.follow(self.twins.push_pull(push._replace(member=self.newest)))
            case 4:
                self.say(push._replace(skip=True, pulls=self.draw.random() < 0.5), push.member)
            case 5:
                self.say(push._replace(pulls=False), push.member)
            case 6:
                self.say(read_behind(push), push.member)
            case 7:
                self.greet(push.slot)
            case 8:
                self.follow(self.twins.push_pull(push._replace(weight=0.0)))
            case 9:
                self.follow(self.twins.push_pull(push._replace(parts=push.parts + 1, weight=0.5)))
            case 10:
                member = push.member - self.draw.choice((0, 0, 1))
                rows = ReadRows(shard=push.shard, slot=push.slot, member=member, clock=push.clock)
                self.say(rows, member)
            case 11 | 20 | 21:
                self.change_slots()
            case 22:  # everyone has left, and what they sent before arrives now
                gone = self.gone
                self.gone = [*gone, *(Update(slot=slot, clock=0) for slot in self.members)]
                self.view()
                self.follow(self.twins.push_pull(push))
                self.gone = gone
                self.view()
            case 23 if self.primary == SERVER:
                heard = self.restore()
                self.follow(self.twins.push_pull(push))
                self.follow(heard)
                for slot in self.members:
                    self.greet(slot)
            case 12 | 14:  # a backup comes, or goes
                self.shard_epoch += 1
                self.backup = 0 if self.backup else BACKUP
                self.view()
            case 13:  # an epoch that is over: a view from before, told again
                self.epoch -= 1
                self.view()
            case 15:  # of a slot that no view has named yet
                slot = max(self.members) + 1
                self.follow(self.twins.push_pull(push._replace(slot=slot, member=self.newest + 1)))
            case 16:
                slot = max(self.members) + 1
                hello = Hello(shard=push.shard, slot=slot, member=self.newest + 1, settled=0)
                self.say(hello, hello.member)
            case 17:  # a successor that a view names before it speaks
                self.newest += 1
                self.members[push.slot] = self.newest
                self.view()
                self.follow(self.twins.push_pull(push))  # of the one before it
            case 18 if self.config.policy.each_alone:  # no part of a batch; the mean of several would be nan
                self.follow(self.twins.push_pull(push._replace(weight=math.inf)))
            case 19:  # another server serves, or this one does again
                self.shard_epoch += 1
                self.primary, self.backup = (OTHER if self.primary == SERVER else SERVER), 0
                self.view()

    def change_slots(self) -> None:
        active = [slot for slot in self.members if slot not in self.retiring]
        if self.draw.random() < 0.5:
            self.newest += 1
            slot = max(self.members) + 1
            self.members[slot] = self.newest
            self.view()
            self.greet(slot)
        elif len(active) > 1:
            self.retiring.append(self.draw.choice(active))
            self.view()
        elif self.retiring:
            slot = self.retiring.pop()
            clock = max(replica.core.next_clock(slot) or 0 for replica in self.twins.apart.replicas.values())
            del self.members[slot]
            self.gone.append(Update(slot=slot, clock=clock))
            self.view()


@pytest.mark.parametrize("consistency", EVERY_POLICY)
@pytest.mark.parametrize("shards", [1, 2])
def test_whatever_comes_one_message_does_as_two(consistency: str, shards: int) -> None:
    answered = held = 0
    for seed in range(12):
        slots = 1 + seed % 3
        course = Course(
            config(consistency, shards=shards, slots=slots), seed, oddities=0.02 + 0.1 * (seed % 3)
        )
        course.go(120)
        answered += course.twins.num_answered
        held += course.twins.num_held
    assert answered > 100
    assert held > 100


def test_a_common_push_pull_is_four_actions() -> None:
    """The gradient is kept, applied and logged, is durable, and the parameters with the next batch go out."""
    for consistency, slots in (("async", 3), ("bounded:60", 2), ("sync", 1), ("aware:async", 2)):
        course = Course(config(consistency, slots=slots), seed=1, oddities=0.0)
        for _ in range(40):
            slot = course.draw.choice(list(course.members))
            actions = course.twins.push_pull(course.next_push(0, slot))
            course.follow(actions)
            assert [type(one).__name__ for one in actions] == ["Keep", "Apply", "Ack", "SendMessage"]
            assert isinstance(actions[2], Ack)
        assert len(course.twins.rows) == 40
        for row in course.twins.rows:
            assert row_to_json(row_from_json(row)) == row


def test_the_last_push_pull_of_a_run_ends_the_worker() -> None:
    for consistency in ("async", "bounded:2", "sync"):
        course = Course(config(consistency, slots=1, steps=5), seed=0, oddities=0.0)
        course.go(5)
        assert course.works[0, 0].work.kind is WorkKind.FINISHED, consistency


def test_staleness_counts_from_the_life_that_was_read() -> None:
    course = Course(config("async", slots=2), seed=3, oddities=0.0)
    course.go(10)
    state = course.twins.apart.replicas[0].state()
    course.go(10)
    twins = course.twins
    for name in ("apart", "joined"):
        core = ServerCore(course.config, SERVER)
        core.restore(0, state)
        setattr(twins, name, core)
    course.shard_epoch += 5
    course.view()
    stale = course.works[0, 0].version
    for slot in course.members:
        course.greet(slot)
    course.works[0, 0] = course.works[0, 0]._replace(version=stale, term=0)
    course.follow(twins.push_pull(course.next_push(0, 0)))
    assert '"staleness":0' in twins.rows[-1], "what the snapshot did not keep is not of this history"
