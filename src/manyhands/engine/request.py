"""The request for a run: checked and complete."""

from __future__ import annotations

import platform
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from manyhands.data.batches import BatchPlan
from manyhands.data.experience import Experience
from manyhands.data.store.rundir import parameter_shapes
from manyhands.engine.clipping import check_clipping
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.fp8 import require_fp8
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.options import FP8, HALF, SYNCHRONIZE, Options
from manyhands.engine.profiler import TorchProfiler
from manyhands.errors import UserError, nearest
from manyhands.facts import Truth
from manyhands.native.version import __version__
from manyhands.strategy import Strategy, check_count
from manyhands.task import Task

_USUAL_ROUNDS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """The length of a run in one of three units; in none, the task's default."""

    steps: int | None = None  # global batches
    epochs: int | None = None  # passes over the data
    rounds: int | None = None  # of a strategy that counts them

    def require_one(self) -> None:
        given = {name: getattr(self, name) for name in ("steps", "epochs", "rounds")}
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            check_count(name, value)
        if len(given) > 1:
            (one, first), (other, second), *_ = given.items()
            raise UserError(f"{one}={first} and {other}={second} say the same thing twice; give one of them")

    def require_unit_of(self, strategy: Strategy) -> None:
        self.require_one()
        if not strategy.facts.counts_rounds:
            if self.rounds is not None:
                raise UserError(
                    f"rounds={self.rounds}: strategy {strategy} is counted in global batches; give steps= or epochs="
                )
            return
        for name in ("steps", "epochs"):
            if (given := getattr(self, name)) is not None:
                raise UserError(
                    f"{name}={given}: strategy {strategy} is counted in rounds; give rounds= instead"
                )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for a run, checked and complete."""

    plan: TrainingPlan
    strategy: Strategy
    workers: int
    samples: int
    options: Options

    @classmethod
    def make(
        cls,
        task: AnyTask,
        strategy: Strategy,
        workers: int,
        length: Length,
        seed: int,
        options: Options,
        device: str,
    ) -> Request:
        check_count("workers", workers)
        task = task.for_strategy(strategy, workers)
        strategy.check(workers, device, compiled=task.compiled)
        check_clipping(task, strategy)
        if isinstance(task, Task) and task.microbatches > 1 and task.sparse and strategy.facts.moves_rows:
            raise UserError(
                f"task.microbatches={task.microbatches}: strategy {strategy} reads the rows of task.sparse once for a "
                "whole batch; leave one of the two out"
            )
        _check_options(task, strategy, workers, options, device)
        samples = task.samples
        length.require_unit_of(strategy)
        if strategy.facts.counts_rounds:
            steps, per_epoch = length.rounds or _USUAL_ROUNDS, 1
        elif isinstance(task, Task) and task.streams:
            task = _dealt(task, length, strategy, workers)
            steps, per_epoch = _stream_length(task, length)
        else:
            per_epoch = BatchPlan(samples, task.batch_size, seed).batches_per_epoch
            steps = length.steps or (length.epochs or task.epochs) * per_epoch
        strategy = strategy.for_run(task, steps, seed)
        smallest = min(task.batch_size, samples) if samples else task.batch_size
        if workers > smallest and strategy.facts.splits_batches and not task.compiled:
            warnings.warn(
                f"{workers} workers share batches of {smallest} samples: {workers - smallest} of them have nothing "
                "to do in each step",
                stacklevel=3,
            )
        checkpoint_every = options.checkpoint_every or task.checkpoint_every(steps)
        plan = TrainingPlan(
            task=task,
            steps=steps,
            seed=seed,
            evaluate_every=options.evaluate_every or per_epoch,
            checkpoint_every=1 if strategy.facts.saves_each_step else checkpoint_every,
            stopping=options.early_stopping,
            restore_best=options.restore_best,
            log=tuple(options.log),
            profiled=next((one.profiled for one in _profilers(options)), None),
            slow=options.slow,
            device=device,
            autocast=bool(options.autocast),
            half=options.autocast == HALF,
            fp8=options.autocast == FP8,
            compile=options.compile if options.compile is not None else _compiles(strategy, options),
            recompute=options.recompute,
            buffers=options.buffers,
            check_every=options.check_every,
        )
        return cls(plan=plan, strategy=strategy, workers=workers, samples=samples, options=options)

    def config(self, model: nn.Module) -> dict[str, Any]:
        return {
            "task": self.plan.task.name,
            "task_options": self.plan.task.options,
            "strategy": str(self.strategy),
            "workers": self.workers,
            "steps": self.plan.steps,
            "seed": self.plan.seed,
            "device": self.plan.device,
            "batch_size": self.plan.task.batch_size,
            "samples": self.samples,
            "parameters": parameter_shapes(model.named_parameters()),
            "evaluate_every": self.plan.evaluate_every,
            "checkpoint_every": self.plan.checkpoint_every,
            "versions": {
                "manyhands": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }


def _check_options(task: AnyTask, strategy: Strategy, workers: int, options: Options, device: str) -> None:
    facts, fewest_workers = strategy.facts, options.min_workers
    if options.compile and facts.cannot_compile:
        raise UserError(f"compile: {facts.cannot_compile}; leave it out")
    if options.skip_nonfinite and not facts.can_skip_updates:
        raise UserError(f"skip_nonfinite: strategy {strategy} cannot leave one worker's part out; ps can")
    if fewest_workers is not None and fewest_workers > workers:
        raise UserError(f"min_workers={fewest_workers}: the run starts with {workers} workers; give fewer")
    if fewest_workers is not None and not (facts.continues_with_fewer or facts.can_change_workers):
        raise UserError(
            f"min_workers={fewest_workers}: strategy {strategy} needs all its workers; allreduce elastic=yes "
            "continues with fewer"
        )
    if options.slow is not None and options.slow.worker >= workers:
        raise UserError(f"slow: there is no worker {options.slow.worker}; workers are 0 to {workers - 1}")
    _check_log(task, strategy, options)
    _check_heeded(task, strategy, options)
    _check_precision(task, strategy, options, device)
    why = facts.refused_buffers.get(options.buffers)
    if why is not None:
        raise UserError(
            f"buffers={options.buffers}: strategy {strategy} does not support it: {why}; leave it out"
        )
    if options.buffers != SYNCHRONIZE or not isinstance(task, Task) or workers == 1:
        return
    either = "leave out one of the two"
    if options.compile:
        raise UserError(
            f"buffers=synchronize: torch.compile does not support layers that wait for other workers; {either}"
        )
    if task.microbatches > 1:
        raise UserError(
            f"buffers=synchronize: with task.microbatches={task.microbatches} no layer sees a whole batch; {either}"
        )
    fewest = task.samples % task.batch_size or min(task.batch_size, task.samples or task.batch_size)
    if fewest < workers:
        raise UserError(
            f"buffers=synchronize: every worker needs a sample of each batch, and some batches have {fewest} for "
            f"{workers} workers; use fewer workers, another batch_size, or buffers=mean"
        )


def _check_precision(task: AnyTask, strategy: Strategy, options: Options, device: str) -> None:
    if options.autocast == HALF and not strategy.facts.leaves_steps_out:
        raise UserError(
            f"autocast={HALF}: strategy {strategy} cannot leave out the steps whose scaled gradient overflows; use "
            "autocast=True, which is bfloat16, or mirrored"
        )
    of_blocks = {"recompute": options.recompute, f"autocast={FP8}": options.autocast == FP8}
    asked = [name for name, given in of_blocks.items() if given]
    if asked and (task.compiled or not _has_whole_model(strategy)):
        raise UserError(
            f"{asked[0]}: strategy {strategy} with task {task.name!r} has no worker that computes blocks of a whole "
            "model; leave it out, or use mirrored"
        )
    if options.autocast == FP8 and device == "cpu":  # a GPU is asked by the worker that has it
        require_fp8(torch.device(device))


def _compiles(strategy: Strategy, options: Options) -> bool | None:
    """Whether a run compiles that leaves it open; None: where it is on a GPU."""
    in_this_process = strategy.truth is Truth.ONE_PROCESS  # where torch finds the names that functions use
    cannot = strategy.facts.cannot_compile or options.buffers == SYNCHRONIZE
    return None if in_this_process and not cannot else False


def _has_whole_model(strategy: Strategy) -> bool:
    """Whether every worker computes with the whole model, of which one process may have some layers at a time."""
    if strategy.truth is Truth.ONE_PROCESS:
        return True
    return strategy.truth is Truth.EVERYONE and not strategy.facts.cannot_compile


def _profilers(options: Options) -> list[TorchProfiler]:
    return [one for one in options.callbacks if isinstance(one, TorchProfiler)]


def _check_log(task: AnyTask, strategy: Strategy, options: Options) -> None:
    facts, profilers = strategy.facts, _profilers(options)
    compiled = f"the steps of task {task.name!r} are compiled, and not torch's" if task.compiled else ""
    if profilers and (compiled or len(profilers) > 1):
        raise UserError(f"TorchProfiler: {compiled or 'a run takes one'}; leave it out")
    for name in options.log:
        why = facts.cannot_log or compiled
        if name == "grad_norm":
            why = why or facts.cannot_clip or ("a round has no gradient" if facts.counts_rounds else "")
        if why:
            raise UserError(f"log={name}: {why}; leave it out")


def _check_heeded(task: AnyTask, strategy: Strategy, options: Options) -> None:
    cannot = strategy.facts.cannot_heed_evaluations
    if isinstance(task, Task) and task.scheduler_metric is not None and cannot:
        raise UserError(
            f"task.scheduler_metric={task.scheduler_metric}: {cannot}; use another strategy, or a schedule by steps"
        )
    stopping = options.early_stopping
    for name, asked in (("early_stopping", stopping is not None), ("restore_best", options.restore_best)):
        if asked and cannot:
            raise UserError(f"{name}: {cannot}; use another strategy, or leave it out")
        if asked and task.evaluation is None:
            raise UserError(f"{name}: the task has no evaluation data; give evaluation= too")
    if options.restore_best and task.compiled:
        raise UserError(
            f"restore_best: steps of task {task.name!r} change the one model in place; leave it out"
        )
    if stopping is None:
        return
    names = ["evaluation_loss", *task.metrics]
    if stopping.metric not in names:
        raise UserError(
            f"early_stopping: the task has no metric {stopping.metric!r}; {nearest(stopping.metric, names)}"
        )


def _dealt(task: Task, length: Length, strategy: Strategy, workers: int) -> Task:
    """A task whose data can only be iterated, with each worker's own part dealt out; UserError where it cannot be."""
    facts = strategy.facts
    reason = facts.cannot_stream if task.own is None else facts.cannot_read_apart
    if isinstance(task.data, Experience):
        reason = facts.cannot_act
    if reason:
        raise UserError(
            f"data is {task.stream_name}: {reason}; use another strategy, or samples that can be looked up"
        )
    if length.steps is None:
        raise UserError(
            f"data is {task.stream_name}, whose epochs have no known length; give steps=, the number of global "
            "batches, instead of epochs="
        )
    own, parts = task.own, strategy.shares(workers)
    if own is None:
        return task
    if task.batch_size < parts:
        raise UserError(
            f"task.batch_size={task.batch_size}: each of {parts} workers reads data of its own, and some would get no "
            f"sample; give {parts} or more, or fewer workers"
        )
    return replace(task, data=own.dealt(parts))


def _stream_length(task: Task, length: Length) -> tuple[int, int]:
    """The steps of a run, and after how many it is evaluated: at its end, but for experience, which changes with it."""
    steps = length.steps or 0
    return steps, max(1, steps // 10) if isinstance(task.data, Experience) else steps
