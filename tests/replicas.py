"""Replicas of `local`: trained in threads by the wiring that `fit` uses, and by hand."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import torch
from torch import nn

import manyhands as mh
from equality import Silent
from manyhands.data.batches import BatchPlan
from manyhands.data.store.checkpoint import CheckpointStore, Loaded
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import Resources
from manyhands.engine.worker import Trained, Trainer
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.strategies.local.training import LocalTraining
from manyhands.strategy import Strategy
from manyhands.transport.link.interface import Link
from manyhands.transport.link.mesh import SharedMesh
from manyhands.transport.link.tcp import TcpLink
from ways import in_threads, join

Parameters = list[list[torch.Tensor]]
"""Of each replica."""


def small_task(optimizer: Any, batch_size: int = 12) -> mh.Task:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    template = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return mh.Task(
        model=lambda: copy.deepcopy(template),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(x, x.sum(1, keepdim=True)),
        optimizer=optimizer,
        batch_size=batch_size,
        evaluation=(x[:20], x[:20].sum(1, keepdim=True)),
    )


def train(
    task: mh.Task,
    text: str,
    world: int,
    steps: int,
    store: CheckpointStore | None = None,
    start: Loaded | None = None,
) -> list[Trained]:
    """In threads, through the wiring that `fit` uses."""
    strategy = Strategy.parse(text)
    with ExitStack() as stack:
        files = stack.enter_context(SharedGroupFiles.create(world))
        mesh = stack.enter_context(SharedMesh(world))
        ends = [
            {peer: list(map(os.dup, one)) for peer, one in mesh.descriptors(rank).items()}
            for rank in range(world)
        ]
        by_tcp = "link=tcp" in text
        sockets: list[dict[int, Link]] = [{} for _ in range(world)]
        for high in range(world if by_tcp else 0):
            for low in range(high):
                sockets[low][high], sockets[high][low] = TcpLink.pair()
        if not strategy.facts.uses_links or by_tcp:
            for descriptor in [one for end in ends for link in end.values() for one in link]:
                os.close(descriptor)

        def work(rank: int) -> Trained:
            with closing(join(files, rank)) as group:
                return work_with(rank, group)

        def work_with(rank: int, group: SharedGroup) -> Trained:
            resources = Resources(
                rank=rank,
                world=world,
                timeout_s=30,
                group=lambda: group,
                links=lambda: sockets[rank] if by_tcp else SharedMesh.attach(rank, ends[rank]),
            )
            exchange = LocalTraining.exchange(strategy, resources)
            plan = TrainingPlan(
                task=task, seed=0, evaluate_every=0, check_every=1, steps=steps, checkpoint_every=4
            )
            try:
                return Trainer(plan, exchange, Silent(), store).run(copy.deepcopy(start))
            finally:
                exchange.close()

        return in_threads(world, work)


def by_hand(
    task: mh.Task, world: int, steps: int, after: Callable[[int, Parameters], None]
) -> list[dict[str, torch.Tensor]]:
    """Replicas with optimizers of their own, and what `after(step, parameters)` makes of them; steps count from 1."""
    models = [task.model() for _ in range(world)]
    optimizers = [task.optimizer(model.parameters()) for model in models]
    batches = BatchPlan(len(task.data[0]), task.batch_size, 0)
    for step in range(steps):
        for rank in range(world):
            indices = torch.tensor(batches.share(step, rank, world).tolist())
            optimizers[rank].zero_grad()
            task.loss(models[rank], [part[indices] for part in task.data]).backward()
            optimizers[rank].step()
        with torch.no_grad():
            after(step + 1, [list(model.parameters()) for model in models])
    return [dict(model.state_dict()) for model in models]


def mean(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return sum(tensors) / len(tensors)  # type: ignore[return-value]


def set_all(parameters: Parameters) -> None:
    for tensors in zip(*parameters, strict=True):
        value = mean(tensors)
        for tensor in tensors:
            tensor.copy_(value)
