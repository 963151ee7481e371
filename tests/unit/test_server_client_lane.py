"""A worker's lane against its core: the same answers with and without it give the same messages and state."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from manyhands.strategies.ps.actions import SendMessage
from manyhands.strategies.ps.client_core import ClientAction, ClientCore, Compute
from manyhands.strategies.ps.client_fast_path import ClientLane
from manyhands.strategies.ps.ps_messages import (
    Ack,
    Fenced,
    Message,
    NotPrimary,
    Outcome,
    Parameters,
    Push,
    Refused,
    RowsUnknown,
    RowValues,
    ShardView,
    SlotView,
    View,
    Welcome,
    Work,
    WorkKind,
)
from manyhands.strategies.ps.push_pull import PushPull, PushPullAnswer, in_push_pulls

SLOT, MEMBER, FIRST = 0, 10, 1


def told(core: ClientCore) -> tuple[Any, ...]:
    """All that a core knows, a kept turn being the push that it is."""
    shards = [
        replace(shard, push=shard.push.push) if isinstance(shard.push, PushPull) else shard
        for shard in core._shards
    ]
    rest = {name: value for name, value in vars(core).items() if name != "_shards"}
    return rest, shards


class Twins:
    """Two workers that are told the same, the second by way of the lane."""

    def __init__(self, shards: int, seed: int, **options: bool) -> None:
        self.plain, self.laned = (
            ClientCore(slot=SLOT, member=MEMBER, num_shards=shards, **options) for _ in range(2)
        )
        self.lane = ClientLane(self.laned)
        self.shards, self.draw = shards, random.Random(seed)
        self.taken: Counter[str] = Counter()
        self.computing: Compute | None = None
        self.epoch = 0
        self.primaries = [FIRST] * shards
        self.view()
        for shard in range(shards):
            self.say(Welcome(shard=shard, slot=SLOT, next_clock=0, version=0))

    def check(self, expected: list[ClientAction], found: list[ClientAction]) -> None:
        assert found == expected
        assert told(self.laned) == told(self.plain)
        for action in expected:
            if isinstance(action, Compute):
                self.computing = action

    def view(self) -> None:
        self.epoch += 1
        view = View(
            epoch=self.epoch,
            shards=tuple(
                ShardView(shard=shard, epoch=self.epoch, primary=primary)
                for shard, primary in enumerate(self.primaries)
            ),
            slots=(SlotView(slot=SLOT, member=MEMBER),),
        )
        self.check(self.plain.view(view), self.laned.view(view))

    def say(self, message: Message, source: int = 0) -> None:
        source = source or self.primaries[getattr(message, "shard", 0)]
        expected = self.plain.handle(message, source)
        if isinstance(message, Parameters):
            compute = self.lane.answered(PushPullAnswer.of(message), source)
            self.taken["answer" if compute is not None else "no answer"] += 1
            if compute is not None:
                self.check(expected, [compute])
                return
        self.check(expected, self.laned.handle(message, source))

    def compute(self, weight: float = 1.0, skip: bool = False) -> None:
        self.computing = None
        expected = self.plain.computed(weight=weight, skip=skip)
        turn = None if skip else self.lane.turn(weight=weight)
        self.taken["turn" if turn is not None else "no turn"] += 1
        if turn is None:
            self.check(expected, self.laned.computed(weight=weight, skip=skip))
            return
        to, sent = turn
        pair = [SendMessage(to=to, message=sent.push), SendMessage(to=to, message=sent.read)]
        self.check(expected, list[ClientAction](pair))
        assert list(in_push_pulls(expected)) == [(pair[0], sent)]

    def answer(self, shard: int, **changes: Any) -> Parameters:
        clock = self.plain.clock or 0
        work = Work(kind=WorkKind.TRAIN, clock=clock, batch=clock * 3, part=1, parts=2)
        if shard:
            work = Work(kind=WorkKind.UNKNOWN)
        parameters = Parameters(
            shard=shard, slot=SLOT, clock=clock, version=clock + 5, work=work, term=self.draw.randrange(3)
        )
        return replace(parameters, **changes)

    def go_on(self) -> None:
        if self.computing is not None:
            self.compute(self.draw.choice((1.0, 0.5)))
        for shard in range(self.shards):
            self.say(self.answer(shard))

    def odd(self) -> None:
        shard, clock = self.draw.randrange(self.shards), self.plain.clock or 0
        kind = self.draw.choice((WorkKind.FINISHED, WorkKind.RETIRED, WorkKind.AHEAD))
        match self.draw.randrange(12):
            case 0:
                self.say(self.answer(shard, clock=max(0, clock - 1)))
            case 1:
                self.say(self.answer(shard), source=FIRST + 50)
            case 2:
                self.say(self.answer(shard, work=Work(kind=WorkKind.TRAIN, clock=clock + 2)))
            case 3:
                self.say(Ack(shard=shard, slot=SLOT, clock=clock, outcome=Outcome.APPLIED))
            case 4:
                self.say(RowsUnknown(shard=shard, slot=SLOT, clock=clock - 1, names=()))
            case 5:
                self.say(NotPrimary(shard=shard, epoch=1))
                self.check(self.plain.again(shard), self.laned.again(shard))
                self.say(Welcome(shard=shard, slot=SLOT, next_clock=clock, version=clock))
            case 6:  # another primary, which has perhaps not what the last one had
                self.primaries[shard] += 1
                self.view()
                self.say(Welcome(shard=shard, slot=SLOT, next_clock=max(0, clock - 1), version=clock))
            case 7 if self.computing is not None:
                self.compute(skip=True)
            case 8 if self.computing is not None:
                self.check(self.plain.read_rows([shard]), self.laned.read_rows([shard]))
                self.say(RowValues(shard=shard, slot=SLOT, clock=clock, version=clock + 1))
            case 9:
                self.say(Fenced(shard=shard, slot=SLOT, holder=self.draw.choice((MEMBER - 1, MEMBER + 1))))
            case 10:
                ahead = kind is WorkKind.AHEAD
                if shard == 0 or not ahead:  # only the lead knows that nobody needs a clock any more
                    self.say(self.answer(shard, work=Work(kind=kind, clock=clock + 2 * ahead)))
            case _:
                self.say(Refused(shard=shard, slot=SLOT, clock=clock - 1, reason="not finite"))


def test_a_worker_that_is_told_to_train_never_leaves_the_lane() -> None:
    twins = Twins(1, seed=0)
    for _ in range(20):
        twins.go_on()
    assert twins.taken == {"answer": 20, "turn": 19}


@pytest.mark.parametrize(
    ("shards", "options"),
    [(1, {}), (1, {"skip_nonfinite": True}), (2, {}), (2, {"confirms": True})],
    ids=["one", "skips", "two", "confirms"],
)
def test_whatever_a_worker_is_told_the_lane_does_as_the_core(shards: int, options: dict[str, bool]) -> None:
    taken: Counter[str] = Counter()
    for seed in range(60):
        twins = Twins(shards, seed, **options)
        for _ in range(40):
            if twins.draw.random() < 0.7:
                twins.go_on()
            else:
                twins.odd()
        taken += twins.taken
    assert bool(taken["turn"]) is bool(taken["answer"]) is (shards == 1)
    assert taken["no turn"]
    assert taken["no answer"]


def test_a_turn_that_was_not_answered_is_told_again_as_its_push() -> None:
    twins = Twins(1, seed=0)
    twins.go_on()
    twins.compute()
    twins.primaries[0] += 1
    twins.view()
    again = twins.laned.handle(Welcome(shard=0, slot=SLOT, next_clock=0, version=0), FIRST + 1)
    assert isinstance(again[0], SendMessage)
    assert isinstance(again[0].message, Push)
