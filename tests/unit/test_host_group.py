"""Workers of one host push and fetch as one: who decides, what a shard does with a sum, and runs with random faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import simulated
from manyhands.foresight.simulate import simulated_processes
from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.simulated_run import Observer
from manyhands.foresight.simulate.simulated_spec import ComputeModel, NetworkModel, SimulationSpec
from manyhands.strategies.common.consistency import parse_consistency
from manyhands.strategies.ps.actions import Action, Drop, Keep, SendMessage
from manyhands.strategies.ps.client_core import Compute
from manyhands.strategies.ps.host_group import (
    Alone,
    Begin,
    Carried,
    Carry,
    Confirm,
    Expects,
    Fetched,
    HostGroup,
    Offer,
    PushAlone,
    ReadAgain,
    SumSent,
    Tell,
)
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.ps_messages import (
    Forward,
    Hello,
    HostPush,
    Push,
    Read,
    SendAlone,
    ShardView,
    SlotView,
    View,
    Work,
    WorkKind,
)
from manyhands.strategies.ps.shard_replica import ShardReplica

CARRIER, FOLLOWER, LATER = 10, 11, 12
SERVER = 1
SLOTS = {CARRIER: 0, FOLLOWER: 1, LATER: 1}


def push(member: int, clock: int, *, carrier: int = -1, pulls: bool = False) -> Push:
    name = (0, SLOTS[member], member, clock, clock)
    return Push(*name, clock, SLOTS[member], 2, 0.5, carrier=carrier, pulls=pulls)


def whole(clock: int, *, pulls: bool = False) -> HostPush:
    return HostPush(0, (push(CARRIER, clock, pulls=pulls), push(FOLLOWER, clock, carrier=0, pulls=pulls)))


def compute(clock: int, *, bare: bool = False) -> Compute:
    return Compute(Work(WorkKind.TRAIN, clock, clock), (clock,), bare)


# ── the group ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def pair() -> tuple[HostGroup, HostGroup]:
    carrier, follower = HostGroup(CARRIER), HostGroup(FOLLOWER)
    for one in (carrier, follower):
        assert one.follow([CARRIER, FOLLOWER]) == []
    return carrier, follower


def test_a_step_in_a_group_is_one_push_and_one_fetch() -> None:
    carrier, follower = pair()
    assert follower.expects(4) == [Tell(CARRIER, Expects(4))]
    assert follower.expects(4) == []
    assert carrier.hear(Expects(4), FOLLOWER) == []
    assert carrier.offers((push(CARRIER, 4),)) == []
    assert carrier.waits_for == (FOLLOWER,)
    assert follower.offers((push(FOLLOWER, 4),)) == [Tell(CARRIER, Offer((push(FOLLOWER, 4),)))]
    assert follower.waits_for == (CARRIER,)
    [carry] = carrier.hear(Offer((push(FOLLOWER, 4),)), FOLLOWER)
    parts = (push(CARRIER, 4), push(FOLLOWER, 4, carrier=0)._replace(bare=True))
    assert carry == Carry((CARRIER, FOLLOWER), (HostPush(0, parts),))
    assert carrier.flushed() == [Confirm(), Tell(FOLLOWER, SumSent(4))]
    assert follower.hear(SumSent(4), CARRIER) == [Carried()]
    assert follower.computes(compute(5, bare=True)) == []
    assert carrier.computes(compute(5)) == [Tell(FOLLOWER, Fetched(5, (5,))), Begin(compute(5), 0)]
    assert follower.hear(Fetched(5, (5,)), CARRIER) == [Begin(compute(5, bare=True), CARRIER)]


def test_who_has_not_said_that_it_pushes_this_clock_is_not_waited_for() -> None:
    carrier, follower = pair()
    carrier.hear(Expects(7), FOLLOWER)
    assert carrier.offers((push(CARRIER, 4),)) == [PushAlone()]
    follower.offers((push(FOLLOWER, 4),))
    assert carrier.hear(Offer((push(FOLLOWER, 4),)), FOLLOWER) == [Tell(FOLLOWER, Alone(4))]
    assert follower.hear(Alone(4), CARRIER) == [PushAlone()]


def test_a_follower_that_goes_on_without_a_push_releases_the_carrier() -> None:
    carrier, _ = pair()
    carrier.hear(Expects(4), FOLLOWER)
    assert carrier.offers((push(CARRIER, 4),)) == []
    assert carrier.hear(Expects(5), FOLLOWER) == [PushAlone()]


def test_a_sum_is_taken_back_if_the_group_changes_before_it_has_left() -> None:
    carrier, _ = pair()
    carrier.hear(Expects(4), FOLLOWER)
    carrier.offers((push(CARRIER, 4),))
    carrier.hear(Offer((push(FOLLOWER, 4),)), FOLLOWER)
    assert carrier.follow([CARRIER, LATER]) == []
    assert carrier.flushed() == [PushAlone()]  # and no Read yet: it would confirm the sum
    assert carrier.flushed() == [Confirm()]


def test_a_follower_whose_carrier_is_gone_pushes_and_reads_for_itself() -> None:
    _, follower = pair()
    follower.offers((push(FOLLOWER, 4),))
    assert follower.follow([FOLLOWER]) == [PushAlone()]
    _, follower = pair()
    follower.offers((push(FOLLOWER, 4),))
    follower.hear(SumSent(4), CARRIER)
    assert follower.follow([FOLLOWER]) == [PushAlone()], "it may not have arrived where servers died too"
    _, follower = pair()
    assert follower.computes(compute(5, bare=True)) == []
    assert follower.follow([FOLLOWER]) == [ReadAgain()]
    assert follower.computes(compute(5, bare=True)) == [ReadAgain()]


def test_values_of_another_version_are_read_again() -> None:
    _, follower = pair()
    follower.hear(Fetched(5, (4,)), CARRIER)
    assert follower.computes(compute(5, bare=True)) == [ReadAgain()]


# ── a shard ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def primary(num_shards: int = 2, backup: int = 0) -> ShardReplica:
    policy = parse_consistency("sync")
    config = ShardConfig(shard=0, num_shards=num_shards, policy=policy, steps=9, slots=(0, 1, 2))
    replica = ShardReplica(config, SERVER)
    shards = tuple(ShardView(number, 1, SERVER, backup) for number in range(num_shards))
    replica.view(View(1, shards, (SlotView(0, CARRIER), SlotView(1, FOLLOWER), SlotView(2, 13))))
    for member, slot in ((CARRIER, 0), (FOLLOWER, 1)):
        replica.handle(Hello(0, slot, member, 0), member)
    return replica


def read(member: int, clock: int) -> Read:
    return Read(0, SLOTS[member], member, clock)


def kept(actions: list[Action]) -> list[tuple[int, int, bool]]:
    return [(one.slot, one.clock, one.carried) for one in actions if isinstance(one, Keep)]


def sent(actions: list[Action], kind: type[Any]) -> list[tuple[int, Any]]:
    return [
        (one.to, one.message)
        for one in actions
        if isinstance(one, SendMessage) and isinstance(one.message, kind)
    ]


def waiting(replica: ShardReplica) -> list[tuple[int, int]]:
    return sorted(replica.core.steps.waiting)


def test_a_sum_counts_with_all_parts_when_its_carrier_confirms_it() -> None:
    replica = primary()
    assert kept(replica.handle(whole(0), CARRIER)) == [(0, 0, False)]
    replica.handle(read(FOLLOWER, 1), FOLLOWER)
    assert waiting(replica) == []
    assert kept(replica.handle(read(CARRIER, 1), CARRIER)) == [(1, 0, True)]
    assert waiting(replica) == [(0, 0), (1, 0)]


def test_one_shard_alone_needs_no_confirmation() -> None:
    replica = primary(num_shards=1)
    replica.handle(whole(0, pulls=True), CARRIER)
    assert waiting(replica) == [(0, 0), (1, 0)]
    assert not any(kept(replica.handle(whole(0, pulls=True), CARRIER))), "sent again, it is a duplicate"


def test_the_carriers_successor_drops_a_sum_and_the_parts_count_alone() -> None:
    replica = primary()
    replica.handle(whole(0), CARRIER)
    successor = 20
    SLOTS[successor] = 0
    replica.handle(Hello(0, 0, successor, 0), successor)
    actions = replica.handle(Read(0, 0, successor, 0), successor)
    assert Drop(shard=0, slot=0, clock=0) in actions
    assert sent(actions, SendAlone) == [(FOLLOWER, SendAlone(0, 1, 0))]
    replica.handle(push(FOLLOWER, 0), FOLLOWER)
    replica.handle(read(FOLLOWER, 1), FOLLOWER)
    assert waiting(replica) == [(1, 0)]


def test_a_part_that_was_sent_alone_besides_counts_whatever_becomes_of_the_sum() -> None:
    for clock, found in ((1, [(0, 0), (1, 0)]), (0, [(1, 0)])):
        replica = primary()
        replica.handle(whole(0), CARRIER)
        replica.handle(push(FOLLOWER, 0), FOLLOWER)
        replica.handle(read(FOLLOWER, 1), FOLLOWER)
        assert waiting(replica) == [], "its slot does not decide about the sum"
        replica.handle(read(CARRIER, clock), CARRIER)
        assert waiting(replica) == found


def test_the_successor_of_a_part_is_not_welcomed_before_the_carrier_has_decided() -> None:
    from manyhands.strategies.ps.ps_messages import Welcome

    replica = primary()
    replica.handle(whole(0), CARRIER)
    assert sent(replica.handle(Hello(0, 1, LATER, 0), LATER), Welcome) == []
    actions = replica.handle(read(CARRIER, 1), CARRIER)
    assert [(to, one.next_clock) for to, one in sent(actions, Welcome)] == [(LATER, 1)]


def test_a_sum_with_an_update_that_is_here_already_is_refused() -> None:
    replica = primary()
    replica.handle(push(FOLLOWER, 0), FOLLOWER)
    replica.handle(read(FOLLOWER, 1), FOLLOWER)
    actions = replica.handle(whole(0), CARRIER)
    assert kept(actions) == []
    assert sent(actions, SendAlone) == [(CARRIER, SendAlone(0, 0, 0))]


def test_a_backup_gets_a_sum_once_and_keeps_its_parts() -> None:
    replica = primary(num_shards=1, backup=2)
    [(_, forward)] = sent(replica.handle(whole(0, pulls=True), CARRIER), Forward)
    copy = ShardReplica(replica.config, 2)
    [(_, install)] = sent(
        primary(num_shards=1, backup=2).view(View(2, (ShardView(0, 2, SERVER, 2),), ())), object
    )[:1]
    copy.handle(install, SERVER)
    assert kept(copy.handle(forward._replace(epoch=2), SERVER)) == [(0, 0, False), (1, 0, True)]
    assert waiting(copy) == [(0, 0), (1, 0)]


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Counted(Observer):
    """How many gradients and parameters were sent, by the kind of their message."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}

    def sends(self, source: int, to: int, message: Any, now_s: float) -> None:
        del source, to, now_s
        name = type(message).__name__ + (" bare" if getattr(message, "bare", False) else "")
        self.sent[name] = self.sent.get(name, 0) + 1


@pytest.mark.parametrize("shards", [1, 3])
def test_a_host_sends_and_fetches_once_a_step(shards: int) -> None:
    spec = SimulationSpec(
        workers=4,
        steps=20,
        shards=shards,
        per_host=2,
        compute=ComputeModel(step_s=0.1),
        network=NetworkModel(latency_s=1e-3),
    )
    counted = Counted()
    simulate(spec, observer=counted)
    first = 2  # until followers have said which clock they push
    assert counted.sent["HostPush"] >= 2 * shards * (spec.steps - first)
    assert counted.sent.get("Push", 0) <= 4 * shards * first
    assert counted.sent["Parameters bare"] == counted.sent["HostPush"]


FAILED_ONCE = [
    ("drawn", 0, 0, 2),
    ("drawn", 5, 0, 2),
    ("stormy", 6, 1, 2),
    ("drawn", 11, 1, 2),
    ("drawn", 147, 0, 3),
    ("drawn", 149, 1, 2),
    ("ending", 158, 0, 2),
    ("drawn", 202, 0, 3),
    ("ending", 1060, 0, 2),
    ("stormy", 1037, 1, 2),
    ("drawn", 2030, 0, 2),
    ("drawn", 2098, 0, 3),
    ("stormy", 2001, 0, 3),
    ("ending", 3090, 1, 2),
]


@pytest.mark.parametrize(("draw", "seed", "replicas", "per_host"), FAILED_ONCE)
def test_what_failed_once_holds(draw: str, seed: int, replicas: int, per_host: int) -> None:
    spec = replace(getattr(simulated, draw)(seed, "sync", replicas), per_host=per_host)
    assert simulated.complaints(spec) == []


@pytest.mark.parametrize("draw", ["drawn", "stormy", "severed"])
def test_promises_hold_with_random_faults(draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[str, int] = {}
    post = simulated_processes.SimulatedWorld.post

    def counting(world: Any, source: int, to: int, message: Any, *more: Any) -> float:
        kinds[type(message).__name__] = kinds.get(type(message).__name__, 0) + 1
        return post(world, source, to, message, *more)

    monkeypatch.setattr(simulated_processes.SimulatedWorld, "post", counting)
    for seed in range(10):
        for replicas in (0, 1):
            spec = replace(getattr(simulated, draw)(seed, "sync", replicas), per_host=2 + seed % 2)
            assert simulated.complaints(spec) == [], (seed, replicas)
    assert min(kinds.get(kind, 0) for kind in ("HostPush", "SumSent", "Alone", "SendAlone")) > 0, kinds
