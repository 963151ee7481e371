"""`compare`: the same task under several strategies, one run after the other, and what came out side by side."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from manyhands.data.randomness import preserved
from manyhands.data.store.outputs import require_empty
from manyhands.engine.device import check_device
from manyhands.engine.fitting import fit
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.options import Options
from manyhands.engine.passes import PASS_LOSS
from manyhands.engine.request import Length, Request
from manyhands.engine.session import check_capacity_for
from manyhands.engine.slowdown import Slowdown
from manyhands.errors import ManyhandsError, UserError
from manyhands.lab.compare.comparison import Target, Trial, parse_strategies, trials, workers_of
from manyhands.lab.compare.figures import FailedTrial, Figures, Measured, figures
from manyhands.lab.compare.measured_run import measure
from manyhands.lab.compare.price import Prices
from manyhands.places.local.signals import signal_of
from manyhands.strategy import Strategy

__all__ = ["CompareSettings", "Comparison", "Progress", "Score", "Tell", "compare"]

_EVALUATIONS = 10  # of a run


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """How each run of a comparison is made; all of them alike."""

    workers: int = 2
    steps: int | None = None
    epochs: int | None = None
    rounds: int | None = None
    """Of the strategies that count rounds; the others take `steps` or `epochs`."""
    seed: int = 0
    repeats: int = 1
    slow: Slowdown | None = None
    target: Target | None = None
    """What the time is measured to; None: what the better half of the strategies ends with."""
    evaluate_every: int | None = None
    """Measure the metrics after every so many steps; None: ten times a run."""
    prices: Prices | None = None
    """What each process costs in an hour; None: nobody asked."""
    devices: tuple[str, ...] = ("cpu",)
    """Where the workers compute; with several, every strategy is compared on each."""
    allow_overload: bool = False
    """Start even if the workers do not seem to fit into the memory and the limits of this host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What a trained model is worth besides, measured once, at the end of each run; more is better."""

    names: tuple[str, ...]
    of: Callable[[nn.Module], Mapping[str, float]]
    """By name, those that can be told of this model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a comparison is, as a run begins."""

    done: int
    runs: int
    strategy: str
    seconds_left: float | None
    """None before the first run has ended."""


Tell = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What came out; of an interrupted one, what was done by then."""

    figures: Figures
    interrupted: bool
    notes: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """What was asked for and is not here, in sentences; they are among the notes, too."""

    @property
    def failed(self) -> bool:
        """Whether a run came to nothing."""
        return any(row.failures for row in self.figures.rows)


def compare(
    task: AnyTask,
    strategies: str,
    *,
    out: Path | str,
    settings: CompareSettings | None = None,
    tell: Tell | None = None,
    score: Score | None = None,
) -> Comparison:
    """Run `task` under strategies separated by semicolons, each run in a directory of its own under `out`.

    Everything is checked before the first run: a UserError means that nothing ran. A run that fails is a row with its
    sentence, and the others go on. Ctrl-C ends the run that it meets, and what is done by then comes back.
    """
    settings = settings or CompareSettings()
    chosen = parse_strategies(strategies)
    requests, left_out = _checked(task, chosen, settings, score)
    order = trials(len(requests), settings.repeats)
    out = Path(out)
    require_empty(out)
    runs: list[Measured | FailedTrial] = []
    interrupted = False
    try:
        for run in _all_runs(requests, order, out, tell or _tell_nobody, score):
            runs.append(run)
    except (KeyboardInterrupt, SystemExit) as stop:
        if signal_of(stop) is None:
            raise
        interrupted = True
    pairs = [(request.strategy, request.workers) for request in requests]
    several = len(settings.devices) > 1
    found = figures(
        pairs,
        runs,
        settings.target,
        requests[0].plan.evaluate_every,
        settings.prices,
        scores=score.names if score is not None else (),
        devices=[request.plan.device for request in requests] if several else (),
    )
    notes = [
        *left_out,
        *(
            f"{found.rows[run.place].name}: {note}"
            for run in runs
            if isinstance(run, Measured)
            for note in run.notes
        ),
    ]
    return Comparison(
        figures=found,
        interrupted=interrupted,
        notes=tuple(dict.fromkeys(notes)),
        left_out=tuple(left_out),
    )


def _checked(
    task: AnyTask, strategies: Sequence[Strategy], settings: CompareSettings, score: Score | None = None
) -> tuple[list[Request], list[str]]:
    """What each strategy is asked for on each device, complete; UserError for the first that makes no sense.

    Besides, in sentences, what is left out because one of several devices is not here, or not for a strategy.
    """
    if settings.target is not None:
        measured = [] if task.evaluation is None else ["evaluation_loss", *task.metrics]
        measured += score.names if score is not None else ()
        settings.target.require_known([*measured, *([PASS_LOSS] if task.passes is not None else [])])
    if settings.slow is not None and settings.slow.worker >= settings.workers:
        raise UserError(
            f"slow: there is no worker {settings.slow.worker} among {settings.workers}; they count from 0"
        )
    requests, left_out = _on_devices(task, strategies, settings)
    for request in requests:
        if settings.prices is not None:
            settings.prices.of(request.strategy, request.workers)  # refused where one has none
    with preserved():
        for request in requests:
            check_capacity_for(request, request.plan.task.model())
    return requests, left_out


def _on_devices(
    task: AnyTask, strategies: Sequence[Strategy], settings: CompareSettings
) -> tuple[list[Request], list[str]]:
    several, requests, left_out = len(settings.devices) > 1, [], []
    for device in settings.devices:
        try:
            check_device(device)
        except UserError as error:
            if not several or device.partition(":")[0] != "cuda":
                raise
            left_out.append(f"{error}; it is left out")
            continue
        for strategy in strategies:
            try:
                requests.append(_whole_request(task, strategy, settings, device))
            except UserError as error:
                if not several or device == "cpu":
                    raise
                left_out.append(f"{strategy} on {device} is left out: {error}")
    if not requests:
        raise UserError(left_out[0])
    return requests, left_out


def _whole_request(task: AnyTask, strategy: Strategy, settings: CompareSettings, device: str) -> Request:
    """One strategy's, whose steps may be of another size than those of the others."""
    steps = _request(task, strategy, settings, Options(), device).plan.steps
    # Nothing is saved before the end: a checkpoint costs each strategy another time than training.
    options = Options(
        evaluate_every=settings.evaluate_every or math.ceil(steps / _EVALUATIONS),
        checkpoint_every=steps,
        keep_checkpoints=1,
        allow_overload=settings.allow_overload,
        resume_command="",  # a comparison is not resumed
        progress="none",  # it says itself how far it is
    )
    return _request(task, strategy, settings, options, device)


def _request(
    task: AnyTask, strategy: Strategy, settings: CompareSettings, options: Options, device: str
) -> Request:
    workers = workers_of(strategy, settings.workers)
    slow = settings.slow if settings.slow is not None and settings.slow.worker < workers else None
    options = replace(options, slow=slow)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is said when the run begins
        length = (
            Length(rounds=settings.rounds)
            if strategy.facts.counts_rounds
            else Length(steps=settings.steps, epochs=settings.epochs)
        )
        return Request.make(task, strategy, workers, length, settings.seed, options, device)


def _all_runs(
    requests: Sequence[Request], order: Sequence[Trial], out: Path, tell: Tell, score: Score | None
) -> Iterator[Measured | FailedTrial]:
    """What came out of each run, as soon as it has ended."""
    began = time.monotonic()
    for done, trial in enumerate(order):
        request = requests[trial.place]
        left = (time.monotonic() - began) / done * (len(order) - done) if done else None
        name = (
            str(request.strategy)
            if request.plan.device == "cpu"
            else f"{request.strategy} on {request.plan.device}"
        )
        tell(Progress(done=done, runs=len(order), strategy=name, seconds_left=left))
        try:
            yield _run(trial, request, out / trial.folder(request.strategy), score)
        except ManyhandsError as error:
            yield FailedTrial(place=trial.place, repeat=trial.repeat, sentence=str(error))


def _run(trial: Trial, request: Request, folder: Path, score: Score | None) -> Measured:
    plan = request.plan
    with _caught() as said:
        try:
            run = fit(
                plan.task,
                request.strategy,
                workers=request.workers,
                steps=None if request.strategy.facts.counts_rounds else plan.steps,
                rounds=plan.steps if request.strategy.facts.counts_rounds else None,
                seed=plan.seed,
                device=plan.device,
                out=folder,
                options=request.options,
            )
        except ManyhandsError:
            raise
        except Exception as error:  # the task's own, under `single`; elsewhere a worker's failure names it
            raise ManyhandsError(f"{type(error).__name__}: {error}") from error
    measured = measure(trial, folder, request.strategy, tuple(said))
    return measured.scored(score.of(run.model)) if score is not None else measured


def _tell_nobody(progress: Progress) -> None:
    del progress


@contextmanager
def _caught() -> Iterator[list[str]]:
    """The warnings of the body as sentences, which a report keeps and a terminal would lose."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield said
    said += [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
