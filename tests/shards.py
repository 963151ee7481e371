"""`sharded` with ranks that are threads of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

import manyhands as mh
from equality import Silent
from manyhands.data.store.checkpoint import CheckpointStore
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import Exchange, Resources
from manyhands.engine.worker import Trained, Trainer
from manyhands.strategies.sharded.exchange import ShardedExchange
from manyhands.transport.link.mesh import SharedMesh
from ways import in_threads

Result = TypeVar("Result")


def with_shards(world: int, act: Callable[[ShardedExchange], Result]) -> list[Result]:
    """`act(exchange)` on every rank, each a thread with links to the others."""
    with ExitStack() as stack:
        mesh = stack.enter_context(SharedMesh(world))
        links = [
            SharedMesh.attach(
                rank, {peer: list(map(os.dup, files)) for peer, files in mesh.descriptors(rank).items()}
            )
            for rank in range(world)
        ]

        def work(rank: int) -> Result:
            resources = Resources(
                rank=rank, world=world, timeout_s=30, group=no_group, links=lambda: links[rank]
            )
            with closing(ShardedExchange(resources)) as exchange:
                return act(exchange)

        return in_threads(world, work)


def no_group() -> Any:
    raise AssertionError("nobody shares memory")


def train_sharded(
    task: mh.Task, world: int, steps: int, folder: Path | None = None, start: int | None = None, **plan: Any
) -> list[Trained]:
    options = {"evaluate_every": 0, "checkpoint_every": 0, **plan}

    def act(exchange: Exchange) -> Trained:
        store = CheckpointStore(folder) if folder is not None else None
        loaded = store.load(start) if store is not None and start is not None else None
        return Trainer(
            TrainingPlan(task=task, steps=steps, seed=0, **options), exchange, Silent(), store
        ).run(loaded)

    return with_shards(world, act)


def weights_of(trained: list[Trained]) -> dict[str, Tensor]:
    weights = trained[0].weights
    assert weights is not None
    assert all(one.weights is None for one in trained[1:])
    return dict(weights)
