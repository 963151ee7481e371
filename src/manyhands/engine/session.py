"""One run, from the request to the result. Knows strategies through `Training` alone."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

from torch import nn

from manyhands.data.experience import Experience
from manyhands.data.randomness import preserved, seed_all
from manyhands.data.store.atomic import Backlog, WriteFailed
from manyhands.data.store.checkpoint import NoCheckpoint
from manyhands.data.store.rundir import IN_PYTHON, ON_COMMAND_LINE, RunDirectory, fingerprint
from manyhands.engine.callbacks import Beginning, Listeners
from manyhands.engine.device import sharing_sentence
from manyhands.engine.footprint import cost_of, sizes_of
from manyhands.engine.request import Request
from manyhands.engine.run import History, PassLosses, Run
from manyhands.engine.text_speed import text_speed
from manyhands.engine.training import Result, Stage, Training, training_class
from manyhands.errors import Aborted, CorruptCheckpoint, ManyhandsError, NonFinite, UserError
from manyhands.observe.record.checked_values import final_loss, final_metrics
from manyhands.places.local.host import check_capacity, threads_per_role
from manyhands.places.local.signals import signal_of
from manyhands.strategies.registry import entry_of
from manyhands.strategy import Strategy
from manyhands.task import Task

_log = logging.getLogger("manyhands")


def run_session(
    request: Request,
    out: str | Path | None,
    resume: bool,
    drive: Callable[[Training, Stage], Result] = lambda training, stage: training.run(stage),
    *,
    starts: bool = True,
    train: Callable[[Request, nn.Module], Training] | None = None,
) -> Run:
    """Train as requested, in the directory `out` if given; `train` makes a training that is not the strategy's own.

    The place says how to `drive` the training, and whether that starts processes on this host.
    """
    if out is not None:
        request = _recorded(request, Path(out).absolute())
    with preserved(), ExitStack() as stack:
        seed_all(request.plan.seed)
        model = request.plan.task.model()
        if starts:
            check_capacity_for(request, model)
        task = request.plan.task
        sparse = bool(task.sparse) or task.compiled  # a compiled step moves only a record's rows
        sparse = sparse or any(getattr(m, "sparse", False) is True for m in model.modules())
        advice = request.strategy.advice(request.workers, sparse=sparse)
        if advice:
            warnings.warn(advice, stacklevel=5)
        train = train or training_class(request.strategy, compiled=request.plan.task.compiled)
        training = train(request, model)
        directory, done = _open_directory(training, request, model, out, resume)

        def close(directory: RunDirectory) -> None:
            try:
                directory.close()
            except WriteFailed as error:  # a failed sync of the last rows must not discard what was trained
                _log.warning("%s", error)

        if directory is not None:
            stack.callback(close, directory)
        session = _Session(request, directory, done, drive)
        path = directory.path if directory is not None else None
        config, history = request.config(model), session.history
        del model  # large ones need its memory: the worker that trains builds its own
        try:
            session.listeners.begin(Beginning(config=config, history=history, resumed=resume, path=path))
            run = session.train(training)
        except BaseException as error:
            session.listeners.end(None, error)
            if isinstance(error, UserError) and directory is not None and not resume and not history:
                directory.discard()  # a rejected request can be corrected and repeated in the same directory
            raise
        session.listeners.end(run, None)
        return run


def _recorded(request: Request, run: Path) -> Request:
    """With a task that, where it learns from acting, keeps a record of that in the run's directory."""
    task = request.plan.task
    if not isinstance(task, Task) or not isinstance(task.data, Experience):
        return request
    return replace(request, plan=replace(request.plan, task=replace(task, data=task.data.recorded_in(run))))


def check_capacity_for(request: Request, model: nn.Module) -> None:
    """Overload where the workers do not fit on this host, before resources are made; `model` is the task's."""
    if request.options.allow_overload or request.strategy.most_workers == 1:
        return
    task, on_host = request.plan.task, request.plan.device == "cpu"
    sizes = sizes_of(task, model, on_host=on_host)
    threads = threads_per_role(request.workers)
    check_capacity(cost_of(request.strategy, sizes, threads=threads, compiled=task.compiled), request.workers)


def _open_directory(
    training: Training, request: Request, model: nn.Module, out: str | Path | None, resume: bool
) -> tuple[RunDirectory | None, int | None]:
    if out is None:
        return None, None
    config = request.config(model)
    if not resume:
        instead = ON_COMMAND_LINE if request.options.resume_command else IN_PYTHON
        directory = RunDirectory.create(out, config, request.options.own_files, instead)
        try:
            directory.keep(request.plan.task.files)
        except BaseException:
            directory.discard()
            directory.close()
            raise
        return directory, None
    directory = RunDirectory.open(out)
    try:
        conflict = fingerprint(directory.config).conflict(fingerprint(config))
        if conflict is not None:
            raise UserError(f"{out} cannot be resumed: {conflict}")
        if directory.config.get("simulated"):
            raise UserError(f"{out} cannot be resumed: it was simulated; start another run")
        if any(directory.config.get(name) != config[name] for name in ("strategy", "workers")):
            # What is kept becomes a checkpoint that any strategy can load.
            before = Strategy.parse(str(directory.config.get("strategy")))
            trained_by = entry_of(before.word).load_training(compiled=request.plan.task.compiled)
            if trained_by is not None:
                trained_by.hand_over(directory, request.plan, before)
        directory.keep(request.plan.task.files)
        done = training.resume(directory, config)
        directory.update_config(config)
        return directory, done
    except BaseException:
        directory.close()
        raise


class _Session:
    """One run under way: collects what a training reports, and makes a `Run` of it."""

    def __init__(
        self,
        request: Request,
        directory: RunDirectory | None,
        done: int | None,
        drive: Callable[[Training, Stage], Result],
    ) -> None:
        self._request, self._directory, self._drive = request, directory, drive
        self._resumed_from = done
        self.history = History(directory.metrics.read() if directory is not None else ())
        passes = request.plan.task.passes
        self._passes = PassLosses(passes, self.history) if passes is not None else None
        self._notes: list[str] = []
        self._began_s: float | None = None  # when training began, by what rows say of their time
        self.listeners = Listeners(request.options.callbacks)
        self._who_stops = ""
        self._best_step: int | None = None
        if directory is not None:
            self._metrics: Backlog[Mapping[str, Any]] = Backlog(lambda rows: directory.metrics.append(*rows))
            self._members: Backlog[Mapping[str, Any]] = Backlog(lambda rows: directory.append_member(*rows))

    def train(self, training: Training) -> Run:
        began = time.monotonic()
        sharing = sharing_sentence(self._request.plan.device, self._request.workers)
        self._notes += [*training.notes, *([sharing] if sharing is not None else [])]

        def take_checkpoint(step: int, path: Path) -> None:
            self.listeners.saved(step, path)
            self._require_stoppable()

        stage = Stage(
            request=self._request,
            directory=self._directory,
            history=self.history,
            take_rows=self._take_rows,
            take_event=self._take_event,
            take_checkpoint=take_checkpoint,
            say=self._say,
            take_best=partial(setattr, self, "_best_step"),
            stop_wanted=self._stop_wanted,
        )
        try:
            result = self._drive(training, stage)
        except ManyhandsError as error:
            if self._directory is not None:
                self._directory.record_end(error, self._seconds)
            if isinstance(error, NonFinite):
                last_good = "nothing was kept, because the run has no directory (out=)"
                if self._directory is not None:
                    try:
                        last_good = f"the last good checkpoint is {self._directory.checkpoints().load().path}"
                    except NoCheckpoint:
                        last_good = "it broke before the first checkpoint"
                raise NonFinite(f"{error}; {last_good}") from error
            if not isinstance(error, UserError):
                self._add_how_to_resume(error, training)
            raise
        except (KeyboardInterrupt, SystemExit) as stop:
            number = signal_of(stop)
            if number is not None:
                self._report_interruption(number, training)
            raise
        except Exception as error:
            if self._directory is not None and self.listeners.broken is not None:
                name = type(self.listeners.broken).__name__
                reported = ManyhandsError(f"{name}, a callback, raised {type(error).__name__}: {error}")
                self._directory.record_end(reported, self._seconds)
            raise
        self._notes += result.notes
        if self._who_stops and result.stopped_early:
            self._notes.append(f"stopped after step {result.steps_done}: {self._who_stops} asked for it")
        summary = self._summarise(result, time.monotonic() - began)
        if self._directory is not None:
            try:
                self._directory.write_summary(summary)
            except WriteFailed as error:
                self._say(str(error))  # the notes of this summary have it
            self._show(result.model, self._directory.path)
        path = self._directory.path if self._directory is not None else None
        return Run(model=result.model, history=self.history, summary=summary, path=path)

    def _show(self, model: nn.Module, path: Path) -> None:
        task = self._request.plan.task
        if isinstance(task, Task) and isinstance(task.data, Experience):
            try:
                task.data.show(model, path)
            except WriteFailed as error:
                _log.warning("%s", error)

    def _say(self, sentence: str) -> None:
        self._notes.append(sentence)
        _log.warning("%s", sentence)

    def _read_clock(self, rows: Sequence[Mapping[str, Any]]) -> None:
        reported = [row["at_s"] for row in rows if row.get("at_s")]
        if reported:
            began_s = time.monotonic() - max(reported)
            self._began_s = began_s if self._began_s is None else min(self._began_s, began_s)

    @property
    def _seconds(self) -> float:
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    def _take_rows(self, rows: list[dict[str, Any]]) -> None:
        self._read_clock(rows)
        if self._passes is not None:
            rows = self._passes.add(rows)
        self.history.extend(rows)
        if self._directory is not None:
            self._keep(self._metrics, *rows)
        if self._request.options.on_rows is not None:
            self._request.options.on_rows(rows)
        self.listeners.rows(rows)
        self._require_stoppable()

    def _stop_wanted(self) -> bool:
        stop_request, commands = self.listeners.stop_request, self._request.options.commands
        if stop_request is not None:
            self._who_stops = self._who_stops or stop_request.name
        # Where workers can change, the training handles the commands.
        if commands is not None and not self._request.strategy.facts.can_change_workers:
            while not commands.empty():
                commands.get().done.set_result(-1)
                self._who_stops = self._who_stops or "Running.stop"
        return bool(self._who_stops)

    def _require_stoppable(self) -> None:
        """A stop request ends the run where the strategy cannot end all workers after one step."""
        stop_request, reason = self.listeners.stop_request, self._request.strategy.facts.cannot_stop
        if reason and stop_request is not None and stop_request.step < self._request.plan.steps:
            kept = self._directory is not None
            how = "resume it from its directory" if kept else "nothing was kept without out="
            name, step = stop_request.name, stop_request.step
            raise Aborted(f"{name} asked to stop after step {step}: {reason}; {how}")

    def _keep(self, log: Backlog[Any], *records: Any) -> None:
        sentence = log.add(*records)
        if sentence is not None:
            self._say(sentence)

    def _take_event(self, event: Mapping[str, Any]) -> None:
        """Keep an event of a worker, and show it where it is more than a start."""
        self._read_clock([event])
        if self._directory is not None:
            self._keep(self._members, {"unix_s": time.time(), **event})
        if "sentence" in event:
            _log.warning(event["sentence"])

    def _add_how_to_resume(self, error: ManyhandsError, training: Training) -> None:
        if self._directory is None or self._request.options.resume_command == "":
            return
        try:
            step = training.kept_step(self._directory)
        except CorruptCheckpoint:  # resuming will report the damage; this error says why the run ended
            return
        if step:
            kept, command = self._kept(step, self._directory)
            way, text = f"{kept}; continue with: {command}", str(error)
            error.args = (f"{text}\n\n{way}" if "\n" in text else f"{text}; {way}",)

    def _kept(self, step: int, directory: RunDirectory) -> tuple[str, str]:
        """What is kept, and the command to continue."""
        asked = self._request.options.resume_command
        command = f"fit(…, out={str(directory.path)!r}, resume=True)" if asked is None else asked
        return f"step {step} of {self._request.plan.steps} is kept in {directory.path}", command

    def _report_interruption(self, number: Signals, training: Training) -> None:
        directory = self._directory
        if directory is None:
            kept, how = "nothing was kept, because the run has no directory (out=)", ""
        else:
            step = training.kept_step(directory)
            kept, command = self._kept(step, directory)
            kept = kept if step else "no checkpoint was due yet"
            how = f"; {'continue' if step else 'start again'} with: {command}"
            sentence = f"ended by {number.name}; {kept}"
            directory.append_member({"event": "interrupted", "at_s": self._seconds, "sentence": sentence})
        options = self._request.options
        if options.tells_interruption and options.resume_command != "":
            _log.warning(f"manyhands: ended by {number.name}; {kept}{how}")

    def _text_speed(self, observed: Mapping[str, Any]) -> dict[str, Any]:
        """Of a run of text in which a step is a batch of all workers."""
        request, plan = self._request, self._request.plan
        if not request.strategy.facts.stepwise or plan.task.text_work is None:
            return {}
        return text_speed(
            plan.task.text_work(),
            batch=plan.task.batch_size,
            ends=[row["at_s"] for row in self.history if "loss" in row and "at_s" in row],
            used=observed,
            half=plan.autocast and not plan.fp8,
        )

    def _summarise(self, result: Result, wall_s: float) -> dict[str, Any]:
        request, rows = self._request, list(self.history)
        if self._best_step is not None:  # the weights are those of that step
            rows = [row for row in rows if row["step"] <= self._best_step]
        loss = final_loss(rows)
        observed = dict(result.observed)
        measured = {**final_metrics(rows), **observed.pop("final", {})}
        final = {**({} if loss is None else {"loss": loss}), **measured}
        seconds, samples = result.seconds, round(result.samples * request.plan.task.records_each)
        return {
            "task": request.plan.task.name,
            "strategy": str(request.strategy),
            "workers": request.workers,
            "steps": result.steps_done,
            "steps_asked": request.plan.steps,
            "resumed_from_step": self._resumed_from,
            "seed": request.plan.seed,
            "device": request.plan.device,
            "seconds": seconds,
            "startup_s": max(0.0, wall_s - seconds),
            "samples": samples,
            "samples_per_s": samples / seconds if seconds else 0.0,
            **self._text_speed(observed),
            "final": final,
            "bytes_sent": result.sent.total.bytes_sent,
            "messages_sent": result.sent.total.messages_sent,
            "sent": result.sent.to_dict(),
            "stopped_early": result.stopped_early,
            **({} if self._best_step is None else {"best_step": self._best_step}),
            "notes": self._notes,
            **observed,
        }
