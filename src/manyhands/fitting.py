"""`fit`: one task, one strategy, some workers, one run. The only place that knows every room."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import nn

from manyhands.allreduce.shared import warm
from manyhands.cluster.board import State
from manyhands.cluster.local import LocalCluster, Role, threads_per_role
from manyhands.cluster.room import require_room
from manyhands.cluster.signals import signal_of
from manyhands.cluster.watchdog import Watched
from manyhands.device import check_device, sharing_sentence
from manyhands.errors import ManyhandsError, NonFinite, UserError
from manyhands.exchange import SingleExchange
from manyhands.footprint import cost_of, sizes_of
from manyhands.hogwild.results import RowsInOrder, overlap_summary
from manyhands.observe.blackbox import BlackBoxes
from manyhands.observe.collect import Collector
from manyhands.observe.ring import EventRing
from manyhands.randomness import preserved, seed_all
from manyhands.request import Options, Request, View
from manyhands.run import History, Run
from manyhands.server.live.training import (
    ResumePoint,
    ServerTraining,
    TrainingRequest,
    forget_after,
    resume_point,
    server_summary,
)
from manyhands.store.atomic import WriteFailed
from manyhands.store.checkpoint import Loaded, NoCheckpoint, Snapshot
from manyhands.store.fingerprint import fingerprint
from manyhands.store.lines import Backlog
from manyhands.store.rundir import RunDirectory
from manyhands.strategy import Hogwild, Ps, Single, Strategy
from manyhands.task import Task
from manyhands.worker import Trainer
from manyhands.worker_process import WorkerFiles, WorkerJob, work

__all__ = ["Options", "View", "fit", "require_room_for"]

_log = logging.getLogger("manyhands")
_MORE_WORKERS = 16  # may be added to a run while it goes on


def fit(
    task: Task,
    strategy: str | Strategy = "allreduce",
    *,
    workers: int = 1,
    steps: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    out: str | Path | None = None,
    resume: bool = False,
    options: Options | None = None,
) -> Run:
    """Train `task` with `strategy` on `workers` processes of this host, and return what came out.

    `steps` counts global batches; `epochs` says the same in passes over the data (default: one). `device` is `cpu`, or
    `cuda` for one GPU per worker in turn. With `out`, the run is kept in that directory, and `resume=True` goes on
    from its newest good checkpoint to the weights that an uninterrupted run would have. Raises UserError for what makes
    no sense, NonFinite when the loss breaks, and WorkerFailed naming the first worker that failed; when it returns or
    raises, no process is left.
    """
    request = Request.make(
        task,
        Strategy.parse(strategy),
        workers,
        (steps, epochs),
        seed,
        options or Options(),
        check_device(device),
    )
    if resume and out is None:
        raise UserError("resume=True needs out=, the directory of the run to go on with")
    with preserved(), ExitStack() as stack:
        seed_all(seed)
        model = task.model()
        require_room_for(request, model)
        _advise(request, model)
        directory, start, point = _open_directory(request, model, out, resume)
        if directory is not None:
            stack.callback(_close, directory)
        session = _Session(request, model, directory, start, point)
        return session.train()


def _close(directory: RunDirectory) -> None:
    """Let go of the directory; that the last rows may not be synced is no reason to give up what was trained."""
    try:
        directory.close()
    except WriteFailed as error:
        _log.warning("%s", error)


def require_room_for(request: Request, model: nn.Module) -> None:
    """Overload where the workers do not fit on this host, before anything is made for them; `model` is the task's."""
    if request.options.allow_overload or isinstance(request.strategy, Single):
        return
    sizes = sizes_of(request.plan.task, model, on_host=request.plan.device == "cpu")
    cost = cost_of(request.strategy, sizes, threads=threads_per_role(request.workers))
    require_room(cost, request.workers)


def _advise(request: Request, model: nn.Module) -> None:
    """Say it where hogwild is used for what it is not made for."""
    strategy = request.strategy
    if not isinstance(strategy, Hogwild) or strategy.order != "free" or request.workers == 1:
        return
    if not request.plan.task.sparse and not any(getattr(m, "sparse", False) is True for m in model.modules()):
        warnings.warn(
            "hogwild on a dense model: each step touches every parameter that others are changing; sparse updates are "
            "where the theory holds, so declare tables in Task.sparse, or use strategy=mirrored",
            stacklevel=3,
        )


def _open_directory(
    request: Request, model: nn.Module, out: str | Path | None, resume: bool
) -> tuple[RunDirectory | None, Loaded | None, ResumePoint | None]:
    if out is None:
        return None, None, None
    config = request.config(model)
    if not resume:
        return RunDirectory.create(out, config), None, None
    directory = RunDirectory.open(out)
    try:
        conflict = fingerprint(directory.config).conflict(fingerprint(config))
        if conflict is not None:
            raise UserError(f"{out} can not be resumed: {conflict}")
        if isinstance(request.strategy, Ps):
            point = _server_resume_point(request.strategy, directory, config)
            forget_after(directory.path, point)
            directory.metrics.keep(point.to_come.wants if point is not None else lambda _: False)
            return directory, None, point
        try:
            start = directory.checkpoints().load()
        except NoCheckpoint:
            start = None
        directory.metrics.truncate_after(start.step if start is not None else 0)
        return directory, start, None
    except BaseException:
        directory.close()
        raise


def _server_resume_point(
    strategy: Ps, directory: RunDirectory, config: Mapping[str, Any]
) -> ResumePoint | None:
    """Shards, slots and clocks only fit the run that wrote them."""
    for name in ("strategy", "workers"):
        if directory.config[name] != config[name]:
            raise UserError(
                f"{directory.path} can not be resumed: {name} is {config[name]!r}, but its shards were written with "
                f"{directory.config[name]!r}; resume with that"
            )
    return resume_point(directory.path, strategy)


class _Session:
    """One run under way: collects what the workers tell, and makes a `Run` of it."""

    def __init__(
        self,
        request: Request,
        model: nn.Module,
        directory: RunDirectory | None,
        start: Loaded | None,
        point: ResumePoint | None,
    ) -> None:
        self._request = request
        self._model = model
        self._directory = directory
        self._start = start
        self._point = point
        self._history = History(directory.metrics.read() if directory is not None else ())
        self._notes = [f"{damage}" for damage in start.skipped] if start is not None else []
        self._clock = _TrainingClock()
        sharing = sharing_sentence(request.plan.device, request.workers)
        self._notes += [sharing] if sharing is not None else []
        if directory is not None:
            self._metrics = Backlog(directory.metrics.append)
            self._members = Backlog(directory.append_member)

    def train(self) -> Run:
        """Run the strategy and put everything in its place."""
        began = time.monotonic()
        try:
            if isinstance(self._request.strategy, Single):
                result, observed = self._train_here()
            elif isinstance(self._request.strategy, Ps):
                result, observed = self._train_on_servers(self._request.strategy)
            else:
                result, observed = self._train_in_processes()
        except ManyhandsError as error:
            if self._directory is not None:
                self._directory.tell_end(error, self._clock.seconds)
            if isinstance(error, NonFinite):
                raise NonFinite(f"{error}; {self._last_good()}") from error
            raise
        except (KeyboardInterrupt, SystemExit) as stop:
            number = signal_of(stop)
            if number is not None:
                self._tell_interruption(number)
            raise
        summary = self._summarise(result, observed, time.monotonic() - began)
        if self._directory is not None:
            try:
                self._directory.write_summary(summary)
            except WriteFailed as error:
                self._say(str(error))  # the notes of the summary at hand have it
        path = self._directory.path if self._directory is not None else None
        return Run(model=self._model, history=self._history, summary=summary, path=path)

    def _train_here(self) -> tuple[dict[str, Any], dict[str, Any]]:
        with EventRing.create(role=0) as ring, self._collector({"worker-0": ring}) as collector:
            with self._view(collector):
                around = _Here(ring, self._hear)
                trainer = Trainer(self._request.plan, SingleExchange(), around, self._checkpoints())
                trained = trainer.run(self._start)
            self._model = trained.model.cpu()
            result = {
                "steps_done": trained.steps_done,
                "samples": trained.samples,
                "seconds": trained.seconds,
                "stopped_early": trained.stopped_early,
                "bytes_sent": 0,
                "messages_sent": 0,
            }
            collector.flush()
            return result, collector.summary()

    def _train_in_processes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        request, options = self._request, self._request.options
        job = WorkerJob(
            plan=request.plan,
            strategy=request.strategy,
            timeout_s=options.timeout_s,
            threads=threads_per_role(request.workers),
            run_path=self._directory.path.absolute() if self._directory is not None else None,
            keep_checkpoints=options.keep_checkpoints,
            resume_step=self._start.step if self._start is not None else None,
        )
        rows = RowsInOrder(self._start.step if self._start is not None else 0)
        warm({torch.float64, *(parameter.dtype for parameter in self._model.parameters())})
        with WorkerFiles(request.strategy, request.workers) as files:
            roles = [
                Role(
                    name=f"worker {rank}",
                    target=partial(work, job=job),
                    descriptors=files.descriptors(rank),
                    env={"OMP_NUM_THREADS": str(job.threads)},
                )
                for rank in range(request.workers)
            ]
            rings = {f"worker-{rank}": ring for rank, ring in enumerate(files.rings)}
            with self._collector(rings) as collector:
                cluster = LocalCluster(
                    roles,
                    on_note=lambda _rank, payload: self._hear(payload, rows),
                    on_failure=files.group.abort,
                    watched=_watched(options, files.rings),
                )
                try:
                    with self._view(collector), cluster:
                        finished = [message.payload for message in cluster.run()]
                finally:
                    self._take_rows(rows.rest())
                collector.flush()
                observed = collector.summary()
            self._model.load_state_dict(files.read_weights())
        summed = ["bytes_sent", "messages_sent"]
        if isinstance(request.strategy, Hogwild):  # each worker has samples of its own there
            summed.append("samples")
            observed["overlap"] = overlap_summary([one["overlap"] for one in finished])
        return {**finished[0], **{key: sum(one[key] for one in finished) for key in summed}}, observed

    def _train_on_servers(self, strategy: Ps) -> tuple[dict[str, Any], dict[str, Any]]:
        request, options = self._request, self._request.options
        training = ServerTraining(
            TrainingRequest(
                plan=request.plan,
                strategy=strategy,
                workers=request.workers,
                most_workers=request.workers + (_MORE_WORKERS if options.commands is not None else 0),
                timeout_s=options.timeout_s,
                watchdog_s=options.watchdog_s,
                run_path=self._directory.path.absolute() if self._directory is not None else None,
                keep_checkpoints=options.keep_checkpoints,
                skip_nonfinite=options.skip_nonfinite,
                resume_version=self._point.version if self._point is not None else None,
                fingerprint=fingerprint(request.config(self._model)).digest,
            )
        )
        with training, ExitStack() as stack:
            rings = {f"worker-{slot}": ring for slot, ring in training.rings.items()}
            rings |= {f"server-{place}": ring for place, ring in enumerate(training.server_rings)}
            collector = stack.enter_context(self._collector(rings, len(training.rings)))
            with self._view(collector):
                outcome = training.run(
                    known=self._history,
                    on_rows=self._take_rows,
                    on_event=self._take_event,
                    commands=options.commands,
                )
            collector.flush()
            observed = collector.summary()
            observed["per_worker"] = [
                w for w in observed["per_worker"] if w["worker"] < request.workers or w["steps"]
            ]
            self._model = training.model()
            metrics = training.evaluate(self._model)
            steps = request.plan.steps
            if metrics is not None and all(row["step"] != steps for row in self._history.evaluations):
                self._take_rows([{"step": steps, "metrics": metrics, "at_s": outcome.seconds}])
            if self._directory is not None:
                snapshot = training.checkpoint((metrics or {}).get("evaluation_loss"))
                if snapshot is not None:
                    self._save(snapshot)
        self._notes += outcome.notes
        result = {
            "steps_done": request.plan.steps,
            "seconds": outcome.seconds,
            "stopped_early": False,
            **outcome.totals,
        }
        return result, {**observed, **server_summary(outcome)}

    def _collector(self, rings: Mapping[str, EventRing], workers: int | None = None) -> Collector:
        directory = self._directory.events_path if self._directory is not None else None
        return Collector(rings, workers=workers, directory=directory)

    def _view(self, collector: Collector) -> AbstractContextManager[object]:
        view = self._request.options.view
        return view(self._request.plan.steps, collector.snapshot) if view is not None else nullcontext()

    def _checkpoints(self) -> Any:
        if self._directory is None:
            return None
        return self._directory.checkpoints(self._request.options.keep_checkpoints)

    def _hear(self, payload: Mapping[str, Any], order: RowsInOrder | None = None) -> None:
        """Take what a worker tells: rows of the history, put into `order`, and what to tell the user."""
        self._take_rows(order.add(payload["rows"]) if order is not None else payload["rows"])
        if "note" in payload:
            self._say(payload["note"])

    def _say(self, sentence: str) -> None:
        """Tell the user now, and again in the summary."""
        self._notes.append(sentence)
        _log.warning("%s", sentence)

    def _save(self, snapshot: Snapshot) -> None:
        """Write the last checkpoint of a run; a full disk costs that and not what was trained."""
        try:
            self._checkpoints().save(snapshot)
        except WriteFailed as error:
            self._say(str(error))

    def _take_rows(self, rows: list[dict[str, Any]]) -> None:
        self._clock.heard(rows)
        self._history.extend(rows)
        if self._directory is not None:
            for row in rows:
                self._keep(self._metrics, row)

    def _keep(self, log: Backlog[Any], record: Any) -> None:
        sentence = log.add(record)
        if sentence is not None:
            self._say(sentence)

    def _resumed_from(self) -> int | None:
        if self._point is not None:
            return self._point.batches
        return self._start.step if self._start is not None else None

    def _take_event(self, event: Mapping[str, Any]) -> None:
        """Something happened to a member: keep it, and say it where it is more than a start."""
        self._clock.heard([event])
        if self._directory is not None:
            self._keep(self._members, event)
        if "sentence" in event:
            _log.warning(event["sentence"])

    def _tell_interruption(self, number: Signals) -> None:
        """One line: what ended the run, what is kept of it, and how to go on."""
        directory, command = self._directory, self._request.options.resume_command
        if directory is None:
            kept, how = "nothing was kept, because the run has no directory (out=)", ""
        else:
            steps = self._request.plan.steps
            step = self._kept_step(directory)
            kept = (
                f"step {step} of {steps} is kept in {directory.path}" if step else "no checkpoint was due yet"
            )
            command = f"fit(…, out={str(directory.path)!r}, resume=True)" if command is None else command
            how = f"; {'go on' if step else 'begin again'} with: {command}"
            event = {
                "event": "interrupted",
                "at_s": self._clock.seconds,
                "sentence": f"ended by {number.name}; {kept}",
            }
            directory.append_member(event)
        if command != "":
            _log.warning(f"manyhands: ended by {number.name}; {kept}{how}")

    def _kept_step(self, directory: RunDirectory) -> int:
        """The step that a resumed run would begin after; 0 where nothing is kept."""
        if isinstance(self._request.strategy, Ps):
            point = resume_point(directory.path, self._request.strategy)
            return point.batches if point is not None else 0
        try:
            return directory.checkpoints().load().step
        except NoCheckpoint:
            return 0

    def _last_good(self) -> str:
        if self._directory is None:
            return "nothing was kept, because the run has no directory (out=)"
        try:
            kept = self._directory.checkpoints().load()
        except NoCheckpoint:
            return "it broke before the first checkpoint"
        return f"the last good checkpoint is {kept.path}"

    def _summarise(
        self, result: Mapping[str, Any], observed: Mapping[str, Any], wall_s: float
    ) -> dict[str, Any]:
        request = self._request
        final = {"loss": self._history.loss[-1]} if self._history.loss else {}
        if self._history.evaluations:
            final |= self._history.evaluations[-1]["metrics"]
        seconds = result["seconds"]
        return {
            "task": request.plan.task.name,
            "strategy": str(request.strategy),
            "workers": request.workers,
            "steps": result["steps_done"],
            "steps_asked": request.plan.steps,
            "resumed_from_step": self._resumed_from(),
            "seed": request.plan.seed,
            "device": request.plan.device,
            "seconds": seconds,
            "startup_s": max(0.0, wall_s - seconds),
            "samples": result["samples"],
            "samples_per_s": result["samples"] / seconds if seconds else 0.0,
            "final": final,
            "bytes_sent": result["bytes_sent"],
            "messages_sent": result["messages_sent"],
            "stopped_early": result["stopped_early"],
            "notes": self._notes,
            **observed,
        }


def _watched(options: Options, rings: Sequence[EventRing]) -> Watched:
    boxes = BlackBoxes(dict(enumerate(rings)))
    return Watched(deadline_s=options.watchdog_s, count_events=boxes.counts, last_events=boxes.last)


class _TrainingClock:
    """Seconds since training began, on the time base of the rows that tell of it."""

    def __init__(self) -> None:
        self._began_s: float | None = None

    def heard(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the newest of rows that were told just now: the one that took the shortest way is the nearest."""
        told = [row["at_s"] for row in rows if row.get("at_s")]
        if told:
            began_s = time.monotonic() - max(told)
            self._began_s = began_s if self._began_s is None else min(self._began_s, began_s)

    @property
    def seconds(self) -> float:
        """0 before training began."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s


class _Here:
    """The surroundings of the plain loop, in the caller's own process."""

    def __init__(self, ring: EventRing, hear: Callable[[dict[str, Any]], None]) -> None:
        self.record = ring.record
        self.note = hear

    def mark(self, step: int, state: State) -> None:
        """Nobody waits for a single worker."""

    def stop_requested(self) -> bool:
        """Ctrl-C reaches the loop itself."""
        return False
