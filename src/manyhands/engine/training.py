"""The interface that a strategy implements to be trained by: one object per run, in the process of `fit`.

    fit ── makes ──►  Training(request, model)
        ── resume ─►  where the kept run can go on
        ── run ────►  Stage: rows, events, views and checkpoints of the run  ──►  Result

`fit` knows strategies through this alone; `strategies/registry.py` leads from a strategy to its class. Workers import
this as well, but not what gathers and shows their events.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor, nn

from manyhands.data.store.checkpoint import CheckpointStore, Loaded, NoCheckpoint
from manyhands.data.store.rundir import RunDirectory
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import SentFor
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.options import Options
from manyhands.engine.reporting import WorkerNote, kept_weights
from manyhands.engine.request import Request
from manyhands.engine.run import RowsInOrder
from manyhands.errors import UserError
from manyhands.observe.record.event_ring import EventRing
from manyhands.strategies.registry import entry_of
from manyhands.strategy import Strategy

if TYPE_CHECKING:
    from manyhands.observe.analyse.collect import Collector
    from manyhands.places.external.process_group import GroupMember, ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a training."""

    model: nn.Module  # the final weights, on the CPU
    steps_done: int
    samples: int
    seconds: float  # of training alone, without starting processes
    stopped_early: bool = False
    sent: SentFor = field(default_factory=SentFor)  # by all workers together
    # What the run's summary says besides: who computed, who waited, and whatever else the strategy can tell; `final`
    # has measures besides those of the last evaluation
    observed: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What `fit` gives a training: sinks for rows and events, views, and the run's directory."""

    request: Request
    directory: RunDirectory | None
    history: Sequence[dict[str, Any]]  # the rows so far, those of the run that it goes on with included
    # Rows of the run's history, in the order of their steps
    take_rows: Callable[[list[dict[str, Any]]], None]
    take_event: Callable[[Mapping[str, Any]], None]  # something happened to a member of the run
    take_checkpoint: Callable[[int, Path], None]  # a checkpoint was written: after how many steps, and where
    say: Callable[[str], None]  # tells the user something, now and again in the summary
    take_best: Callable[[int], None]  # the run ends with the weights that it had after so many steps
    stop_wanted: Callable[[], bool]  # whether the run is to end at the next step that it can end at

    def hear(self, note: WorkerNote, order: RowsInOrder | None = None) -> None:
        rows = [dict(row) for row in note.rows]
        self.take_rows(order.add(rows) if order is not None else rows)
        if note.saved is not None:
            self.take_checkpoint(note.saved[0], Path(note.saved[1]))
        if note.notice is not None:
            self.say(note.notice)
        if note.best_step is not None:
            self.take_best(note.best_step)

    @property
    def run_path(self) -> Path | None:
        return self.directory.path.absolute() if self.directory is not None else None

    def collector(
        self,
        rings: Mapping[str, EventRing],
        workers: int | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> Collector:
        """A collector of the events in these rings by `clock`; the first `workers` rings are workers' (None: all)."""
        from manyhands.observe.analyse.collect import Collector

        directory = self.directory.events_path if self.directory is not None else None
        return Collector(rings, workers=workers, directory=directory, clock=clock)

    @contextmanager
    def view(self, collector: Collector) -> Iterator[None]:
        from manyhands.observe.draw.showing import showing

        options, seen = self.request.options, (self.request.plan.steps, collector.snapshot)
        own = options.view(*seen) if options.view is not None else None
        with own or showing(options.progress, *seen, str(self.request.strategy)):
            yield
            collector.flush()  # the last picture is of the end

    def checkpoints(self) -> CheckpointStore | None:
        """Where checkpoints go; None where the run is not kept."""
        keep = self.request.options.keep_checkpoints
        return self.directory.checkpoints(keep) if self.directory is not None else None


class Training(ABC):
    """One strategy's training of a run: `resume` at most once, then once `run`, or `lead` with external processes."""

    # Whether processes that somebody else started can be its roles: one of them leads, the others `take_part`
    can_take_part: ClassVar[bool] = False
    # Whether a process that has lost its leader, and finds it again, can `take_part` again in the same run
    comes_again: ClassVar[bool] = False
    # Whether it trains by several trainings, one after the other: see `Segments`
    in_segments: ClassVar[bool] = False

    def __init__(self, request: Request, model: nn.Module) -> None:
        self._request = request
        self._model = model
        self._start: Loaded | None = None

    @property
    def request(self) -> Request:
        return self._request

    @classmethod
    def chosen_for(cls, strategy: Strategy) -> type[Training]:
        """The class that trains by a strategy of this word: this one, unless a setting leads to another."""
        del strategy
        return cls

    def resume(self, directory: RunDirectory, config: Mapping[str, Any]) -> int | None:
        """Find what to resume from: the number of global batches that it has seen; None if nothing was kept.

        Removes what the directory holds beyond that. `config` is this run's; UserError where it does not fit what is
        kept.
        """
        if self._request.plan.task.compiled:
            before = directory.config.get("task_options") or {}
            for name, value in config["task_options"].items():
                if before.get(name) != value:
                    raise UserError(
                        f"{directory.path} cannot be resumed: {name} is {value!r}, but the run was started with "
                        f"{before.get(name)!r}; resume with that"
                    )
        try:
            self._start = directory.checkpoints().load()
        except NoCheckpoint:
            directory.metrics.truncate_after(0)
            return None
        self._require_steps_left(directory, self._start.step)
        directory.metrics.truncate_after(self._start.step)
        return self._start.step

    @classmethod
    def hand_over(cls, directory: RunDirectory, plan: TrainingPlan, strategy: Any) -> None:
        """Prepare a kept run of this strategy to continue under another one, or with another number of workers.

        The newest kept state becomes a checkpoint that any strategy can load, unless it is one. `plan` is of the run
        to come, `strategy` of the one before; UserError where the state fits no other.
        """
        del directory, plan, strategy

    def _require_steps_left(self, directory: RunDirectory, done: int) -> None:
        """UserError where fewer steps are requested than are done; what is kept stays unchanged."""
        steps = self._request.plan.steps
        if done > steps and steps < directory.config["steps"]:  # a shard may have done some twice
            raise UserError(
                f"{directory.path} cannot be resumed: it has done {done} steps, but steps={steps} is fewer; give "
                f"{done} or more"
            )

    def kept_step(self, directory: RunDirectory) -> int:
        """The step that a resumed run would begin after; 0 where nothing is kept."""
        try:
            return directory.checkpoints().load().step
        except NoCheckpoint:
            return 0

    @classmethod
    def kept(cls, directory: RunDirectory, task: Any, strategy: Any) -> tuple[int, dict[str, Tensor]] | None:
        """The weights that a run's directory ends with, and the steps they have seen; None where none were kept."""
        del task, strategy
        try:
            return kept_weights(directory.checkpoints().load())
        except NoCheckpoint:
            return None

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"{damage}" for damage in self._start.skipped) if self._start is not None else ()

    def take_part(self, member: GroupMember) -> None:
        """Run one role of a run that another process leads, to its end; only where it `can_take_part`."""
        raise UserError(f"strategy={self._request.strategy} has no work for {member.connection.name}")

    @abstractmethod
    def run(self, stage: Stage) -> Result:
        """Train to the end, in processes that this one starts; afterwards no process, memory or file of it is left."""

    def lead(self, stage: Stage, process_group: ProcessGroup) -> Result:
        """`run` with processes that were started externally; only where they can take part."""
        del stage
        raise UserError(f"strategy={self._request.strategy} has no work for {process_group.place.name}")


@dataclass(kw_only=True)
class SegmentDrive:
    """Runs one training of several where its processes are; `order` is what other processes make theirs of."""

    run: Callable[[Training, Stage, Mapping[str, Any]], Result]
    is_here: bool = True  # whether the processes are started here
    hosts: int = 1  # over how many the processes are, known once the first training was run


class Segments(Training):
    """A training made of trainings; each continues from the state in which the one before it ended."""

    can_take_part = True
    in_segments = True

    def run(self, stage: Stage) -> Result:
        return self.run_segments(stage, SegmentDrive(run=lambda training, stage, _order: training.run(stage)))

    @abstractmethod
    def run_segments(self, stage: Stage, drive: SegmentDrive) -> Result:
        """Train to the end, each part by `drive`."""

    @abstractmethod
    def ordered(self, order: Mapping[str, Any]) -> Training:
        """The training of a part; in other processes, of the part that the leader is about to run."""


def training_class(strategy: Strategy, *, compiled: bool = False) -> type[Training]:
    """The class that trains by `strategy`; for a compiled task, UserError where there is none."""
    found = entry_of(strategy.word).load_training(compiled=compiled)
    if found is None:
        raise UserError(f"strategy {strategy} exchanges gradients, but this task's step is compiled")
    return cast(type[Training], found).chosen_for(strategy)


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Where a workload's run is kept: its directory, and whether to resume from it."""

    out: Path
    resume: bool = False
    # Of `fit`; its view and its ears are the workload's
    options: Options = field(default_factory=lambda: Options(resume_command="", progress="none"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Parameters by name after `steps` steps, and the rows of the history up to there."""

    values: Mapping[str, Tensor]
    steps: int
    rows: list[dict[str, Any]]


def last_kept(folder: Path, task: AnyTask, strategy: Strategy) -> Kept | None:
    with RunDirectory.open(folder, lock=False) as directory:
        found = training_class(strategy, compiled=task.compiled).kept(directory, task, strategy)
        if found is None:
            return None
        rows = [row for row in directory.metrics.read() if row["step"] <= found[0]]
        return Kept(values=found[1], steps=found[0], rows=rows)
