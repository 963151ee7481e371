"""Whole training steps on one host: torch's DDP on Gloo, `mirrored`, `central`, and one process for reference.

All contenders live in the same worker processes (`python -m manyhands.lab.bench.step PLAN`), start from the same
weights and train on the same batches, in turn and in blocks of a few steps, so that a busy minute of the machine hits
all of them. All ranks meet before a block, which takes as long as its slowest rank. The losses must agree, step by step
over the first 50: whoever exchanges gradients wrongly is found out here.

Two references run on rank 0 while the others sleep: `single`, one process with all cores and the whole batch, which is
what a user without this library has; and `alone`, one worker with its own share and its own threads, whose time is that
of a step without any exchange. The efficiency of a contender is the time of `alone` divided by its own (weak scaling:
samples per second of N workers, over N times those of one).
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manyhands.data.batches import BatchPlan, BatchSource
from manyhands.data.randomness import seed_all
from manyhands.engine.exchange import Exchange, LocalStep, Resources, SingleExchange
from manyhands.engine.worker_processes import exchanging
from manyhands.errors import ManyhandsError, UserError, check_count, nearest
from manyhands.lab.bench import harness
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles, warm
from manyhands.places.local.host import check_capacity, of_processes, threads_per_role
from manyhands.strategy import Strategy
from manyhands.task import Task
from manyhands.workloads.language.gpt import GPTOptions, gpt
from manyhands.workloads.tasks.digits import ImageClassifier, classification_loss

DEFAULT_STEPS = 40
_BLOCK = 4  # measured steps in a turn
_COMPARED_STEPS = 50  # later ones drift apart: training enlarges float32's rounding
_TOLERANCE = 5e-3  # of the first loss
DDP, SINGLE, ALONE = "ddp", "single", "alone"
STRATEGIES = ("mirrored", "central")
_SEED = 0
_EPOCH_BATCHES = 8  # made-up data come round again soon, so that the loss visibly falls


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A perceptron with many weights and a small batch: little but communication and the optimizer."""

    word: ClassVar[str] = "mlp"
    optimizer: ClassVar[str] = "SGD with momentum"

    batch: int = 8
    inputs: int = 1024
    width: int = 3296
    hidden: int = 3
    classes: int = 10

    def task(self, workers: int) -> Task:
        return _classification(self, self._model, (self.inputs,), workers, lr=0.01)

    def _model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for inputs in (self.inputs, *[self.width] * (self.hidden - 1)):
            layers += [nn.Linear(inputs, self.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, self.classes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cnn:
    """The classifier of `digits` and `mnist` on larger images: few weights and much arithmetic."""

    word: ClassVar[str] = "cnn"
    optimizer: ClassVar[str] = "SGD with momentum"

    batch: int = 16
    side: int = 32
    width: int = 32
    classes: int = 10

    def task(self, workers: int) -> Task:
        model = partial(ImageClassifier, side=self.side, white=1, width=self.width, classes=self.classes)
        return _classification(self, model, (1, self.side, self.side), workers, lr=3e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptBench:
    """The transformer of `gpt` with a few million weights, on the text of Python's standard library."""

    word: ClassVar[str] = "gpt"
    optimizer: ClassVar[str] = "AdamW"

    batch: int = 8
    context: int = 64
    layers: int = 4
    width: int = 256
    heads: int = 8

    def task(self, workers: int) -> Task:
        options = GPTOptions(
            context=self.context,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            batch_size=self.batch * workers,
        )
        return replace(
            gpt(options), optimizer=partial(torch.optim.AdamW, lr=options.learning_rate, fused=True)
        )


BenchWorkload = Mlp | Cnn | GptBench  # something to train, with `batch` samples per worker in every step
WORKLOADS: dict[str, BenchWorkload] = {workload.word: workload for workload in (Mlp(), Cnn(), GptBench())}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan(harness.WorkerPlan):
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


def named_workloads(text: str) -> list[BenchWorkload]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in WORKLOADS:
            raise UserError(f"workload: no such workload {word!r}; {nearest(word, WORKLOADS)}")
    return [WORKLOADS[word] for word in words]


def run_bench(
    workers: int,
    workloads: Sequence[BenchWorkload] = tuple(WORKLOADS.values()),
    steps: int = DEFAULT_STEPS,
    timeout_s: float = 300.0,
    allow_overload: bool = False,
) -> dict[str, Any]:
    """Measure `steps` steps of each contender, as JSON; raises if a worker fails or is late, or losses disagree."""
    check_capacity(of_processes(), workers, allow_overload=allow_overload)
    if workers < 2:
        raise UserError(f"workers={workers}: exchanging gradients needs at least 2")
    check_count("steps", steps)
    facts = {"benchmark": "step", "workers": workers, **harness.host_facts()}
    warm({torch.float32, torch.float64})
    return {
        **facts,
        "threads_per_worker": threads_per_role(workers),
        "results": [_measure(workers, workload, steps, timeout_s) for workload in workloads],
    }


def format_table(result: dict[str, Any]) -> str:
    lines = [
        f"training steps of {result['workers']} workers on {result['cores']} cores, "
        f"torch threads per worker: {result['threads_per_worker']}"
    ]
    for row in result["results"]:
        lines += [
            "",
            f"{row['workload']}: {row['parameters'] / 1e6:.1f} M parameters, {row['optimizer']}, "
            f"{row['batch_per_worker']} samples per worker; losses agree to {row['loss_difference']:.0e}",
            f"{'':<10}{'median':>12}{'10th to 90th':>22}{'samples/s':>12}{'to DDP':>9}{'efficiency':>12}",
        ]
        for name, cell in row["contenders"].items():
            spread = f"{cell['p10_ms']:.1f} to {cell['p90_ms']:.1f} ms"
            efficiency = f"{100 * cell['efficiency']:.0f} %" if "efficiency" in cell else ""
            lines.append(
                f"{name:<10}{cell['median_ms']:>9.1f} ms{spread:>22}{cell['samples_per_s']:>12.0f}"
                f"{cell['times_ddp']:>8.2f}×{efficiency:>12}"
            )
    return "\n".join(lines)


def _measure(workers: int, workload: BenchWorkload, steps: int, timeout_s: float) -> dict[str, Any]:
    rounds, block = -(-steps // _BLOCK), min(steps, _BLOCK)
    ranks = _run_workers(workers, workload, rounds, block, timeout_s)
    losses, difference = agreed_losses(ranks)
    return {
        "workload": workload.word,
        "parameters": ranks[0].parameters,
        "optimizer": workload.optimizer,
        "batch_per_worker": workload.batch,
        "rounds": rounds,
        "steps_per_round": block,
        "compared_steps": len(losses),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "loss_difference": difference,
        "contenders": _summaries(ranks, workload.batch, block),
    }


def agreed_losses(ranks: Sequence[StepMeasured]) -> tuple[list[float], float]:
    """DDP's losses over the global batch, step by step, and how far anyone else's are off, as a part of the first."""
    of_shares = {name: [rank.losses[name] for rank in ranks] for name in (DDP, *STRATEGIES)}
    by_name = {name: np.mean(losses, axis=0)[:_COMPARED_STEPS] for name, losses in of_shares.items()}
    by_name[SINGLE] = np.array(ranks[0].losses[SINGLE][:_COMPARED_STEPS])
    expected = by_name[DDP]
    differences = {name: np.abs(losses - expected) / expected[0] for name, losses in by_name.items()}
    for name, difference in differences.items():
        if not (difference <= _TOLERANCE).all():
            step = int(np.argmax(~(difference <= _TOLERANCE)))
            raise ManyhandsError(
                f"{name} has a loss of {by_name[name][step]:.6g} in step {step} and {DDP} one of "
                f"{expected[step]:.6g}: they must be equal"
            )
    return expected.tolist(), float(max(difference.max() for difference in differences.values()))


def _summaries(ranks: Sequence[StepMeasured], batch: int, block: int) -> dict[str, dict[str, float]]:
    """Each contender's times; ratios are medians over the rounds, each of two blocks of the same round."""
    milliseconds = {
        name: 1e3 * np.max([rank.seconds[name] for rank in ranks if name in rank.seconds], axis=0) / block
        for name in ranks[0].seconds
    }
    summaries = {}
    for name, times in milliseconds.items():
        cell = harness.percentiles(times, "ms")
        shares = 1 if name == ALONE else len(ranks)
        cell["samples_per_s"] = 1e3 * batch * shares / cell["median_ms"]
        cell["times_ddp"] = float(np.median(milliseconds[DDP] / times))
        if name not in (SINGLE, ALONE):
            cell["efficiency"] = float(np.median(milliseconds[ALONE] / times))
        summaries[name] = cell
    return summaries


def _run_workers(
    workers: int, workload: BenchWorkload, rounds: int, block: int, timeout_s: float
) -> list[StepMeasured]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="manyhands-bench-"))
        rendezvous, *groups = [
            stack.enter_context(SharedGroupFiles.create(workers)).descriptors
            for _ in range(1 + len(STRATEGIES))
        ]
        processes = stack.enter_context(harness.Workers("manyhands.lab.bench.step"))
        for rank in range(workers):
            plan = StepPlan(
                rank=rank,
                world=workers,
                rendezvous=rendezvous,
                groups=dict(zip(STRATEGIES, groups, strict=True)),
                store=str(Path(folder) / "store"),
                workload=harness.to_text(workload),
                rounds=rounds,
                block=block,
                threads=threads_per_role(workers),
                cores=len(os.sched_getaffinity(0)),
                timeout_s=timeout_s,
            )
            processes.start(plan, [*rendezvous, *(one for pair in groups for one in pair)])
        return [StepMeasured(**printed) for printed in processes.results(timeout_s)]


class StepContender:
    """One way to train: its own model and optimizer, its place in the data, and how it takes a step.

    With an `exchange`, a strategy of ours; without, torch's DistributedDataParallel with its fastest settings.
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
        first = len(self.losses)
        batches = [self._fetch(step) for step in range(first, first + steps)]
        step = self._ddp_step if self._exchange is None else partial(self._own_step, self._exchange)
        torch.set_num_threads(self._threads)
        began = time.perf_counter()
        for batch in batches:
            self.losses.append(step(batch))
        return time.perf_counter() - began

    def _ddp_step(self, batch: Any) -> float:
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
    task = harness.from_text(plan.workload, Mlp, Cnn, GptBench).task(plan.world)
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
            contender.run(harness.WARM_UP)  # DDP lays out its buckets anew after the first step
    for contender in harness.interleaved(list(contenders.values()), plan.rounds):
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
        stack.enter_context(harness.joined_gloo(plan.store, plan.rank, plan.world, plan.timeout_s))
        print(json.dumps(asdict(measure(plan, _contenders(plan, exchanges), rendezvous.barrier))))
        rendezvous.barrier()  # nobody leaves while another may still need it


if __name__ == "__main__":
    harness.be_worker(StepPlan, main)
