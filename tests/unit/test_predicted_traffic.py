"""What strategies say that they send, against closed forms and against the code that sends."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.engine.exchange import LocalStep, Traffic
from manyhands.facts import (
    ModelFootprint,
)
from manyhands.foresight.estimate import estimate
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.collective_traffic import sent_over_links
from manyhands.strategies.common.collectives.schedule_proof import cost
from manyhands.strategies.common.grid import grid_group
from manyhands.strategies.common.grid.grid_group import LinkGroup, PlayedGroup
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import (
    Strategy,
    WorkerTraffic,
)
from manyhands.wire.parcels import Parcel
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import next_byte_loss

BATCH, TIME, WIDTH = 16, 64, 64


@cache
def layers(width: int = 512, **more: Any) -> ModelFootprint:
    """Of layers wide enough that what workers agree on besides is little, and evenly cut."""
    task = mh.Task(
        model=lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4))),
        loss=lambda model, batch: model(batch).square().mean(),
        data=torch.zeros(64, width),
        optimizer=lambda parameters: torch.optim.Adam(parameters),
        batch_size=BATCH,
        **more,
    )
    return estimate(task).footprint


@cache
def transformer(blocks: int) -> ModelFootprint:
    task = mh.Task(
        model=lambda: GPT(context=TIME, layers=blocks, width=WIDTH, heads=4, vocabulary=48),
        loss=next_byte_loss,
        data=torch.zeros(64, TIME + 1, dtype=torch.uint8),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=BATCH,
    )
    return estimate(task).footprint


def sent(text: str, workers: int, model: ModelFootprint | None = None) -> dict[str, WorkerTraffic]:
    rows = Strategy.parse(text).sends(model or layers(), workers)
    assert rows is not None
    return {row.who: row for row in rows}


@pytest.mark.parametrize("workers", range(2, 9))
def test_workers_send_what_closed_forms_say(workers: int) -> None:
    model = layers()
    weights, own = model.parameters, 1 / workers
    forms = {
        "mirrored": 2 * (1 - own) * weights,
        "allreduce algorithm=ring": 2 * (1 - own) * weights,
        "allreduce link=tcp": 2 * (1 - own) * weights,
        "allreduce algorithm=ring link=tcp codec=bf16": (1 - own) * weights,
        "allreduce algorithm=all-to-all": (workers - 1) * weights,
        "central": (1 - own) * weights,  # parameters are read where their owners write them
        "sharded": (3 - 1 / 4)
        * (1 - own)
        * weights,  # the first of four layers has no use for its own in backward
        "ps link=tcp": weights,
        "ps link=tcp consistency=async": weights * own,  # each batch is one worker's
        f"local steps={workers} link=tcp": 2 * (1 - own) * (weights + model.state) / workers,
        "local steps=inf": 0,
        "hogwild": 0,
    }
    for text, expected in forms.items():
        assert sent(text, workers)["worker"].num_bytes == pytest.approx(expected, rel=0.01), text


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (4, 2), (8, 3), (3, 5)])
def test_servers_send_their_shards_to_every_worker(workers: int, servers: int) -> None:
    weights = layers().parameters
    rows = sent(f"ps servers={servers} link=tcp", workers)
    assert rows["worker"].num_bytes == pytest.approx(weights, rel=0.01)
    assert rows["server"].num_bytes == workers * weights / servers
    assert sent(f"ps servers={servers}", workers)["server"].num_bytes == 0  # workers read what all share
    kept_twice = sent(f"ps servers={servers} replicas=1 link=tcp", workers)["server"]
    assert kept_twice.count * kept_twice.num_bytes == pytest.approx(2 * workers * weights, rel=0.01)


@pytest.mark.parametrize("slices", [2, 4])
def test_a_block_in_slices_sums_four_activations(slices: int) -> None:
    """Two in forward and two in backward (Shoeybi et al. 2019), each of a batch's b · s · h numbers."""
    text = f"tensor slices={slices}"
    three, two = (sent(text, slices, transformer(blocks))["worker"] for blocks in (3, 2))
    activation = BATCH * TIME * WIDTH * torch.float32.itemsize
    assert three.num_bytes - two.num_bytes == 8 * (slices - 1) / slices * activation
    assert three.messages - two.messages == 4 * 2 * (slices - 1)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_border_of_a_pipeline_is_passed_in_both_directions(stages: int) -> None:
    model = transformer(4)
    text = f"pipeline stages={stages} microbatches=4 cuts={','.join(str(2 * k) for k in range(1, stages))}"
    rows = sent(text, stages, model)["worker"]
    activation = BATCH * TIME * WIDTH * torch.float32.itemsize
    tied = 48 * WIDTH * torch.float32.itemsize  # by the first and the last stage
    expected = 2 * (stages - 1) * activation + 2 * tied
    assert rows.count * rows.num_bytes == pytest.approx(expected, rel=0.001)


def test_helpers_take_load_off_the_workers() -> None:
    rows, weights = sent("allreduce helpers=4 link=tcp", 4), layers().parameters
    assert rows["worker"].num_bytes == pytest.approx(weights, rel=0.01)
    assert rows["helper"].num_bytes == pytest.approx(weights, rel=0.01)
    assert rows["helper"].count == 4


def test_clients_send_an_update_each() -> None:
    rows = sent("federated clients=8 fraction=0.5", 2)
    assert rows == {"client": WorkerTraffic(who="client", count=4, num_bytes=layers().parameters, messages=1)}
    fewer = sent("federated clients=8 fraction=0.5 codec=bf16", 2)["client"]
    assert fewer.num_bytes == layers().parameters / 2


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_a_schedule_sends_what_it_costs(name: str, world: int) -> None:
    parcel = Parcel.whole(0, 1001, torch.float64)
    costs = cost(ALGORITHMS[name], world, parcel.num_bytes, 8)
    whole, of_helpers = sent_over_links(ALGORITHMS[name], world, [parcel, parcel])
    assert whole == Traffic(messages_sent=2 * sum(costs.messages), bytes_sent=2 * sum(costs.bytes_sent))
    assert of_helpers == Traffic()


@pytest.mark.parametrize("world", range(1, 10))
@pytest.mark.parametrize("name", [name for name, one in ALGORITHMS.items() if one.rotates])
def test_every_rank_of_a_table_that_rotates_does_what_rank_0_does(name: str, world: int) -> None:
    def sends(rank: int) -> list[set[tuple[int, int]]]:
        """By round: to whom which chunk goes, counted from the rank itself."""
        return [
            {((send.to - rank) % world, (send.chunks[0] - rank) % world) for send in step.sends}
            for step in ALGORITHMS[name].table(rank, world)
        ]

    tables = [ALGORITHMS[name].table(rank, world) for rank in range(world)]
    assert all(len(send.chunks) == 1 for table in tables for step in table for send in step.sends)
    assert all(sends(rank) == sends(0) for rank in range(world))


class CountedGroup(LinkGroup):
    """Calls `exchange` as any group does, and counts what it would send."""

    def __init__(self, index: int, world: int) -> None:
        super().__init__(index, range(world), {}, 1.0, kind=0)
        self.sent = Traffic()

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        self.sent += Traffic(messages_sent=len(sends), bytes_sent=sum(one.nbytes for one in sends.values()))
        for space in receives.values():
            space.zero_()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("items", [0, 1, 32 << 10, (32 << 10) + 1, 100_003])
def test_a_group_says_what_its_sum_sends(world: int, items: int) -> None:
    """And its first member what each of them sends: pieces of a sum that world does not divide differ."""
    total, first = Traffic(), PlayedGroup(0, world)
    sizes = [[items + (index < 2)] for index in range(world)]
    first.all_gather(torch.ones(sizes[0]), sizes)
    first.all_reduce(torch.ones(items))
    for index in range(world):
        counted, played = CountedGroup(index, world), PlayedGroup(index, world)
        counted.all_reduce(torch.ones(items))
        played.all_reduce(torch.ones(items))
        assert played.traffic() == counted.sent
        total += counted.sent
        counted.all_gather(torch.ones(sizes[index]), sizes)
        assert first.traffic_of(index) == counted.sent
    assert grid_group.traffic_of_sum(4 * items, world) == total


def test_a_group_says_what_it_takes_to_sum_gradients_and_to_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_group, "_BUCKET_BYTES", 150_000)
    parameters = [nn.Parameter(torch.ones(size)) for size in (10, 40_000, 7, 20_000)]
    parameters += [nn.Parameter(torch.ones(5, dtype=torch.float64)), nn.Parameter(torch.ones(3))]
    total = agreed = Traffic()
    for index in range(3):
        for parameter in parameters[:-1]:  # no backward has reached the last one
            parameter.grad = torch.ones_like(parameter)
        counted = CountedGroup(index, 3)
        grid_group.sum_gradients(counted, parameters)
        total += counted.sent
        counted = CountedGroup(index, 3)
        grid_group.agree_on(counted, LocalStep(loss=1.0, share=0.5))
        agreed += counted.sent
    assert grid_group.traffic_of_gradients(3, parameters) == total
    assert grid_group.traffic_of_agreement(3) == agreed


@pytest.mark.parametrize(
    "text",
    [
        "allreduce link=nccl",
        "allreduce link=tcp codec=auto:0.01",
        "allreduce link=tcp codec=topk:0.01,sampled",
        "allreduce link=tcp codec=dgc:0.01,warmup=8",
        "local link=tcp codec=auto",
        "ps consistency=sync:1",
        "pipeline stages=2 tensor=2 recompute=yes",
        "federated secure=yes",
        "federated clip=1.0",
        "federated dropout=0.1",
        "federated partition=natural",
    ],
)
def test_what_is_not_modelled_says_so(text: str) -> None:
    assert Strategy.parse(text).sends(layers(), 4) is None


def test_cuts_that_are_measured_are_modelled_where_they_make_no_difference() -> None:
    uneven = mh.Task(
        model=lambda: nn.Sequential(
            nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1)
        ),
        loss=lambda model, batch: model(batch).square().mean(),
        data=torch.zeros(64, 64),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=BATCH,
    )
    model = estimate(uneven).footprint
    assert Strategy.parse("pipeline").sends(model, 2) is None
    assert sent("pipeline cuts=2", 2, model)["worker"].num_bytes > 0
    assert sent("pipeline", 2)["worker"].num_bytes > 0  # all layers hand on as much


def test_a_strategy_without_a_model_to_lay_out_says_nothing() -> None:
    bare = ModelFootprint(parameters=100, gradients=100)
    silent = {word for word in STRATEGIES if Strategy.parse(word).sends(bare, 1 if word == "single" else 4)}
    assert silent == {"single", "hogwild"}


@pytest.mark.parametrize("text", ["mirrored", "central", "sharded", "local", "tensor", "pipeline stages=1"])
def test_one_worker_sends_nothing(text: str) -> None:
    assert sent(text, 1)["worker"] == WorkerTraffic(who="worker")


def test_a_clipped_step_tells_the_norm() -> None:
    for text in ("central", "sharded", "tensor", "pipeline stages=2"):
        plain, clipped = (sent(text, 2, layers(64, **more))["worker"] for more in ({}, {"clip_norm": 1.0}))
        assert clipped.messages > plain.messages, text
    assert sent("mirrored", 2, layers(64, clip_norm=1.0)) == sent("mirrored", 2, layers(64))


def test_a_model_that_the_task_only_hands_over_stays_as_it_is() -> None:
    """A task's function may return a model that exists; predictions change copies of it."""
    made = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    before = {name: value.clone() for name, value in made.state_dict().items()}
    task = mh.Task(
        model=lambda: made,
        loss=lambda model, batch: model(batch).square().mean(),
        data=torch.ones(8, 16),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )
    model = estimate(task).footprint
    for text in ("sharded", "tensor", "pipeline stages=2", "mirrored", "central"):
        assert sent(text, 2, model)["worker"].num_bytes > 0
    after = made.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [type(one) for one in made] == [nn.Linear] * 4
    assert torch.equal(made(torch.ones(8, 16)), made(torch.ones(8, 16)))
