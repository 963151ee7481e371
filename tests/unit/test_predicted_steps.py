"""Where the time of a step is predicted to go, against closed forms and against what must not change it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts import Answer, ComputeTime, LayerTimes, LinkRate, Machines, ModelFootprint, TaskProfile
from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.simulated_spec import ComputeModel, NetworkModel, SimulationSpec, Timing
from manyhands.strategies.common import step_times
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS, grouped
from manyhands.strategies.common.collectives.schedule_proof import cost
from manyhands.strategies.common.step_times import (
    all_reduce_s,
    beyond_backward_s,
    buckets_of,
    gathered_s,
    is_modelled,
)
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy
from manyhands.wire.codec import codec_named
from manyhands.wire.parcels import Parcel

ALPHA, RATE, ADDED = 1e-4, 1e8, 1e9
LINK = LinkRate(latency_s=ALPHA, bytes_per_s=RATE)
SIZE = 64 * 63 * 65 * 4  # which many numbers of workers divide into whole items


def profile(
    layers: int = 8, *, batch: int = 64, num_bytes: int = 1 << 20, fixed_s: float = 0.0
) -> TaskProfile:
    """Layers that are alike: a forward of 1 ms and a backward of 2 ms for each sample of the model."""
    each = LayerTimes(
        name="layer",
        forward=ComputeTime(fixed_s=fixed_s, per_sample_s=1e-3 / layers),
        backward=ComputeTime(fixed_s=2 * fixed_s, per_sample_s=2e-3 / layers),
        gradient_bytes=num_bytes,
        output_bytes=1000.0,
    )
    size = layers * num_bytes
    model = ModelFootprint(parameters=size, gradients=size, state=2 * size, batch_size=batch)
    return TaskProfile(layers=(each,) * layers, model=model, optimizer_s=5e-3)


def hosts(number: int, per_host: int, **links: LinkRate) -> Machines:
    return Machines(
        hosts=number, per_host=per_host, **{"memory": LINK, "inside": LINK, "between": LINK, **links}
    )


def predicted(text: str, machines: Machines, of: TaskProfile | None = None) -> float:
    found = Strategy.parse(text).predict(of or profile(), machines)
    assert found is not None, text
    return found.seconds


def part(workers: int) -> float:
    return 2 * (workers - 1) / workers * SIZE / RATE


FORMS = {
    "ring": lambda p: 2 * (p - 1) * ALPHA + part(p),
    "direct": lambda p: 2 * (p - 1) * ALPHA + part(p),
    "round-robin": lambda p: 2 * (p - 1) * ALPHA + part(p),
    "doubling": lambda p: (p - 1).bit_length() * (ALPHA + SIZE / RATE),
    "butterfly": lambda p: 2 * (p - 1).bit_length() * ALPHA + part(p),
    "tree": lambda p: 2 * (p - 1).bit_length() * (ALPHA + SIZE / RATE),
    "all-to-all": lambda p: (p - 1) * (ALPHA + SIZE / RATE),
    "master-worker": lambda p: 2 * (p - 1) * (ALPHA + SIZE / RATE),
}


@pytest.mark.parametrize("algorithm", FORMS)
@pytest.mark.parametrize("workers", [2, 4, 8, 64, 256])
def test_an_all_reduce_on_one_host_takes_its_closed_form(algorithm: str, workers: int) -> None:
    size = SIZE // (64 * 4) * 64 * 4
    if not is_modelled(algorithm, hosts(1, workers)):
        assert workers == 256
        return
    got = all_reduce_s(algorithm, hosts(1, workers), size)
    assert got == pytest.approx(FORMS[algorithm](workers), rel=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "tolerance"),
    [("ring", 0.01), ("direct", 0.02), ("hierarchical", 0.01), ("butterfly", 0.35)],
)
def test_many_workers_are_predicted_as_those_that_are_played(
    algorithm: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = LinkRate(latency_s=10 * ALPHA, bytes_per_s=RATE / 20)
    for machines in (hosts(8, 8, between=slow), hosts(16, 4, between=slow), hosts(4, 16, between=slow)):
        played = all_reduce_s(algorithm, machines, SIZE)
        with monkeypatch.context() as patch:
            patch.setattr(step_times, "_PLAYED", 1)
            assert all_reduce_s(algorithm, machines, SIZE) == pytest.approx(played, rel=tolerance), machines


def test_workers_of_a_host_share_its_link_to_the_others() -> None:
    """A ring crosses the link of a host once each way; all messages of `direct` between two hosts share one."""
    fast = LinkRate(bytes_per_s=1e15)
    slow = LinkRate(bytes_per_s=RATE)
    machines = hosts(2, 4, memory=fast, inside=fast, between=slow)
    assert all_reduce_s("ring", machines, SIZE) == pytest.approx(2 * 7 / 8 * SIZE / RATE, rel=1e-3)
    assert all_reduce_s("direct", machines, SIZE) == pytest.approx(2 * 4 * 4 / 8 * SIZE / RATE, rel=0.1)
    assert all_reduce_s("hierarchical", machines, SIZE) == pytest.approx(2 / 2 * SIZE / RATE, rel=1e-3)


@pytest.mark.parametrize("factor", [1.0, 0.037, 1e5 / 3])
@pytest.mark.parametrize("algorithm", ["ring", "direct", "hierarchical"])
def test_a_play_that_is_kept_is_that_of_the_schedule_itself(algorithm: str, factor: float) -> None:
    """Links that are all so many times as fast are not played again; the time is as if they were."""
    machines = Machines(
        hosts=4,
        per_host=2,
        inside=LinkRate(latency_s=ALPHA / 7 / factor, bytes_per_s=3 * RATE * factor),
        between=LinkRate(latency_s=ALPHA / factor, bytes_per_s=RATE * factor),
    )
    known = grouped(2) if algorithm == "hierarchical" else ALGORITHMS[algorithm]
    played = cost(known, 8, SIZE, 4).time_on(machines)
    assert all_reduce_s(algorithm, machines, SIZE) == pytest.approx(played, rel=1e-10)


def test_buckets_are_filled_from_the_last_layer_on() -> None:
    of = profile(3, num_bytes=100)
    assert buckets_of(of.layers, 150) == [(1, 150.0), (0, 150.0)]
    assert buckets_of(of.layers, 1000) == [(0, 300.0)]
    assert buckets_of(of.layers, 60) == [(2, 60.0), (1, 60.0), (1, 60.0), (0, 60.0), (0, 60.0)]


@pytest.mark.parametrize("exchange_s", [0.02, 0.1, 0.128, 0.3, 1.0])
def test_many_small_buckets_hide_behind_backward(exchange_s: float) -> None:
    """With many layers, a step is forward + max(backward, exchange)."""
    of = profile(200, num_bytes=1000)
    backward_s = of.backward_s(64)
    beyond = beyond_backward_s(of, 64, buckets_of(of.layers, 1000), lambda size: exchange_s * size / 200_000)
    assert beyond == pytest.approx(max(0.0, exchange_s - backward_s), abs=2e-3)


def test_layers_are_gathered_one_ahead() -> None:
    assert gathered_s([1.0] * 4, [0.5] * 4) == pytest.approx(0.5 + 4)
    assert gathered_s([1.0] * 4, [3.0] * 4) == pytest.approx(4 * 3 + 1)
    assert gathered_s([0.0] * 4, [3.0] * 4) == pytest.approx(12)


MODELLED = [
    "mirrored", "allreduce algorithm=ring link=tcp", "central", "sharded", "ps", "ps servers=2 consistency=async",
    "ps link=tcp consistency=bounded:2", "hogwild", "local steps=4", "local steps=4 link=tcp", "pipeline", "tensor",
    "tensor slices=2", "allreduce link=tcp codec=bf16", "allreduce link=tcp codec=int8", "ps link=tcp codec=int8",
    "allreduce link=tcp codec=topk:0.01", "local link=tcp codec=topk:0.1",
    "single device_memory=1GiB",
]  # fmt: skip
NOT_MODELLED = [
    "federated", "allreduce link=tcp codec=auto", "allreduce link=tcp codec=powersgd:2", "allreduce link=nccl",
    "local gossip=yes", "local outer=elastic", "ps replicas=1", "hogwild order=turns", "pipeline stages=2 tensor=2",
]  # fmt: skip


def test_each_strategy_is_modelled_or_says_that_it_is_not() -> None:
    assert {text.partition(" ")[0] for text in [*MODELLED, *NOT_MODELLED]} == STRATEGIES.keys()
    for text in NOT_MODELLED:
        assert Strategy.parse(text).predict(profile(), hosts(1, 4)) is None, text


OTHER_WORK = (
    "async",
    "bounded",
    "hogwild",
    "pipeline",
    "single",
)  # whole batches each, one worker, or waiting
SPLIT = [text for text in MODELLED if not any(word in text for word in OTHER_WORK)]


@pytest.mark.parametrize("text", SPLIT)
def test_with_links_that_take_no_time_only_computing_is_left(text: str) -> None:
    free = LinkRate()
    machines = hosts(1, 4, memory=free, inside=free, between=free)
    found = Strategy.parse(text).predict(profile(), machines)
    assert found is not None
    assert found.compute_s == pytest.approx(16 * 3e-3)
    assert found.exchange_s == pytest.approx(0.0, abs=1e-9)
    assert found.seconds == pytest.approx(found.compute_s + found.optimizer_s)


ALONE = [
    "mirrored",
    "central",
    "local steps=4",
    "hogwild",
    "sharded",
    "tensor",
    "pipeline stages=1 microbatches=1",
]


@pytest.mark.parametrize("text", ALONE)
def test_one_worker_is_single(text: str) -> None:
    free = LinkRate()
    machines = hosts(1, 1, memory=free, inside=free)
    assert predicted(text, machines) == pytest.approx(predicted("single", machines))


@given(st.sampled_from(MODELLED), st.floats(1e6, 1e10), st.floats(1.0, 100.0), st.sampled_from([2, 4, 8]))
def test_a_faster_link_or_a_shorter_latency_is_never_slower(
    text: str, rate: float, factor: float, workers: int
) -> None:
    slow = LinkRate(latency_s=1e-3, bytes_per_s=rate)
    fast = LinkRate(latency_s=1e-3 / factor, bytes_per_s=rate * factor)
    slower, faster = (hosts(1, workers, memory=one, inside=one) for one in (slow, fast))
    assert predicted(text, faster) <= predicted(text, slower) * (1 + 1e-9)


HOSTS = [text for text in MODELLED if "hogwild" not in text]  # whose memory is one host's


@given(st.sampled_from(HOSTS), st.floats(1e6, 1e10), st.floats(1.0, 100.0), st.sampled_from([1, 2, 4]))
def test_a_faster_link_between_hosts_is_never_slower(
    text: str, rate: float, factor: float, per_host: int
) -> None:
    slow = LinkRate(latency_s=1e-3, bytes_per_s=rate)
    fast = LinkRate(latency_s=1e-3 / factor, bytes_per_s=rate * factor)
    slower, faster = (hosts(2, per_host, between=one) for one in (slow, fast))
    assert predicted(text, faster) <= predicted(text, slower) * (1 + 1e-9)


FREE = LinkRate()


def coded(num_bytes: float) -> float:
    codec = codec_named("topk:0.001")
    assert codec is not None
    return codec.size(Parcel.whole(0, round(num_bytes / 4), torch.float32))


OUTPUT = 64 * 1000.0  # bytes of what a layer hands on, of a whole batch
LEAVING = {
    # Bytes that leave each of two hosts of many workers each, of a model of so many bytes; they all go over one link.
    # A ring leaves a host by its last worker, a hierarchy by a part of each, `central` by the first
    "allreduce algorithm=ring": lambda size, many: 2 * (2 * many - 1) / (2 * many) * size,
    "allreduce algorithm=hierarchical": lambda size, many: size,
    "allreduce algorithm=ring link=tcp codec=bf16": lambda size, many: (2 * many - 1) / (2 * many) * size,
    "allreduce link=tcp codec=topk:0.001": lambda size, many: many * many * coded(size),  # of each to all
    "central": lambda size, many: size,
    "sharded": lambda size, many: 3 * many * many * size / (2 * many),
    "local steps=1": lambda size, many: 3 * size,  # and Adam's state
    "ps": lambda size, many: 2 * 2 * size,  # the server's link, each way, once for each host
    "tensor": lambda size, many: 2 * 8 * many * many * OUTPUT,  # so few bytes go to each other slice at once
    "pipeline stages=2 cuts=4": lambda size, many: many / 2 * size,  # both stages sum over all replicas
}


@pytest.mark.parametrize("per_host", [2, 4, 8])
@pytest.mark.parametrize("text", LEAVING)
def test_workers_of_a_host_share_its_link_under_every_strategy(text: str, per_host: int) -> None:
    of, nothing = profile(num_bytes=SIZE), ComputeTime()
    layers = tuple(replace(one, forward=nothing, backward=nothing) for one in of.layers)
    idle = replace(of, layers=layers, optimizer_s=0.0)
    slow = LinkRate(bytes_per_s=RATE)
    machines = hosts(2, per_host, memory=FREE, inside=FREE, between=slow)
    expected = LEAVING[text](8 * SIZE, per_host) / RATE
    # Messages of `direct` wait for each other at both ends of the link.
    assert predicted(text, machines, idle) == pytest.approx(expected, rel=0.15 if text == "sharded" else 0.02)


def test_stages_on_two_hosts_are_as_slow_as_the_link_between_them() -> None:
    """The outputs of all micro-batches go one after the other, and the last gradient comes back."""
    of, nothing = profile(), ComputeTime()
    layers = tuple(replace(one, forward=nothing, backward=nothing) for one in of.layers)
    idle = replace(of, layers=layers, optimizer_s=0.0)
    machines = hosts(2, 1, between=LinkRate(bytes_per_s=RATE))
    got = predicted("pipeline stages=2 microbatches=8 schedule=gpipe", machines, idle)
    assert got == pytest.approx(2 * 8 * OUTPUT / 8 / RATE, rel=0.15)


def test_a_slice_of_half_of_every_layer_computes_half_and_sums_each_layer_twice() -> None:
    found = Strategy.parse("tensor").predict(profile(), hosts(1, 2))
    assert found is not None
    assert found.compute_s == pytest.approx(64 * 3e-3 / 2)
    assert found.exchange_s == pytest.approx(2 * 8 * (ALPHA + OUTPUT / RATE))
    assert found.optimizer_s == pytest.approx(5e-3 / 2)


def test_replicas_of_slices_sum_what_a_slice_has() -> None:
    whole, halves = (
        Strategy.parse(text).predict(profile(), hosts(1, 4)) for text in ("tensor", "tensor slices=2")
    )
    assert whole is not None
    assert halves is not None
    assert whole.compute_s == pytest.approx(halves.compute_s)
    summed_s = (
        2 * ALPHA + 4 * (1 << 20) / RATE
    )  # of 8 MiB, half is held, and two replicas send half of that twice
    assert halves.exchange_s == pytest.approx(2 * 8 * (ALPHA + OUTPUT / 2 / RATE) + summed_s)


def test_layers_that_come_and_go_take_the_time_of_their_bytes() -> None:
    of, nothing = profile(), ComputeTime()
    layers = tuple(replace(one, forward=nothing, backward=nothing) for one in of.layers)
    machines = hosts(1, 1, memory=LinkRate(bytes_per_s=RATE))
    found = Strategy.parse("single device_memory=1GiB").predict(replace(of, layers=layers), machines)
    assert found is not None
    values = 8 * (
        1 << 20
    )  # come in forward, and in backward with Adam's state; the last to go back is waited for
    assert found.exchange_s == pytest.approx((values + 3 * values + 3 * (1 << 20)) / RATE)


def test_more_is_considered_where_the_numbers_may_be_others() -> None:
    kinds = [entry.load_value() for entry in STRATEGIES.values()]
    for machines in (hosts(1, 2), hosts(2, 8)):
        plain, lossy = (
            [one for kind in kinds for one in kind.choices(machines, lossy=many)] for many in (False, True)
        )
        added = set(map(str, lossy)) - set(map(str, plain))
        equal = [one for one in lossy if one.facts.promises.same_numbers.answer is Answer.YES]
        assert added
        assert not added & set(map(str, equal))
        assert {"local steps=32", f"ps servers={machines.workers} consistency=bounded:4"} <= added
        assert any("codec=" in text for text in added) is (machines.hosts > 1)
        assert len(lossy) < 60


@given(st.sampled_from(MODELLED), st.floats(0.1, 10.0))
def test_time_scales_with_its_unit(text: str, factor: float) -> None:
    of, machines = profile(), hosts(1, 4)

    def scaled(one: ComputeTime) -> ComputeTime:
        return ComputeTime(fixed_s=factor * one.fixed_s, per_sample_s=factor * one.per_sample_s)

    layers = tuple(
        replace(one, forward=scaled(one.forward), backward=scaled(one.backward)) for one in of.layers
    )
    slower = replace(of, layers=layers, optimizer_s=factor * of.optimizer_s)
    link = LinkRate(latency_s=factor * ALPHA, bytes_per_s=RATE / factor)
    got = predicted(text, hosts(1, 4, memory=link, inside=link), slower)
    assert got == pytest.approx(factor * predicted(text, machines, of), rel=1e-9)


def test_sharded_moves_each_layer_three_times_where_computing_takes_no_time() -> None:
    of = profile()
    nothing = ComputeTime()
    idle = replace(of, layers=tuple(replace(one, forward=nothing, backward=nothing) for one in of.layers))
    move_s = 3 * ALPHA + 3 / 4 * (1 << 20) / RATE
    found = Strategy.parse("sharded").predict(replace(idle, optimizer_s=0.0), hosts(1, 4))
    assert found is not None
    assert found.seconds == pytest.approx(3 * 8 * move_s, rel=1e-3)


def test_a_pipeline_of_equal_stages_takes_m_plus_p_minus_1_slots() -> None:
    free = LinkRate()
    found = Strategy.parse("pipeline stages=4 microbatches=8").predict(
        replace(profile(), optimizer_s=0.0), hosts(1, 4, inside=free)
    )
    assert found is not None
    slot_s = 64 / 8 * 3e-3 / 4
    assert found.seconds == pytest.approx((8 + 4 - 1) * slot_s)
    assert found.waiting_s == pytest.approx(3 * slot_s)


def test_replicas_of_a_pipeline_sum_what_a_stage_has() -> None:
    """Both stages of a host at once, over its one link."""
    free = LinkRate()
    machines = hosts(2, 2, inside=free)
    found = Strategy.parse("pipeline stages=2").predict(profile(), machines)
    assert found is not None
    assert found.exchange_s == pytest.approx(2 * (2 * ALPHA + 4 * (1 << 20) / RATE), rel=1e-3)


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_servers_in_step_carry_the_shards_of_all_workers(servers: int) -> None:
    """w / S is the whole story, down to one worker's own link."""
    of, machines = profile(), hosts(1, 4)
    size = of.model.gradients
    found = Strategy.parse(f"ps servers={servers} link=tcp").predict(of, machines)
    assert found is not None
    assert found.exchange_s == pytest.approx(2 * 4 / servers * size / RATE, rel=0.01)


@pytest.mark.parametrize(("workers", "step_ms"), [(1, 40.0), (4, 40.0), (8, 40.0), (16, 10.0)])
def test_asynchronous_servers_are_as_fast_as_in_the_simulator(workers: int, step_ms: float) -> None:
    """Until the server is busy all the time: then it is the server that counts."""
    of = profile(1, batch=1)
    compute = ComputeTime(fixed_s=step_ms / 1000)
    of = replace(
        of, layers=(replace(of.layers[0], forward=compute, backward=ComputeTime()),), optimizer_s=5e-3
    )
    free = LinkRate()
    run = simulate(
        SimulationSpec(
            workers=workers,
            steps=200 * workers,
            consistency="async",
            compute=ComputeModel(step_s=step_ms / 1000),
            network=NetworkModel(latency_s=0.0),
            timing=Timing(apply_s=5e-3),
        )
    )
    assert run.updates_per_s == pytest.approx(
        1 / predicted("ps consistency=async", hosts(1, workers, memory=free), of), rel=0.15
    )


@pytest.mark.parametrize(("servers", "expected"), [(1, 1.0), (2, 4 / 3 / 2), (4, 2.0 / 4)])
def test_one_server_steps_as_fast_as_alone_and_as_many_as_workers_as_fast_as_these(
    servers: int, expected: float
) -> None:
    measured = replace(profile(), optimizer_s=3.0, owners_s=2.0, owner_alone_s=1.0)
    assert measured.served_s(servers, 4) == pytest.approx(expected)
    assert replace(measured, owner_alone_s=None).served_s(servers, 4) == pytest.approx(2.0 / servers)


def test_owners_of_slices_step_in_one_pass() -> None:
    measured = replace(profile(), optimizer_s=3.0, owners_s=2.0)
    central, mirrored = (
        Strategy.parse(text).predict(measured, hosts(1, 4)) for text in ("central", "mirrored")
    )
    assert central is not None
    assert mirrored is not None
    assert (central.optimizer_s, mirrored.optimizer_s) == (2.0 / 4, 3.0)
