"""Every synchronous strategy ends with the weights of the plain loop: all algorithms, 1 to 8 workers."""

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

import manyhands as mh
from equality import (
    OPTIMIZERS,
    STEPS,
    TWICE,
    distance,
    make_task,
    same_bits,
    train,
    train_in_threads,
    train_plainly,
)
from manyhands.engine.exchange import Exchange
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.strategies.allreduce.exchange import AllReduceExchange
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.collective import SharedCollective
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.strategies.common.collectives.schedule_collective import ScheduleCollective
from manyhands.transport.link.simulated_network import SimulatedNetwork

BUCKET_BYTES = 1024  # more than one bucket even for this small model
CASES = {
    "momentum-float64": ("momentum", torch.float64, 1e-9),
    "adamw-float64": ("adamw", torch.float64, 1e-9),
    "sgd-float32": ("sgd", torch.float32, 1e-5),
}
LONG = ("adamw-float64", 3)
"""The case and the number of workers with which every way goes on for `STEPS`, and one way in every case."""


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


@cache
def task_of(case: str) -> mh.Task:
    optimizer, dtype, _ = CASES[case]
    return make_task(OPTIMIZERS[optimizer], dtype)


@cache
def reference(case: str, steps: int) -> dict[str, torch.Tensor]:
    return train_plainly(task_of(case), steps)


def in_shared_memory(case: str, world: int, steps: int) -> list[dict[str, torch.Tensor]]:
    with SharedGroupFiles.create(world) as files:

        def connect(rank: int) -> Exchange:
            group = SharedGroup(
                control=os.dup(files.control), arena=os.dup(files.arena), rank=rank, world=world, timeout_s=30
            )
            return AllReduceExchange(SharedCollective(group), BUCKET_BYTES)

        return train_in_threads(task_of(case), world, connect, steps)


def over_simulated_links(algorithm: str) -> Callable[[str, int, int], list[dict[str, torch.Tensor]]]:
    def train_all(case: str, world: int, steps: int) -> list[dict[str, torch.Tensor]]:
        task, network = task_of(case), SimulatedNetwork(seed=world, latency_s=0.001)

        def train_rank(rank: int) -> dict[str, torch.Tensor]:
            links = {
                peer: network.link(f"rank {rank}", f"rank {peer}") for peer in range(world) if peer != rank
            }
            executor = ScheduleExecutor(ALGORITHMS[algorithm], rank, world, links, timeout_s=30)
            exchange = AllReduceExchange(ScheduleCollective(executor, links), BUCKET_BYTES)
            return train(task, exchange, steps)

        results = network.run({f"rank {rank}": partial(train_rank, rank) for rank in range(world)})
        return [results[f"rank {rank}"] for rank in range(world)]

    return train_all


WAYS = {"mirrored": in_shared_memory, **{name: over_simulated_links(name) for name in ALGORITHMS}}


ALL_WORLDS = "momentum-float64"
"""The case that `make test` runs with every number of workers; `make soak` runs all of them with 5 to 7, too."""


def soaks(case: str, world: int) -> bool:
    return world in (5, 6, 7) and case != ALL_WORLDS


def grid() -> list[Any]:
    """Every case, way and number of workers from 1 to 8."""
    return [
        pytest.param(case, way, world, marks=pytest.mark.soak if soaks(case, world) else ())
        for case in CASES
        for way in WAYS
        for world in range(1, 9)
    ]


@pytest.mark.parametrize(("case", "way", "world"), grid())
def test_weights_equal_the_plain_loop(case: str, way: str, world: int) -> None:
    is_long = (case, world) == LONG or (way, world) == ("mirrored", LONG[1])
    steps = STEPS if is_long or soaks(case, world) else TWICE
    weights = WAYS[way](case, world, steps)
    assert distance(weights[0], reference(case, steps)) < CASES[case][2]
    for rank, other in enumerate(weights):
        assert same_bits(weights[0], other), f"rank {rank} ended with other bits than rank 0"


@pytest.mark.parametrize("way", WAYS)
def test_two_runs_end_with_the_same_bits(way: str) -> None:
    first, second = (WAYS[way]("sgd-float32", 5, TWICE) for _ in range(2))
    assert same_bits(first[0], second[0])


def test_the_reference_moves_every_reachable_weight_and_leaves_the_other() -> None:
    initial, trained = task_of("momentum-float64").model().state_dict(), reference("momentum-float64", TWICE)
    moved = {name for name in trained if not torch.equal(initial[name], trained[name])}
    assert moved == {"embed.weight", "mix.weight", "mix.bias", "rare.weight", "out.weight"}
