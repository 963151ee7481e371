"""The options of `fit`; light to import, because scripts make them before anything is trained."""

from __future__ import annotations

import math
import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from manyhands.data.randomness import mix
from manyhands.engine.callbacks import Callback
from manyhands.errors import UserError, named_arguments, nearest
from manyhands.places.local.host import check_watchdog_s

if TYPE_CHECKING:
    from manyhands.observe.analyse.totals import TotalsSnapshot
    from manyhands.places.place import Command
    from manyhands.transport.security import Security

MEAN: Final = "mean"
SYNCHRONIZE: Final = "synchronize"
BUFFERS: Final = ("broadcast", MEAN, SYNCHRONIZE)
"""What `Options.buffers` may be."""

HALF: Final = "float16"
FP8: Final = "fp8"
PRECISIONS: Final = ("bfloat16", HALF, FP8)
"""What `Options.autocast` may be; True is the first."""

PROGRESS: Final = ("auto", "bar", "lines", "none")
"""What `Options.progress` may be."""

LOGGED: Final = ("lr", "grad_norm")
"""What `Options.log` may name."""

TLS_VARIABLE = "MANYHANDS_TLS"
"""Where the environment names the folder of this host's certificate."""

View: TypeAlias = "Callable[[int, Callable[[], TotalsSnapshot]], AbstractContextManager[object]]"
"""Shows a run while it goes on: called with the number of steps and a function that gives the latest totals."""


@named_arguments
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
    restore_best: bool = False
    """Return the weights of the best evaluation instead of the last ones: by the metric and mode of `early_stopping`,
    or by the lowest `evaluation_loss`. `summary["best_step"]` says which, and `final` holds its metrics."""
    log: Sequence[str] = ()
    """What the row of each step tells besides: `lr`, the learning rate that it was taken with (of further groups of
    parameters `lr_1`, …), and `grad_norm`, the norm of the gradient of the global batch before it is clipped; under
    `local` and `hogwild`, of a worker's own."""
    slow: Slowdown | None = None
    """Slow a worker on purpose."""
    skip_nonfinite: bool = False
    """Leave out an update whose gradient is not finite, instead of ending the run; ps only."""
    autocast: bool | str = False
    """Compute in bfloat16 where torch's autocast finds that safe; `float16`: in that, with a loss that is scaled as by
    torch's `GradScaler`, whose row says `skipped` where a step was left out; `fp8`: in bfloat16, and the linear layers
    of the model's blocks multiply in 8 bits, on a GPU that can (compute capability 8.9)."""
    compile: bool | None = None
    """Let torch.compile make one faster program of the model and the loss; None: under `single` on a GPU. It costs up
    to a minute at the first step. In workers of their own the loss of a script or notebook is not compiled with it."""
    recompute: bool = False
    """Compute the activations of each block of the model again in backward instead of keeping them (activation
    checkpointing): much less memory for a third more computing, and the same numbers."""
    buffers: str = "broadcast"
    """How the workers' buffers, such as the running statistics of batch norm, become the same before an evaluation, a
    checkpoint and the end: `broadcast` takes those of worker 0, `mean` their mean; with `synchronize` batch norm
    computes with the statistics of the whole global batch, as one process does."""
    timeout_s: float = 300.0
    """How long a worker waits for another that is alive before the run fails naming it."""
    check_every: int = 100
    """Compare the parameters of workers that hold copies after every so many steps; 0: never."""
    watchdog_s: float = 60.0
    """How long nobody may make progress before the run fails naming who holds it up; 0: for ever."""
    min_workers: int | None = None
    """With how few workers a run goes on that can lose some (None: one); with fewer it ends, naming who was lost. Under
    `ps` on a cluster that shrinks: down to so many (None: the number that was asked for)."""
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
    callbacks: Sequence[Callback] = ()
    """Hear of steps, evaluations, checkpoints and the end, in the thread of `fit`, and may ask to stop."""
    on_rows: Callable[[Sequence[Mapping[str, Any]]], None] | None = None
    """Hears rows of the history as they come, in the thread of `fit`."""
    progress: str = "auto"
    """How the run shows on stderr how far it is: `bar`, `lines` (one every few seconds) or `none`. `auto` is a bar in a
    terminal or a notebook, lines where stderr is redirected, nothing in a test or beside the main thread; a run of a
    second shows nothing."""
    tls: str | Path | None = None
    """The folder with this host's certificate, key and the run's token (`manyhands certificates`), with which every TCP
    connection between hosts is encrypted and both ends known; None: what the environment's MANYHANDS_TLS says."""
    insecure: bool = False
    """Let connections between hosts go in the clear, where everybody on the network may read and change what is
    trained."""
    view: View | None = None
    """Shows the run while it goes on, in the place of `progress`."""
    max_workers: int | None = None
    """On a cluster that grows: up to so many workers (None: the number that was asked for)."""

    def __post_init__(self) -> None:
        for name in ("evaluate_every", "checkpoint_every", "keep_checkpoints", "min_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value} must be at least 1; leave it out for the default")
        if self.check_every < 0:
            raise UserError(f"check_every={self.check_every} must be at least 1, or 0 to compare nothing")
        if not self.timeout_s > 0:
            raise UserError(f"timeout_s={self.timeout_s} must be above 0")
        if isinstance(self.autocast, str) and self.autocast not in PRECISIONS:
            raise UserError(f"autocast={self.autocast!r}: {nearest(self.autocast, PRECISIONS)}")
        if self.buffers not in BUFFERS:
            raise UserError(f"buffers={self.buffers!r} is not known; {nearest(str(self.buffers), BUFFERS)}")
        if self.progress not in PROGRESS:
            raise UserError(f"progress={self.progress!r}: {nearest(str(self.progress), PROGRESS)}")
        if self.insecure and self.tls is not None:
            raise UserError("tls and insecure were both given; leave out one")
        if isinstance(self.log, str):
            raise UserError(f"log={self.log!r}: must be a list, such as ['lr', 'grad_norm']")
        for name in self.log:
            if name not in LOGGED:
                raise UserError(f"log: {name!r} is not known; {nearest(str(name), LOGGED)}")
        check_watchdog_s(self.watchdog_s)
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise UserError(
                    f"callbacks has {callback!r}; each must be an instance of a subclass of manyhands.Callback"
                )

    def security(self, environment: Mapping[str, str] = os.environ) -> Security:
        """How connections of this run are protected; UserError names a file of `tls` that is missing or wrong.

        Without `tls`, MANYHANDS_TLS or `insecure` nothing may leave this host.
        """
        from manyhands.transport.security import Security

        folder = self.tls if self.tls is not None else environment.get(TLS_VARIABLE) or None
        if self.insecure and folder is not None:
            raise UserError(f"--insecure was given, and {TLS_VARIABLE}={folder} is set; leave out one")
        if folder is not None:
            return Security.from_directory(folder)
        return Security.insecure() if self.insecure else Security.loopback()


_FIELDS = ("worker", "factor", "probability", "from")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """Worker `worker` takes `factor` times as long to compute, at each step from `from_step` on with `probability`."""

    worker: int
    """Which one, from 0."""
    factor: float
    """How many times as long it computes."""
    probability: float = 1.0
    """How likely each step is to be slow."""
    from_step: int = 0
    """The first step that may be."""

    def __post_init__(self) -> None:
        if self.worker < 0:
            raise UserError(f"slow: worker={self.worker} must not be negative")
        if not self.factor >= 1:
            raise UserError(f"slow: factor={self.factor} must be at least 1 (5 means five times as long)")
        if not 0 < self.probability <= 1:
            raise UserError(f"slow: probability={self.probability} must be above 0 and at most 1")
        if self.from_step < 0:
            raise UserError(f"slow: from={self.from_step} must not be negative; steps count from 0")

    @classmethod
    def parse(cls, text: str) -> Slowdown:
        """Read `worker=1,factor=5[,probability=0.1][,from=400]`."""
        values: dict[str, str] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if name not in _FIELDS or not equals:
                raise UserError(f"slow: {part.strip()!r} is not a setting; {nearest(name, _FIELDS)}")
            values[name] = value
        if not {"worker", "factor"} <= values.keys():
            raise UserError(f"slow: {text!r} must name worker and factor, as in worker=1,factor=5")
        try:
            return cls(
                worker=int(values["worker"]),
                factor=float(values["factor"]),
                probability=float(values.get("probability", "1")),
                from_step=int(values.get("from", "0")),
            )
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"slow: {text!r} has a value that is not a number ({error})") from error

    def extra_s(self, *, seed: int, step: int, worker_rank: int, compute_s: float) -> float:
        """How much longer this worker's step must take, having taken `compute_s`."""
        if worker_rank != self.worker or step < self.from_step:
            return 0.0
        draw = mix(seed, step, worker_rank, 0x510) / 2**64
        return (self.factor - 1) * compute_s if draw < self.probability else 0.0

    def sleep(self, seed: int, step: int, worker_rank: int, compute_s: float) -> None:
        time.sleep(self.extra_s(seed=seed, step=step, worker_rank=worker_rank, compute_s=compute_s))


@named_arguments
@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """End a run after `patience` evaluations in a row that were not better than the best before them."""

    metric: str = "evaluation_loss"
    """The name of a metric of the task, or `evaluation_loss`."""
    patience: int = 3
    """How many evaluations in a row without a better one end the run."""
    min_delta: float = 0.0
    """What counts as better is better by more than this."""
    mode: str = "min"
    """Whether lower (`min`) or higher (`max`) is better."""

    def __post_init__(self) -> None:
        if not isinstance(self.patience, int) or self.patience < 1:
            raise UserError(f"early_stopping: patience is {self.patience!r}; it must be an integer above 0")
        if not 0 <= self.min_delta < math.inf:
            raise UserError(f"early_stopping: min_delta is {self.min_delta!r}; it must be at least 0")
        if self.mode not in ("min", "max"):
            raise UserError(
                f"early_stopping: mode is {self.mode!r}; {nearest(str(self.mode), ('min', 'max'))}"
            )


class StoppingCount:
    """Counts the evaluations of one run; every worker that sees the same ones comes to the same end."""

    def __init__(self, rule: EarlyStopping) -> None:
        self._rule = rule
        self._best, self._left = math.nan, rule.patience
        self.best_step = 0  # after which step the best evaluation was; 0 where none was a number

    def add(self, step: int, metrics: Mapping[str, float]) -> bool:
        """The evaluation after `step` steps; whether the run ends with it."""
        value = metrics[self._rule.metric]
        gained = self._best - value if self._rule.mode == "min" else value - self._best
        if gained > self._rule.min_delta or (math.isnan(self._best) and not math.isnan(value)):
            self._best, self.best_step, self._left = value, step, self._rule.patience
        else:
            self._left -= 1
        return self._left <= 0

    def better(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than the best so far."""
        score = self.score(metrics)
        return not math.isnan(score) and not score >= self.score({self._rule.metric: self._best})

    def score(self, metrics: Mapping[str, float]) -> float:
        """Lower for a better evaluation; not a number where it has no such metric."""
        value = metrics.get(self._rule.metric, math.nan)
        return value if self._rule.mode == "min" else -value

    @property
    def best(self) -> str:
        return f"{self._rule.metric} {self._best:.6g} after step {self.best_step}"

    @property
    def sentence(self) -> str:
        rule = self._rule
        word = "fallen" if rule.mode == "min" else "risen"
        by = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
        best = f"the best was {self._best:.6g} after step {self.best_step}"
        best = best if self.best_step else "it was never a number"
        return f"{rule.metric} has not {word}{by} in {rule.patience} evaluations; {best}"

    def state(self) -> dict[str, Any]:
        best = None if math.isnan(self._best) else self._best
        return {"metric": self._rule.metric, "best": best, "best_step": self.best_step, "left": self._left}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from there; a run that had ended may be resumed to see the next evaluations."""
        if state["metric"] != self._rule.metric:
            return  # of another metric nothing is known yet
        self._best = math.nan if state["best"] is None else float(state["best"])
        self.best_step = int(state["best_step"])
        self._left = int(state["left"]) or self._rule.patience
