"""`compare`: the same task under several strategies, one run after the other, and what came out side by side."""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import nn

from manyhands.data.randomness import preserved
from manyhands.data.store.atomic import require_empty
from manyhands.data.store.rundir import RunDirectory
from manyhands.engine.device import check_device
from manyhands.engine.fitting import fit
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.options import Options, Slowdown
from manyhands.engine.request import Length, Request
from manyhands.engine.run import PASS_LOSS
from manyhands.engine.session import check_capacity_for
from manyhands.errors import DataError, ManyhandsError, UserError
from manyhands.lab.compare.comparison import Progress, Target, Trial, parse_strategies, trials, workers_of
from manyhands.lab.compare.energy import EnergyCounter, EnergyMeter, energy_counters
from manyhands.lab.compare.figures import FailedTrial, Figures, Measured, Point, Prices, figures
from manyhands.observe.analyse.totals import WorkerTotals
from manyhands.observe.record.checked_values import text, whole
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import RoleEvents, RunEvents, read_run_events
from manyhands.places.local.signals import signal_of
from manyhands.strategy import Strategy


def time_stopped(
    evaluations: Mapping[int, Mapping[int, float]], workers: int, *, together: bool
) -> Callable[[int], float]:
    """How long training stood still for evaluations after fewer than so many steps.

    The longest of each where all stop `together`, and else the mean over all workers.
    """
    steps = sorted(evaluations)
    each = [evaluations[step].values() for step in steps]
    until_s = [0.0, *accumulate(max(took) if together else sum(took) / workers for took in each)]
    return lambda step: until_s[bisect.bisect_left(steps, step)]


def measure(trial: Trial, run: Path, strategy: Strategy, notes: tuple[str, ...] = ()) -> Measured:
    """The numbers of the run that ended in this directory; `notes` are what was said while it ran."""
    directory = RunDirectory.open(run, lock=False)
    summary = directory.read_summary()
    if summary is None:
        raise DataError(f"{run} has no summary: the run has not ended")
    events = read_run_events(directory.events_path)
    try:
        return _measured(trial, strategy, summary, events, directory.metrics.read(), notes)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, UserError):
            raise
        raise DataError(
            f"{run}: its summary or its history does not hold what the end of a run writes ({error!r:.200})"
        ) from error


def _measured(
    trial: Trial,
    strategy: Strategy,
    summary: dict[str, Any],
    events: RunEvents,
    rows: list[dict[str, Any]],
    notes: tuple[str, ...],
) -> Measured:
    workers = [WorkerTotals.from_dict(row) for row in summary["per_worker"]]
    by_workers = [role for role in events.roles if role.name.startswith("worker")]
    evaluations: dict[int, dict[int, float]] = defaultdict(dict)  # seconds, by steps before and by worker
    for role in by_workers:
        for one in role.of(EventKind.EVALUATE):
            evaluations[int(one["step"]) + 1][role.role] = int(one["duration_ns"]) / 1e9
    stopped_s = time_stopped(evaluations, len(workers), together=strategy.facts.meets_to_evaluate)
    losses, measured = _points(rows, stopped_s)
    idle_s = _waits_for_evaluations(by_workers, evaluations)
    sent = [(one.messages_sent, one.bytes_sent) for one in workers]
    for role in events.roles:
        if not role.name.startswith("worker"):  # those of workers are in their own totals
            sends = role.of(EventKind.SEND)
            sent.append((int(sends["count"].sum()), int(sends["num_bytes"].sum())))
    stale = summary.get("staleness") or summary.get("overlap") or {"mean": 0.0, "max": 0}
    return Measured(
        place=trial.place,
        repeat=trial.repeat,
        steps=_whole(summary, "steps"),
        samples=_whole(summary, "samples"),
        seconds=max((point.at_s for point in losses or measured), default=0.0),  # some report no losses
        losses=tuple(losses),
        evaluations=tuple(sorted(measured, key=lambda point: point.step)),
        accounted_s=sum(worker.accounted_s for worker in workers) - sum(idle_s.values()),
        waited_s=sum(worker.wait_s for worker in workers) - sum(idle_s.values()),
        waited_for_s={
            peer: sum(worker.wait_for_s[peer] for worker in workers if peer < len(worker.wait_for_s))
            - idle_s.get(peer, 0.0)
            for peer in range(len(workers))
        },
        messages=sum(messages for messages, _ in sent),
        num_bytes=sum(num_bytes for _, num_bytes in sent),
        busiest_bytes=max((num_bytes for _, num_bytes in sent), default=0),
        staleness_mean=float(stale["mean"]),
        staleness_max=int(stale["max"]),
        notes=(*notes, *map(text, summary["notes"]), *events.notes),
    )


def _whole(summary: dict[str, Any], key: str) -> int:
    found = whole(summary[key])
    if found is None:
        raise ValueError(f"{key} is not an integer")
    return found


def _waits_for_evaluations(
    workers: Sequence[RoleEvents], evaluations: Mapping[int, Mapping[int, float]]
) -> dict[int, float]:
    alone = {step: next(iter(took.items())) for step, took in evaluations.items() if len(took) == 1}
    idle_s: dict[int, float] = defaultdict(float)
    for role in workers:
        for wait in role.of(EventKind.WAIT):
            evaluator, took_s = alone.get(int(wait["step"]), (None, 0.0))
            if evaluator is not None and int(wait["peer"]) == evaluator:
                idle_s[evaluator] += min(took_s, int(wait["duration_ns"]) / 1e9)
    return idle_s


def _points(rows: list[dict[str, Any]], stopped_s: Callable[[int], float]) -> tuple[list[Point], list[Point]]:
    losses, evaluations = [], []
    for row in rows:
        step, at_s = row["step"], row["at_s"]
        if row.get("loss") is not None:
            at_s -= stopped_s(step)
            losses.append(Point(step=step, at_s=at_s, values={"loss": row["loss"]}))
        elif "metrics" in row:
            at_s -= stopped_s(step + 1)
            known = {name: value for name, value in row["metrics"].items() if value is not None}
            evaluations.append(Point(step=step, at_s=at_s, values=known))
    return losses, evaluations


_EVALUATIONS = 10  # of a run


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """How each run of a comparison is made; all of them alike."""

    workers: int = 2
    steps: int | None = None
    epochs: int | None = None
    rounds: int | None = None  # of the strategies that count rounds; the others take `steps` or `epochs`
    seed: int = 0
    repeats: int = 1
    slow: Slowdown | None = None
    target: Target | None = None
    """What the time is measured to; None: what the better half of the strategies ends with."""
    evaluate_every: int | None = None  # measure the metrics after every so many steps; None: ten times a run
    prices: Prices | None = None  # what each process costs in an hour; None: nobody asked
    devices: tuple[str, ...] = ("cpu",)
    """Where the workers compute; with several, every strategy is compared on each."""
    allow_overload: bool = False
    """Start even if the workers do not seem to fit into the memory and the limits of this host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What a trained model is worth besides, measured once, at the end of each run; more is better."""

    names: tuple[str, ...]
    of: Callable[[nn.Module], Mapping[str, float]]  # by name, those that are known of this model


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
        return any(row.failures for row in self.figures.rows)


def compare(
    task: AnyTask,
    strategies: str,
    *,
    out: Path | str,
    settings: CompareSettings | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    score: Score | None = None,
) -> Comparison:
    """Run `task` under strategies separated by semicolons, each run in a directory of its own under `out`.

    Everything is checked before the first run: a UserError means that nothing ran. A run that fails is a row with its
    sentence, and the others continue. Ctrl-C ends the run that it meets, and what is done by then comes back.
    """
    settings = settings or CompareSettings()
    chosen = parse_strategies(strategies)
    requests, left_out = requests_of(task, chosen, settings, score)
    order = trials(len(requests), settings.repeats)
    out = Path(out)
    require_empty(out)
    energy = {request.plan.device: energy_counters(request.plan.device) for request in requests}
    runs: list[Measured | FailedTrial] = []
    began, interrupted = time.monotonic(), False
    try:
        for trial in order:
            request, done = requests[trial.place], len(runs)
            left = (time.monotonic() - began) / done * (len(order) - done) if done else None
            on = f" on {request.plan.device}" if request.plan.device != "cpu" else ""
            named = f"{request.strategy}{on}"
            on_progress(Progress(done=done, runs=len(order), current=named, seconds_left=left))
            try:
                counters, _ = energy[request.plan.device]
                runs.append(_run(trial, request, out / trial.folder(request.strategy), score, counters))
            except ManyhandsError as error:
                runs.append(FailedTrial(place=trial.place, repeat=trial.repeat, sentence=str(error)))
    except (KeyboardInterrupt, SystemExit) as stop:
        if signal_of(stop) is None:
            raise
        interrupted = True
    found = figures(
        [(request.strategy, request.workers) for request in requests],
        runs,
        settings.target,
        requests[0].plan.evaluate_every,
        settings.prices,
        scores=score.names if score is not None else (),
        devices=[request.plan.device for request in requests] if len(settings.devices) > 1 else (),
    )
    about_energy = " ".join(dict.fromkeys(sentence for _, sentence in energy.values() if sentence))
    found = dataclasses.replace(found, about_energy=about_energy)
    measured = [run for run in runs if isinstance(run, Measured)]
    notes = [*left_out, *(f"{found.rows[run.place].name}: {note}" for run in measured for note in run.notes)]
    return Comparison(
        figures=found, interrupted=interrupted, notes=tuple(dict.fromkeys(notes)), left_out=tuple(left_out)
    )


def requests_of(
    task: AnyTask, strategies: Sequence[Strategy], settings: CompareSettings, score: Score | None = None
) -> tuple[list[Request], list[str]]:
    """What each strategy is asked for on each device, complete; UserError for the first that makes no sense.

    Besides, in sentences, what is left out because a device is not here, or not for a strategy.
    """
    if settings.target is not None:
        measured = [] if task.evaluation is None else ["evaluation_loss", *task.metrics]
        measured += score.names if score is not None else ()
        settings.target.require_known([*measured, *([PASS_LOSS] if task.passes is not None else [])])
    if settings.slow is not None and settings.slow.worker >= settings.workers:
        raise UserError(
            f"slow: there is no worker {settings.slow.worker} among {settings.workers}; numbers start at 0"
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
    workers = workers_of(strategy, settings.workers)
    slow = settings.slow if settings.slow is not None and settings.slow.worker < workers else None
    length = Length(steps=settings.steps, epochs=settings.epochs)
    if strategy.facts.counts_rounds:
        length = Length(rounds=settings.rounds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is said when the run begins
        about = (task, strategy, workers, length, settings.seed)
        steps = Request.make(*about, Options(slow=slow), device).plan.steps
        # Nothing is saved before the end: a checkpoint costs each strategy another time than training.
        options = Options(
            slow=slow,
            evaluate_every=settings.evaluate_every or math.ceil(steps / _EVALUATIONS),
            checkpoint_every=steps,
            keep_checkpoints=1,
            allow_overload=settings.allow_overload,
            resume_command="",  # a comparison is not resumed
            progress="none",  # it says itself how far it is
        )
        return Request.make(*about, options, device)


def _run(
    trial: Trial, request: Request, folder: Path, score: Score | None, counters: Sequence[EnergyCounter]
) -> Measured:
    plan, in_rounds = request.plan, request.strategy.facts.counts_rounds
    meter = EnergyMeter(counters)
    with (
        warnings.catch_warnings(record=True) as caught,
        meter,
    ):  # kept for the report: a terminal would lose them
        warnings.simplefilter("always", UserWarning)
        try:
            run = fit(
                plan.task,
                request.strategy,
                workers=request.workers,
                steps=None if in_rounds else plan.steps,
                rounds=plan.steps if in_rounds else None,
                seed=plan.seed,
                device=plan.device,
                out=folder,
                options=request.options,
            )
        except ManyhandsError:
            raise
        except Exception as error:  # the task's own, under `single`; elsewhere a worker's failure names it
            raise ManyhandsError(f"{type(error).__name__}: {error}") from error
    said = tuple(str(one.message) for one in caught if issubclass(one.category, UserWarning))
    measured = dataclasses.replace(measure(trial, folder, request.strategy, said), joules=meter.joules)
    return measured.scored(score.of(run.model)) if score is not None else measured
