"""Parameters are sent while gradients are still arriving; what counts is what a shard does without that."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.engine.computing import Built, Computer, TrainingPlan
from manyhands.strategies.common.consistency import parse_consistency
from manyhands.strategies.ps.actions import Apply, Keep, SendMessage
from manyhands.strategies.ps.live.answers_ahead import AnswersAhead
from manyhands.strategies.ps.live.payloads import Gradients
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.ps_messages import (
    Hello,
    HostPush,
    Parameters,
    Push,
    ShardView,
    SlotView,
    ValuesAhead,
    View,
)
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_replica import ServerCore
from manyhands.strategies.ps.shard_store import Contribution, ShardStore
from manyhands.strategies.ps.step_ahead import Span, StepAhead
from manyhands.task import Task

SERVER, MEMBERS = 1, (10, 11, 12, 13)
HOSTS = ((0, 1), (2, 3))
STEPS, LEAST = 12, 256
Message = Push | HostPush


def push(slot: int, clock: int = 0, *, carrier: int = -1) -> Push:
    name = (0, slot, MEMBERS[slot], clock, clock)
    return Push(*name, clock, slot, 4, 0.25, carrier=carrier, pulls=True, bare=carrier >= 0)


def host_push(slots: tuple[int, ...], clock: int = 0) -> HostPush:
    return HostPush(
        0, tuple(push(slot, clock, carrier=-1 if slot == slots[0] else slots[0]) for slot in slots)
    )


# ── the core ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_that_all_have_are_a_span_once_there_are_enough() -> None:
    step, slots = StepAhead(1000, 300), (0, 1, 2, 3)
    first, second = host_push((0, 1)), host_push((2, 3))
    assert step.arrives(second, 400)
    assert step.span(0, slots) is None, "nothing of the others is here"
    assert step.arrives(first, 350)
    pushes = (first.parts[0], second.parts[0])
    assert step.span(0, slots) == Span(pushes, 0, 350)
    assert step.arrives(first, 1000)
    assert step.span(0, slots) is None, "50 more are too few"
    assert step.arrives(second, 800)
    assert step.span(0, slots) == Span(pushes, 350, 800)
    assert step.arrives(second, 1000)
    assert step.span(0, slots) == Span(pushes, 800, 1000), "the last bytes, however few"


def test_an_update_that_is_here_twice_or_of_another_step_is_no_guess() -> None:
    step = StepAhead(1000, 300)
    step.arrives(push(0), 1000)
    step.arrives(push(1)._replace(clock=1), 1000)
    assert step.span(0, (0, 1)) is None
    step.arrives(host_push((1, 2)), 1000)
    step.arrives(push(2), 1000)
    assert step.span(0, (0, 1, 2)) is None


@pytest.mark.parametrize("again", [push(0), host_push((0, 1)), push(0)._replace(weight=0.5)])
def test_what_is_sent_again_is_begun_again(again: Message) -> None:
    step = StepAhead(1000, 300)
    step.arrives(push(0), 600)
    step.arrives(push(1), 1000)
    assert step.span(0, (0, 1)) == Span((push(0), push(1)), 0, 600)
    assert not step.arrives(again, 400), "other bytes than those that were used"


def test_a_member_that_left_is_begun_again_and_others_do_not_matter() -> None:
    step = StepAhead(1000, 300)
    for slot in (0, 1):
        step.arrives(push(slot), 600)
    assert step.span(0, (0, 1)) is not None
    assert step.gone(MEMBERS[3])
    assert not step.gone(MEMBERS[1])
    assert step.span(0, (0, 1)) is None
    step.arrives(push(1), 1000)
    assert step.span(0, (0, 1)) == Span((push(0), push(1)), 0, 600)


# ── a shard, its workers, and what goes wrong between them ────────────────────────────────────────────────────────────


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in (700, 3, 1501, 64))


def built() -> Built:
    task = Task(
        model=Wide,
        loss=lambda model, _: model.sizes[0].sum(),
        data=torch.zeros(2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    return Computer(TrainingPlan(task=task, steps=1, seed=0, evaluate_every=0, checkpoint_every=0), 0).build()


class Shard:
    """A server with one shard, beside one that knows nothing of guesses; and the memory of its workers."""

    def __init__(self) -> None:
        one = built()
        self.layout = FlatLayout.of(one.model, one.optimizer, 1)
        self.store, self.reference = (ShardStore(built(), self.layout, 0) for _ in range(2))
        policy, slots = parse_consistency("sync"), tuple(range(len(MEMBERS)))
        self.core = ServerCore(
            ShardConfig(shard=0, num_shards=1, policy=policy, steps=STEPS, slots=slots), SERVER
        )
        self.gradients = Gradients(self.layout, inline=True)
        self.ahead = AnswersAhead(
            self.core, self.layout, self.gradients, lambda _: self.store, self.send, least=LEAST
        )
        self.memory = {member: np.zeros(self.layout.range_bytes(0), np.uint8) for member in MEMBERS}
        self.until = dict.fromkeys(MEMBERS, (0, 0))  # the version of what came ahead, and how much
        self.unreached: set[int] = set()
        self.answered: list[Parameters] = []
        held = tuple(SlotView(slot, member) for slot, member in enumerate(MEMBERS))
        self.core.view(View(epoch=1, shards=(ShardView(0, 1, SERVER),), slots=held))
        for slot, member in enumerate(MEMBERS):
            self.core.handle(Hello(0, slot, member, 0), member)

    def send(self, to: int, message: ValuesAhead, payload: list[Any]) -> bool:
        if to in self.unreached:
            return False
        came = np.frombuffer(payload[0], np.uint8)
        assert message.begin == 0 or self.until[to] == (message.version, message.begin)
        self.memory[to][message.begin : message.begin + len(came)] = came
        self.until[to] = (message.version, message.begin + len(came))
        return True

    def payload(self, chance: random.Random, *, finite: bool = True) -> np.ndarray:
        gradient = torch.zeros(self.layout.flag_bytes(0) + self.layout.range_bytes(0), dtype=torch.uint8)
        gradient[: len(self.layout.pieces[0])] = 1
        drawn = self.layout.range_in(gradient[self.layout.flag_bytes(0) :], 0)
        draw = torch.Generator().manual_seed(chance.randrange(1 << 30))
        for piece in drawn.pieces:
            piece.copy_(torch.randn(piece.shape, generator=draw))
        if not finite:
            gradient[0] = 0  # a parameter that it did not reach
        return gradient.numpy()

    def arrives(self, message: Message, payload: np.ndarray, cuts: list[int]) -> Iterator[None]:
        """The payload, in so many parts; a moment between any two."""
        first = message.parts[0] if isinstance(message, HostPush) else message
        room = self.gradients.room_for(first, len(payload))
        assert room is not None
        begin = 0
        for cut in cuts:
            room[begin:cut] = payload[begin:cut].data
            begin = cut
            self.ahead.arriving(message, cut)
            yield
        room[begin:] = payload[begin:].data
        self.ahead.arriving(message, len(payload))
        keeps = self.core.keeps(message)
        self.do(self.core.handle(message, first.member), self.gradients.of(first, room) if keeps else None)

    def do(self, actions: list[Any], gradient: Contribution | None) -> None:
        for action in actions:
            match action:
                case Keep():
                    self.gradients.keep(action, gradient)
                case Apply(row=row):
                    taken = [self.gradients.take(0, update.slot, update.clock) for update in row.updates]
                    terms = [one for one in taken if one is not None]
                    self.reference.apply(terms, row.rate)
                    self.store.apply(terms, row.rate)
                case SendMessage(to=to, message=Parameters() as message) if not message.bare:
                    ahead = self.ahead.sent(to, message)
                    assert not ahead or self.until[to] == (message.version, ahead)
                    self.memory[to][ahead:] = np.frombuffer(self.store.buffer, np.uint8)[ahead:]
                    self.answered.append(message._replace(ahead=ahead))
        self.gradients.secure()


def ways_to_push(chance: random.Random, host: tuple[int, ...], clock: int) -> list[Message]:
    if chance.random() < 0.7:
        return [host_push(host, clock)]
    return [push(slot, clock) for slot in host]


def play_step(shard: Shard, chance: random.Random, clock: int, *, trouble: float) -> None:
    """Every host pushes once, as one or alone; now and then a connection ends first, and it pushes in any way again."""
    hosts = {
        host: [
            (
                one,
                shard.arrives(
                    one, shard.payload(chance, finite=chance.random() > trouble), cuts(shard, chance)
                ),
            )
            for one in ways_to_push(chance, host, clock)
        ]
        for host in HOSTS
    }
    while any(hosts.values()):
        host = chance.choice([host for host, left in hosts.items() if left])
        message, sending = chance.choice(hosts[host])
        member = message.parts[0].member if isinstance(message, HostPush) else message.member
        alone = isinstance(message, Push)
        shard.unreached = set(chance.sample(MEMBERS, int(4 * trouble * chance.random() * 2)))
        if (
            chance.random() < trouble
        ):  # another gradient than the first time: that of other workers, or rounded anew
            again: list[Message] = [message] if alone else ways_to_push(chance, host, clock)
            shard.ahead.gone(member)
            made = [(one, shard.arrives(one, shard.payload(chance), cuts(shard, chance))) for one in again]
            hosts[host] = [*(pair for pair in hosts[host] if pair[0] is not message), *made]
            continue
        if next(sending, 1) == 1:
            hosts[host] = [pair for pair in hosts[host] if pair[0] is not message]


def cuts(shard: Shard, chance: random.Random) -> list[int]:
    whole = shard.layout.flag_bytes(0) + shard.layout.range_bytes(0)
    return sorted(chance.sample(range(1, whole), chance.randrange(0, 12)))


@pytest.mark.parametrize("trouble", [0.0, 0.15])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_goes_wrong_a_worker_has_the_values_that_count(seed: int, trouble: float) -> None:
    chance, shard = random.Random(seed), Shard()
    for clock in range(STEPS):
        before = len(shard.answered)
        play_step(shard, chance, clock, trouble=trouble)
        assert torch.equal(shard.store.values.memory, shard.reference.values.memory), clock
        assert shard.reference.followed is False
        answered = shard.answered[before:]
        assert answered, "the step was taken"
        for message in answered:
            mine = shard.memory[MEMBERS[message.slot]]
            assert bytes(mine) == bytes(shard.store.buffer), (clock, message)
    ahead = [message.ahead for message in shard.answered]
    assert sum(map(bool, ahead)) > len(ahead) // 4, "guesses are right more often than this"
    assert trouble or all(ahead)


def test_a_step_of_other_gradients_in_the_same_memory_is_not_the_one_that_was_begun() -> None:
    chance, shard = random.Random(1), Shard()
    cut = [shard.layout.flag_bytes(0) + 2048]
    begun = shard.arrives(host_push(HOSTS[0]), shard.payload(chance), cut)
    for _ in shard.arrives(host_push(HOSTS[1]), shard.payload(chance), []):
        pass
    next(begun)
    assert shard.until[MEMBERS[2]] == (1, 2048), "the other host has values that will not be"
    shard.ahead.gone(MEMBERS[0])
    for _ in shard.arrives(push(0), shard.payload(chance), []):
        pass
    shard.do(shard.core.handle(push(1)._replace(skip=True), MEMBERS[1]), None)
    assert torch.equal(shard.store.values.memory, shard.reference.values.memory)
    answered = {message.slot: message for message in shard.answered}
    assert sorted(answered) == [0, 1, 2]
    assert answered[2].ahead == 0
    assert bytes(shard.memory[MEMBERS[2]]) == bytes(shard.store.buffer)


def test_a_step_at_another_rate_leaves_nothing_begun() -> None:
    chance, shard = random.Random(2), Shard()
    flags = shard.layout.flag_bytes(0)
    gradient = torch.from_numpy(shard.payload(chance))
    one = Contribution(gradient=shard.layout.range_in(gradient[flags:], 0), present=gradient[:flags])
    following = shard.store.following
    assert following is not None
    following.begin([one.gradient.memory])
    following.advance(1024)
    for rate in (0.5, 1.0, 1.0):
        shard.store.apply([one], rate)
        shard.reference.apply([one], rate)
        assert torch.equal(shard.store.values.memory, shard.reference.values.memory)
        assert not shard.store.followed
