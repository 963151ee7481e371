"""One worker process of the step benchmark: `python -m manyhands.lab.bench.step_worker PLAN`.

The worker holds every contender's model at once and has them train in turn; it prints a `StepMeasured` as JSON.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manyhands.data.batches import BatchPlan, BatchSource
from manyhands.data.randomness import seed_all
from manyhands.engine.exchange import Exchange, LocalStep, SingleExchange
from manyhands.engine.worker_processes import exchanging
from manyhands.engine.worker_resources import Resources
from manyhands.lab.bench.harness import WARM_UP, WorkerPlan, be_worker, in_turn, joined_gloo
from manyhands.native.group.shared_group import SharedGroup
from manyhands.strategy import Strategy
from manyhands.task import Task
from manyhands.workloads.tasks.digits import ImageClassifier, classification_loss
from manyhands.workloads.tasks.language import LanguageOptions, language

__all__ = [
    "ALONE",
    "DDP",
    "SINGLE",
    "STRATEGIES",
    "WORKLOADS",
    "BenchWorkload",
    "Cnn",
    "Language",
    "Mlp",
    "StepMeasured",
    "StepPlan",
]

_EPOCH_BATCHES = 8  # made-up data come round again soon, so that the loss visibly falls


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchWorkload(ABC):
    """Something to train, with `batch` samples per worker in every step."""

    word: ClassVar[str]
    optimizer: ClassVar[str]  # what updates the weights, for the report

    batch: int

    @abstractmethod
    def task(self, workers: int) -> Task:
        """The task, with the global batch of `workers`; the same on every rank."""

    def to_json(self) -> str:
        return json.dumps({"word": self.word, **asdict(self)})

    @staticmethod
    def from_json(text: str) -> BenchWorkload:
        fields = json.loads(text)
        return type(WORKLOADS[fields.pop("word")])(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp(BenchWorkload):
    """A perceptron with many weights and a small batch: little but communication and the optimizer."""

    word: ClassVar[str] = "mlp"
    optimizer: ClassVar[str] = "SGD with momentum"

    batch: int = 8
    inputs: int = 1024
    width: int = 3296
    hidden: int = 3
    classes: int = 10

    def task(self, workers: int) -> Task:
        """Random vectors, labelled by a linear teacher."""
        return _classification(self, self._model, (self.inputs,), workers, lr=0.01)

    def _model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for inputs in (self.inputs, *[self.width] * (self.hidden - 1)):
            layers += [nn.Linear(inputs, self.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, self.classes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cnn(BenchWorkload):
    """The classifier of `digits` and `mnist` on larger images: few weights and much arithmetic."""

    word: ClassVar[str] = "cnn"
    optimizer: ClassVar[str] = "SGD with momentum"

    batch: int = 16
    side: int = 32
    width: int = 32
    classes: int = 10

    def task(self, workers: int) -> Task:
        """Random images, labelled by a linear teacher."""
        model = partial(ImageClassifier, side=self.side, white=1, width=self.width, classes=self.classes)
        return _classification(self, model, (1, self.side, self.side), workers, lr=3e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Language(BenchWorkload):
    """The transformer of `language` with a few million weights, on the text of Python's standard library."""

    word: ClassVar[str] = "language"
    optimizer: ClassVar[str] = "AdamW"

    batch: int = 8
    context: int = 64
    layers: int = 4
    width: int = 256
    heads: int = 8

    def task(self, workers: int) -> Task:
        options = LanguageOptions(
            context=self.context,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            batch_size=self.batch * workers,
        )
        return replace(
            language(options), optimizer=partial(torch.optim.AdamW, lr=options.learning_rate, fused=True)
        )


WORKLOADS: dict[str, BenchWorkload] = {workload.word: workload for workload in (Mlp(), Cnn(), Language())}


def _classification(
    workload: Mlp | Cnn, model: Callable[[], nn.Module], shape: tuple[int, ...], workers: int, *, lr: float
) -> Task:
    """Random samples with labels that can be learnt, so that the loss falls: those of a random linear map."""
    batch_size = workload.batch * workers
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(_EPOCH_BATCHES * batch_size, *shape, generator=generator)
    teacher = torch.randn(math.prod(shape), workload.classes, generator=generator)
    return Task(
        name=workload.word,
        model=model,
        loss=classification_loss,
        data=(samples, (samples.flatten(1) @ teacher).argmax(dim=1)),
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.9, fused=True),
        batch_size=batch_size,
    )


DDP, SINGLE, ALONE = "ddp", "single", "alone"
STRATEGIES = ("mirrored", "central")
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan(WorkerPlan):
    """What one worker does; a group is given by its control and its arena."""

    rank: int
    world: int
    rendezvous: tuple[int, int]  # the group in which all meet before a block
    groups: Mapping[str, tuple[int, int]]  # that of each strategy
    store: str  # the file through which Gloo's ranks find each other
    workload: str  # a BenchWorkload as JSON
    rounds: int
    block: int  # measured steps of each contender in a round
    threads: int  # of torch, in each worker
    cores: int  # threads of torch in the one process that does the work of all


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured:
    """What one rank saw; a contender that runs on rank 0 alone is missing elsewhere."""

    parameters: int
    seconds: dict[str, list[float]]  # by contender and round: how long the block of measured steps took

    losses: dict[str, list[float]]
    """By contender and step, from its very first one: the mean over this rank's part of the batch."""


class StepContender:
    """One way to train: its own model and optimizer, its place in the data, and how it takes a step.

    With an `exchange`, a strategy of ours as the training loop steps it; without, torch's DistributedDataParallel on
    the default process group, with its fastest settings.
    """

    def __init__(
        self, task: Task, fetch: Callable[[int], Any], threads: int, exchange: Exchange | None = None
    ) -> None:
        seed_all(_SEED)
        self.model = task.model()
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._optimizer = task.optimizer(self.model.parameters())
        self._loss, self._fetch, self._threads, self._exchange = task.loss, fetch, threads, exchange
        if exchange is None:
            self._wrapped = DistributedDataParallel(
                self.model, gradient_as_bucket_view=True, static_graph=True
            )
        else:
            exchange.attach(self.model, self._optimizer)

    def run(self, steps: int) -> float:
        """Train on the next `steps` batches; the seconds that took, without fetching them."""
        first = len(self.losses)
        batches = [self._fetch(step) for step in range(first, first + steps)]
        step = self._ddp_step if self._exchange is None else partial(self._own_step, self._exchange)
        torch.set_num_threads(self._threads)
        began = time.perf_counter()
        for batch in batches:
            self.losses.append(step(batch))
        return time.perf_counter() - began

    def _ddp_step(self, batch: Any) -> float:
        """One whole training step; the loss of `batch` before it."""
        loss = self._loss(self._wrapped, batch)
        value = float(loss.detach())
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return value

    def _own_step(self, exchange: Exchange, batch: Any) -> float:
        share = 1 / exchange.world
        loss = self._loss(self.model, batch)
        value = float(loss.detach())
        exchange.backward(loss, share)
        exchange.agree(LocalStep(loss=value, share=share))
        exchange.apply()
        return value


def _contenders(plan: StepPlan, exchanges: Mapping[str, Exchange]) -> dict[str, StepContender | None]:
    """All of them; those that this rank has no part in are None."""
    task = BenchWorkload.from_json(plan.workload).task(plan.world)
    source = BatchSource(task.data, task.collate)
    batches = BatchPlan(len(source), task.batch_size, _SEED)

    def fetch_share(step: int) -> Any:
        return source.fetch(batches.share(step, plan.rank, plan.world))

    def fetch_whole(step: int) -> Any:
        return source.fetch(batches.indices(step))

    made: dict[str, StepContender | None] = {DDP: StepContender(task, fetch_share, plan.threads)}
    for name, exchange in exchanges.items():
        made[name] = StepContender(task, fetch_share, plan.threads, exchange)
    made |= {SINGLE: None, ALONE: None}
    if plan.rank == 0:
        made[SINGLE] = StepContender(task, fetch_whole, plan.cores, SingleExchange())
        made[ALONE] = StepContender(task, fetch_share, plan.threads, SingleExchange())
    return made


def measure(
    plan: StepPlan, contenders: Mapping[str, StepContender | None], meet: Callable[[], None]
) -> StepMeasured:
    for contender in contenders.values():
        meet()
        if contender is not None:
            contender.run(WARM_UP)  # DDP lays out its buckets anew after the first step
    for contender in in_turn(list(contenders.values()), plan.rounds):
        meet()
        if contender is not None:
            contender.run(1)  # brings its memory back into the caches
        meet()
        if contender is not None:
            contender.seconds.append(contender.run(plan.block))
    mine = {name: contender for name, contender in contenders.items() if contender is not None}
    return StepMeasured(
        parameters=sum(parameter.numel() for parameter in mine[DDP].model.parameters()),
        seconds={name: contender.seconds for name, contender in mine.items()},
        losses={name: contender.losses for name, contender in mine.items()},
    )


def main(plan: StepPlan) -> None:
    torch.set_num_threads(plan.threads)
    with ExitStack() as stack:

        def join(descriptors: tuple[int, int]) -> SharedGroup:
            control, arena = descriptors
            return SharedGroup(
                control=control, arena=arena, rank=plan.rank, world=plan.world, timeout_s=plan.timeout_s
            )

        rendezvous = stack.enter_context(join(plan.rendezvous))
        exchanges = {}
        for name, descriptors in plan.groups.items():
            resources = Resources(
                rank=plan.rank,
                world=plan.world,
                timeout_s=plan.timeout_s,
                group=partial(join, descriptors),
                links=dict,
            )
            strategy = Strategy.parse(name)
            exchange = exchanging(strategy).exchange(strategy, resources)
            stack.callback(exchange.close)
            exchanges[name] = exchange
        stack.enter_context(joined_gloo(plan.store, plan.rank, plan.world, plan.timeout_s))
        print(json.dumps(asdict(measure(plan, _contenders(plan, exchanges), rendezvous.barrier))))
        rendezvous.barrier()  # nobody leaves while another may still need it


if __name__ == "__main__":
    be_worker(StepPlan, main)
