"""What a run is asked to be: the options of `fit`, and the request that is complete and makes sense."""

from __future__ import annotations

import platform
import queue
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manyhands.analyse.totals import TotalsSnapshot
from manyhands.cluster.watchdog import check_watchdog_s
from manyhands.data.plan import BatchPlan
from manyhands.draw.showing import PROGRESS
from manyhands.errors import UserError, nearest
from manyhands.kernel import AnyTask
from manyhands.slowdown import Slowdown
from manyhands.stopping import EarlyStopping
from manyhands.store.fingerprint import parameter_shapes
from manyhands.strategy import Strategy
from manyhands.training.clipping import check_clipping
from manyhands.training.commands import Command
from manyhands.training.computing import TrainingPlan
from manyhands.version import __version__

__all__ = ["Options", "Request", "View"]

View = Callable[[int, Callable[[], TotalsSnapshot]], AbstractContextManager[object]]
"""Shows a run while it goes on: called with the number of steps and a function that gives the latest totals."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What most runs leave as it is."""

    evaluate_every: int | None = None
    """Evaluate after every so many steps (None: after each epoch), and at the end."""

    checkpoint_every: int | None = None
    """Save after every so many steps (None: ten times a run, more seldom where that costs much), and at the end; needs
    `out`."""

    keep_checkpoints: int = 3
    """How many of the last checkpoints to keep; the best one is kept besides."""

    early_stopping: EarlyStopping | None = None
    """End the run when a metric of its evaluations no longer improves."""

    slow: Slowdown | None = None
    """Slow a worker on purpose."""

    skip_nonfinite: bool = False
    """Leave out an update whose gradient is not finite, instead of ending the run; ps only."""

    autocast: bool = False
    """Compute in bfloat16 where torch's autocast finds that safe."""

    compile: bool = False
    """Let torch.compile make the model faster."""

    timeout_s: float = 300.0
    """How long a worker waits for another that is alive before the run fails naming it."""

    check_every: int = 100
    """Compare the parameters of workers that hold copies after every so many steps; 0: never."""

    watchdog_s: float = 60.0
    """How long nobody may make progress before the run fails naming who holds it up; 0: for ever."""

    allow_overload: bool = False
    """Start even if the workers do not seem to fit into the memory and the limits of this host."""

    resume_command: str | None = None
    """How to go on, for the line that a broken or interrupted run ends with (None: `fit` again); empty: no line."""

    tells_interruption: bool = True
    """Whether `fit` says what an interruption left; a caller who says more turns it off."""

    commands: queue.SimpleQueue[Command] | None = None
    """Where changes of the workers come from while the run goes on; `start` makes one."""

    own_files: frozenset[str] = frozenset()
    """Names of files in `out` that are the caller's, and may be there before the run is."""

    on_rows: Callable[[Sequence[Mapping[str, Any]]], None] | None = None
    """Hears rows of the history as they come, in the thread of `fit`."""

    progress: str = "auto"
    """How the run shows on stderr how far it is: `bar`, `lines` (one every few seconds) or `none`. `auto` is a bar in a
    terminal or a notebook, lines where stderr is redirected, nothing in a test or beside the main thread; a run of a
    second shows nothing."""

    view: View | None = None
    """Shows the run while it goes on, in the place of `progress`."""

    def __post_init__(self) -> None:
        for name in ("evaluate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value} must be at least 1; leave it out for the default")
        if self.keep_checkpoints < 1:
            raise UserError(f"keep_checkpoints={self.keep_checkpoints} must be at least 1")
        if self.check_every < 0:
            raise UserError(f"check_every={self.check_every} must be at least 1, or 0 to compare nothing")
        if not self.timeout_s > 0:
            raise UserError(f"timeout_s={self.timeout_s} must be above 0")
        if self.progress not in PROGRESS:
            raise UserError(f"progress={self.progress!r}: {nearest(str(self.progress), PROGRESS)}")
        check_watchdog_s(self.watchdog_s)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for, checked and complete."""

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
        length: tuple[int | None, int | None],
        seed: int,
        options: Options,
        device: str,
    ) -> Request:
        """Check what was asked for and fill in the rest; `length` is in steps or in epochs."""
        if not isinstance(workers, int) or workers < 1:
            raise UserError(f"workers={workers!r} must be a whole number of at least 1")
        task = task.for_strategy(strategy, workers)
        strategy.check(workers, device, compiled=task.compiled)
        check_clipping(task, strategy)
        _check_stopping(task, strategy, options.early_stopping)
        if options.skip_nonfinite and not strategy.can_skip_updates:
            raise UserError(f"skip_nonfinite: strategy {strategy} cannot leave one worker's part out; ps can")
        if options.slow is not None and options.slow.worker >= workers:
            raise UserError(
                f"slow: there is no worker {options.slow.worker} among {workers}; they count from 0"
            )
        samples = task.samples
        batches = BatchPlan(samples, task.batch_size, seed)
        smallest = min(task.batch_size, samples)
        if workers > smallest and strategy.splits_batches and not task.compiled:
            warnings.warn(
                f"{workers} workers share batches of {smallest} samples: {workers - smallest} of them have nothing "
                "to do in each step",
                stacklevel=3,
            )
        steps = _number_of_steps(length, batches.batches_per_epoch, task.epochs)
        plan = TrainingPlan(
            task=task,
            steps=steps,
            seed=seed,
            evaluate_every=options.evaluate_every or batches.batches_per_epoch,
            checkpoint_every=options.checkpoint_every or task.checkpoint_every(steps),
            stopping=options.early_stopping,
            slow=options.slow,
            device=device,
            autocast=options.autocast,
            compile=options.compile,
            check_every=options.check_every,
        )
        return cls(plan=plan, strategy=strategy, workers=workers, samples=samples, options=options)

    def config(self, model: nn.Module) -> dict[str, Any]:
        """What config.json holds."""
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


def _check_stopping(task: AnyTask, strategy: Strategy, stopping: EarlyStopping | None) -> None:
    if stopping is None:
        return
    if strategy.cannot_stop_early:
        raise UserError(
            f"early_stopping: {strategy.cannot_stop_early}; use another strategy, or leave it out"
        )
    if task.evaluation is None:
        raise UserError(
            "early_stopping: the task has no evaluation data to judge by; give evaluation= as well"
        )
    names = ["evaluation_loss", *task.metrics]
    if stopping.metric not in names:
        raise UserError(
            f"early_stopping: the task has no metric {stopping.metric!r}; {nearest(stopping.metric, names)}"
        )


def _number_of_steps(length: tuple[int | None, int | None], batches_per_epoch: int, usual_epochs: int) -> int:
    steps, epochs = length
    if steps is not None and epochs is not None:
        raise UserError(f"steps={steps} and epochs={epochs} say the same thing twice; give one of them")
    for name, value in (("steps", steps), ("epochs", epochs)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UserError(f"{name}={value!r} must be a whole number of at least 1")
    return steps if steps is not None else (epochs or usual_epochs) * batches_per_epoch
