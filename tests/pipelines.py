"""Pipelines whose workers are threads of one process, and the models that they are held against one process with."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh
from equality import Silent, replica
from manyhands.data.randomness import preserved
from manyhands.data.store.checkpoint import CheckpointStore
from manyhands.engine.chain import chain_of
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.engine.exchange import Resources, SingleExchange
from manyhands.engine.worker import Trained, Trainer
from manyhands.errors import WorkerFailed
from manyhands.strategies.pipeline.ends import TrainingEnds
from manyhands.strategies.pipeline.exchange import PipelineExchange, holding_of
from manyhands.strategies.pipeline.schedules import Schedule
from manyhands.strategies.pipeline.stage_messages import StageBorders, StageMessages
from manyhands.strategies.pipeline.stage_worker import PipelineStage, WaveStage
from manyhands.strategies.pipeline.strategy import Pipeline
from manyhands.strategies.pipeline.training import in_microbatches
from manyhands.strategy import Strategy
from manyhands.transport.link.interface import Link
from manyhands.transport.link.shared_link import SharedLink
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import next_byte_loss
from manyhands.workloads.language.recurrent import RecurrentNetwork

State = dict[str, torch.Tensor]
_RING_BYTES = 1 << 16  # the kernel clears all of it for every link; what passes here is a few KiB


class Reports(Silent):
    """WorkerContext that keep the rows of the history."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def note(self, note: Any) -> None:
        self.rows += [dict(row) for row in note.rows]

    def mark(self, step: int, state: Any, *, place: Any = None) -> None: ...


@dataclass
class Ended:
    """What a run in threads ended with."""

    weights: State
    optimizer: dict[str, Any]
    rows: list[dict[str, Any]]
    exchanges: list[PipelineExchange] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows if "loss" in row]


def links_between(world: int) -> list[dict[int, Link]]:
    """One link for each two of `world` threads, by rank and peer."""
    ends: list[dict[int, Link]] = [{} for _ in range(world)]
    for high in range(world):
        for low in range(high):
            ends[low][high], ends[high][low] = SharedLink.pair(
                (f"rank {low}", f"rank {high}"), capacity_bytes=_RING_BYTES
            )
    return ends


def plan_of(task: mh.Task, steps: int, **more: Any) -> TrainingPlan:
    settings = {"evaluate_every": 0, "checkpoint_every": 0, **more}
    return TrainingPlan(task=task, steps=steps, seed=0, **settings)


def train_alone(task: mh.Task, steps: int, start: Any = None) -> Ended:
    """The plain loop."""
    report, exchange = Reports(), SingleExchange()
    trained = Trainer(plan_of(task, steps), exchange, report).run(start)
    state = exchange.optimizer_state()
    assert state is not None
    return Ended(weights=dict(trained.model.state_dict()), optimizer=state, rows=report.rows)


def train_in_stages(
    task: mh.Task,
    text: str,
    workers: int,
    steps: int,
    start: Any = None,
    folder: Path | None = None,
    check_every: int = 0,
    spoil: Callable[[PipelineExchange], None] = lambda _: None,
) -> Ended:
    """By the strategy, every worker in a thread of its own; a worker's error is raised here, the first one's first.

    The last step is saved in `folder`, where there is one. `spoil` gets each worker's exchange before it trains.
    """
    strategy = Strategy.parse(text)
    assert isinstance(strategy, Pipeline)
    more = {"checkpoint_every": steps if folder else 0, "check_every": check_every}
    plan = in_microbatches(plan_of(task, steps, **more), strategy)
    links = links_between(workers)
    report = [Reports() for _ in range(workers)]
    trained: list[Trained | None] = [None] * workers
    states: list[Any] = [None] * workers
    exchanges: list[Any] = [None] * workers
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        resources = Resources(
            rank=rank, world=workers, timeout_s=30.0, group=lambda: None, links=lambda: links[rank]
        )
        try:
            with closing(PipelineExchange(strategy, resources, plan, report[rank].mark)) as exchange:
                exchanges[rank] = exchange
                spoil(exchange)
                given = copy.deepcopy(start)
                store = CheckpointStore(folder) if folder is not None else None
                trained[rank] = Trainer(plan, exchange, report[rank], store).run(given)
                states[rank] = exchange.optimizer_state()
        except BaseException as error:
            errors.append((rank, error))

    in_threads(work, workers)
    if errors:
        raise min(errors, key=lambda one: isinstance(one[1], WorkerFailed))[1]  # who lost another is no cause
    first = trained[0]
    assert first is not None
    assert first.weights is not None
    assert all(one is not None and one.weights is None for one in trained[1:]), "worker 0 has the whole"
    return Ended(weights=dict(first.weights), optimizer=states[0], rows=report[0].rows, exchanges=exchanges)


def in_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(rank,), name=f"worker {rank}") for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
        assert not thread.is_alive(), f"{thread.name} hangs"


def gradients_of(
    task: mh.Task,
    table: Schedule,
    *,
    recompute: bool = False,
    worker_context: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext(),
    model: nn.Module | None = None,
) -> tuple[float, State]:
    """Loss and gradients of the first batch, by stages that are threads and share one model; each inside a context.

    Nothing is summed here over stages that share a parameter: they add up in the one that there is. A `model` that was
    used before will do: it has no gradients at the beginning, and its weights stay as they are.
    """
    microbatches = 1 if table.over_time else table.microbatches
    computer = Computer(plan_of(replace(task, microbatches=microbatches), 1), 0)
    model = task.model() if model is None else model
    model.zero_grad()
    chain, links = chain_of(model), links_between(table.stages)
    cuts = [len(chain) * part // table.parts for part in range(1, table.parts)]
    losses, errors = [0.0] * table.stages, []

    def work(stage: int) -> None:
        try:
            parts = holding_of(model, chain, cuts, table.stages, stage).parts
            post = StageMessages(stage, range(table.stages), links[stage], 30.0)
            borders = StageBorders(table, stage, parts, post)
            share = computer.share(0, 0, 1)
            ends = TrainingEnds(computer, share, 0, 0)
            at_work = WaveStage(borders) if table.over_time else PipelineStage(borders, recompute=recompute)
            with worker_context(stage):
                at_work.run(ends, len(share.pieces), lambda _: None)
            losses[stage] = ends.mean_loss()
        except BaseException as error:
            errors.append(error)
        finally:
            for link in links[stage].values():
                link.close()

    in_threads(work, table.stages)
    if errors:
        raise errors[0]
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return losses[-1], gradients


def transformer() -> nn.Module:
    """Tied: the first and the last layer share their weights."""
    return GPT(context=6, layers=6, width=8, heads=2, vocabulary=11).double()


def convolutions() -> nn.Module:
    """With layers that change what they are given in place, and running statistics."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(4, 6, 2), nn.Tanh()),
        nn.Flatten(),
        nn.Linear(6 * 2 * 2, 8),
        nn.Tanh(),
        nn.Linear(8, 5),
    ).double()


def recurrent() -> nn.Module:
    return RecurrentNetwork(layers=6, width=5, vocabulary=11).double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": transformer,
    "cnn": convolutions,
    "lstm": recurrent,
}


@cache
def _built(name: str) -> nn.Module:
    """Once: threads share torch's generator, so each must copy what it would build."""
    with preserved():
        torch.manual_seed(5)
        return MODELS[name]()


def _classified(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def _accuracy(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return (model(images).argmax(1) == labels).double().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """One step of it moves the weights by the gradient itself."""
    return torch.optim.SGD(parameters, lr=1.0)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def task_of(name: str, optimizer: Callable[[Any], torch.optim.Optimizer] = adamw, **more: Any) -> mh.Task:
    """A small task with this model; its batches do not divide by the micro-batches, and the last is short."""
    generator = torch.Generator().manual_seed(3)
    if name == "cnn":
        data: Any = (
            torch.randn(25, 1, 9, 9, generator=generator, dtype=torch.float64),
            torch.randint(0, 5, (25,), generator=generator),
        )
        model = partial(replica, _built(name))
        return mh.Task(model=model, loss=_classified, data=data, optimizer=optimizer, batch_size=11, **more)
    data = torch.randint(0, 11, (25, 7), generator=generator, dtype=torch.uint8)
    model = partial(replica, _built(name))
    return mh.Task(model=model, loss=next_byte_loss, data=data, optimizer=optimizer, batch_size=11, **more)
