"""The simulator itself: time, wires, faults, determinism, and real numbers that equal torch's own loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from manyhands.errors import ManyhandsError, UserError
from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.faults import (
    FaultRole,
    Kill,
    Pause,
    SlowLink,
    WorkerComes,
    WorkerGoes,
    draw_faults,
)
from manyhands.foresight.simulate.models import SimulatedTrained
from manyhands.foresight.simulate.simulated_processes import Agenda, Network
from manyhands.foresight.simulate.simulated_spec import ComputeModel, NetworkModel, SimulationSpec, Timing
from manyhands.foresight.simulate.witness import Witness, WitnessedPromise

FAST = Timing(start_s=0.2, silent_after_s=0.3, snapshot_every_s=0.5, limit_s=600.0)


def test_things_happen_in_the_order_of_time_and_then_of_planning() -> None:
    agenda = Agenda()
    seen: list[tuple[str, float]] = []
    for name, at_s in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        agenda.at(at_s, lambda n: seen.append((n, agenda.now_s)), name)
    agenda.at(1.5, lambda: agenda.at(0.0, lambda: seen.append(("late", agenda.now_s))))
    agenda.at(9.0, lambda: seen.append(("idle", agenda.now_s)), idly=True)
    while agenda.next():
        pass
    assert seen == [("a", 1.0), ("b", 1.0), ("late", 1.5), ("c", 2.0)]


def test_two_members_keep_their_order_and_a_wire_takes_its_time() -> None:
    network = Network(NetworkModel(latency_s=0.01, jitter_s=0.5), seed=3)
    arrivals = [network.arrival_s(1, 2, 0, now_s / 1000) for now_s in range(50)]
    assert arrivals == sorted(arrivals)
    assert network.arrival_s(1, 3, 0, 0.05) < arrivals[-1], "another pair is not held back"
    network = Network(NetworkModel(latency_s=0.01, bandwidth_bytes_per_s=1000), seed=0)
    assert network.arrival_s(1, 9, 100, 0.0) == pytest.approx(0.11)
    assert network.arrival_s(1, 9, 100, 0.0) == pytest.approx(0.21), "its own wire was busy"
    assert network.arrival_s(2, 9, 100, 0.0) == pytest.approx(0.31), "the receiver's wire was busy"
    network.slow_down(2, until_s=1.0, factor=10)
    assert network.arrival_s(2, 5, 0, 0.5) == pytest.approx(0.6)
    assert network.arrival_s(2, 5, 0, 2.0) == pytest.approx(2.01)


def test_a_run_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    spec = SimulationSpec(
        workers=4,
        steps=40,
        consistency="async",
        shards=2,
        replicas=1,
        compute=ComputeModel(spread=0.5),
        network=NetworkModel(jitter_s=0.01),
        timing=FAST,
        faults=draw_faults(5, 4, 1.0),
    )
    one, two = simulate(spec), simulate(spec)
    assert (one.logs, one.seconds, one.happenings) == (two.logs, two.seconds, two.happenings)
    other = simulate(replace(spec, seed=1))
    assert other.logs != one.logs


def test_times_follow_from_the_model() -> None:
    """Async without spread: every worker computes without a break but for a round trip and an optimizer step."""
    latency_s, apply_s = 0.01, 0.005
    spec = SimulationSpec(
        workers=1,
        steps=100,
        consistency="async",
        compute=ComputeModel(step_s=0.1),
        network=NetworkModel(latency_s=latency_s),
        timing=Timing(apply_s=apply_s),
    )
    run = simulate(spec)
    waiting_s = 2 * latency_s + apply_s
    assert run.updates_per_s == pytest.approx(1 / (0.1 + waiting_s), rel=0.01)
    assert run.waiting_share == pytest.approx(waiting_s / (0.1 + waiting_s), rel=0.02)
    assert run.times[0].num_computed == 100
    assert run.staleness() == {0: 100}


def test_bandwidth_counts() -> None:
    spec = SimulationSpec(workers=2, steps=20, consistency="async", gradient_bytes=1000)
    slow = simulate(replace(spec, network=NetworkModel(bandwidth_bytes_per_s=2000)))
    assert simulate(spec).updates_per_s > 3 * slow.updates_per_s


@pytest.mark.parametrize("role", list(FaultRole))
def test_a_death_is_told_and_made_good(role: FaultRole) -> None:
    spec = SimulationSpec(
        workers=2,
        steps=40,
        consistency="bounded:2",
        shards=2,
        replicas=1,
        timing=FAST,
        faults=(Kill(at_s=0.5, role=role, pick=0),),
    )
    witness = Witness(WitnessedPromise(steps=40, bound=2))
    run = simulate(spec, observer=witness)
    whats = [happening.what for happening in run.happenings if "left" not in happening.what]
    assert whats == [
        f"{role.value} killed",
        "recovered slot 0" if role is FaultRole.WORKER else "recovered every shard",
    ]
    assert witness.complaints(run) == []


def test_a_paused_worker_is_fenced_and_comes_back() -> None:
    spec = SimulationSpec(
        workers=2,
        steps=60,
        consistency="async",
        timing=FAST,
        faults=(
            Pause(at_s=0.5, seconds=0.8, role=FaultRole.WORKER, pick=0),
            Kill(at_s=1.6, role=FaultRole.WORKER, pick=1),
        ),
    )
    run = simulate(spec)
    whats = [happening.what for happening in run.happenings]
    fenced = next(index for index, what in enumerate(whats) if "is held by member" in what)
    assert whats.index("recovered slot 0") < fenced < whats.index("worker killed")
    killed, recovered = (
        next(h for h in run.happenings[fenced:] if h.what.startswith(what))
        for what in ("worker", "recovered")
    )
    assert recovered.at_s - killed.at_s < FAST.start_s / 2, "it stood by, and was there at once"


def test_workers_come_and_go() -> None:
    faults = (
        WorkerComes(at_s=0.5),
        WorkerGoes(at_s=1.2, pick=0),
        SlowLink(at_s=0.1, seconds=1, factor=9, role=FaultRole.WORKER, pick=1),
    )
    spec = SimulationSpec(workers=2, steps=60, consistency="bounded:1", shards=2, timing=FAST, faults=faults)
    witness = Witness(WitnessedPromise(steps=60, bound=1))
    run = simulate(spec, observer=witness)
    assert witness.complaints(run) == []
    assert set(run.times) == {0, 1, 2}
    assert any("slot 0 was removed" in happening.what for happening in run.happenings)
    alone = SimulationSpec(workers=1, steps=10, timing=FAST, faults=(WorkerGoes(at_s=0.3, pick=0),))
    assert any("refused" in happening.what for happening in simulate(alone).happenings)


def test_a_shard_without_copy_or_snapshot_ends_the_run() -> None:
    faults = (Kill(at_s=0.5, role=FaultRole.SERVER, pick=0),)
    spec = SimulationSpec(workers=2, steps=60, can_restore=False, faults=faults)
    with pytest.raises(ManyhandsError, match="shard 0 is lost"):
        simulate(spec)
    run = simulate(replace(spec, can_restore=True, timing=FAST))
    assert any("restored" in happening.what for happening in run.happenings)


def test_a_run_that_does_not_end_says_who_waits_for_what() -> None:
    spec = SimulationSpec(workers=1, steps=1000, timing=Timing(limit_s=5.0), compute=ComputeModel(step_s=0.1))
    with pytest.raises(ManyhandsError, match=r"did not end: at 5\.\d* s"):
        simulate(spec)


# ── real numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────

DATA = torch.randn(24, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGET = torch.randn(24, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def batch_rows(batch: int) -> torch.Tensor:
    return torch.arange(batch * 7, batch * 7 + 7) % len(DATA)


def loss(module: nn.Module, batch: int, part: int, parts: int) -> torch.Tensor:
    rows = batch_rows(batch).tensor_split(parts)[part]
    return nn.functional.mse_loss(module(DATA[rows]), TARGET[rows])


def weight(batch: int, part: int, parts: int) -> float:
    return len(batch_rows(batch).tensor_split(parts)[part]) / 7


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def module() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(5, 2, dtype=torch.float64)


@pytest.mark.parametrize("make_optimizer", [adam, momentum])
@pytest.mark.parametrize(
    ("workers", "consistency"),
    [(1, "async"), (1, "bounded:3"), (1, "softsync:1"), (1, "aware:async"), (3, "sync"), (3, "bounded:0")],
)
@pytest.mark.parametrize("replicas", [0, 1])
def test_the_weights_are_those_of_a_plain_loop(
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    workers: int,
    consistency: str,
    replicas: int,
) -> None:
    """With a server killed on the way, where a replica takes over."""
    steps = 25
    plain = module()
    optimizer = make_optimizer(list(plain.parameters()))
    for batch in range(steps):
        optimizer.zero_grad()
        loss(plain, batch, 0, 1).backward()
        optimizer.step()
    model = SimulatedTrained(module(), loss, make_optimizer, weight)
    faults = (Kill(at_s=0.5, role=FaultRole.SERVER, pick=0),) if replicas else ()
    spec = SimulationSpec(
        workers=workers,
        steps=steps,
        consistency=consistency,
        shards=2,
        replicas=replicas,
        model=model,
        timing=FAST,
        faults=faults,
    )
    run = simulate(spec)
    assert run.num_steps == steps
    assert len(faults) == sum("killed" in happening.what for happening in run.happenings)
    trained = model.show([store.read() for store in run.stores])
    for mine, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_a_module_with_buffers_is_refused() -> None:
    with pytest.raises(UserError, match="buffers"):
        SimulatedTrained(nn.BatchNorm1d(3), loss, adam)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: SimulationSpec(workers=0, steps=1), "workers=0"),
        (lambda: SimulationSpec(workers=1, steps=0), "steps=0"),
        (lambda: SimulationSpec(workers=1, steps=1, shards=0), "shards=0"),
        (lambda: SimulationSpec(workers=1, steps=1, replicas=2), "replicas=2"),
        (lambda: SimulationSpec(workers=1, steps=1, gradient_bytes=-1), "gradient_bytes=-1"),
        (lambda: SimulationSpec(workers=1, steps=1, consistency="asink"), "did you mean 'async'"),
        (lambda: ComputeModel(step_s=0), "step_s=0"),
        (lambda: ComputeModel(factors={3: -1.0}), r"factors\[3\]=-1.0"),
        (lambda: ComputeModel(delay_probability=2), "delay_probability=2"),
        (lambda: NetworkModel(latency_s=-1), "latency_s=-1"),
        (lambda: NetworkModel(bandwidth_bytes_per_s=0), "bandwidth_bytes_per_s=0"),
        (lambda: Timing(start_s=math.inf), "start_s=inf"),
        (lambda: Timing(apply_s=-1), "apply_s=-1"),
        (lambda: Kill(at_s=-1, role=FaultRole.WORKER, pick=0), "at_s=-1"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(UserError, match=match):
        make()
