"""What a worker does besides its steps, whatever the strategy: evaluate, save, and tell the launcher the history."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.checkpoint import CheckpointStore, Snapshot
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import Traffic
from manyhands.engine.stopping import StoppingCount
from manyhands.observe.record.events import NO_STEP, NOBODY, EventKind
from manyhands.places.local.notes import TypedNotes
from manyhands.places.local.status import State
from manyhands.task import Task

__all__ = ["NOTES", "Peers", "Reporter", "Saved", "WorkerContext", "WorkerNote", "is_due"]

_ROWS_EVERY_S = 0.1
_ROWS_KEPT = 4096  # of one that may have to tell them in another's place: more than comes in that time

Evaluate = Callable[[nn.Module], tuple[dict[str, float], int] | None]
"""Collective: (model) -> means over the evaluation data and the number of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint was written."""

    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNote:
    """What a worker tells the launcher: rows of the run's history, a checkpoint, and a remark for its user."""

    rows: tuple[Mapping[str, Any], ...] = ()
    saved: Saved | None = None
    notice: str | None = None


NOTES = TypedNotes(WorkerNote)


class WorkerContext(Protocol):
    """What a worker tells the world and asks of it; `fit` provides it."""

    def record(
        self,
        kind: EventKind,
        start_ns: int,
        duration_ns: int = 0,
        *,
        step: int = NO_STEP,
        peer: int = NOBODY,
        num_bytes: int = 0,
        count: int = 0,
        value: float = 0.0,
        message: int = 0,
        wire: int = 0,
    ) -> bool:
        """Write one event; its step is the global batch, from 0."""

    def mark(self, step: int, state: State, *, place: tuple[int, int] | None = None) -> None:
        """Say where this worker is, for those who wait for it; in a pipeline at which (stage, micro-batch), too."""

    def note(self, note: WorkerNote) -> None:
        """Send something to the launcher."""

    def stop_requested(self) -> bool:
        """Whether the launcher asked to stop early."""


class Peers(Protocol):
    """What an evaluation and a checkpoint ask of all workers together; a strategy provides it."""

    @property
    def rank(self) -> int:
        """This worker's."""

    @property
    def world(self) -> int:
        """How many there are."""

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over all workers of a small float64 vector."""

    def optimizer_state(self) -> dict[str, Any] | None:
        """Collective: the optimizer's whole `state_dict()` on worker 0, None on the others."""

    def model_state(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        """Collective: the whole model's `state_dict()` on worker 0, None on the others."""

    def traffic(self) -> Traffic:
        """What this worker has sent so far."""

    def memory(self) -> Mapping[str, Any]:
        """Collective: what the exchange itself remembers from step to step, on worker 0."""


class Reporter:
    """One worker's reports; the launcher gets rows in portions, ten times a second at most.

    All workers are given `checkpoints` or none is: saving is collective, though worker 0 alone writes. `evaluate` goes
    over the task's evaluation data, where it has some.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        peers: Peers,
        worker_context: WorkerContext,
        checkpoints: CheckpointStore | None,
        evaluate: Evaluate | None = None,
        *,
        keeps_rows: bool = False,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """With `keeps_rows`, every worker is given all rows; worker 0 tells them, and who follows it the newest.

        `facts` says what the row of an evaluation has besides its metrics.
        """
        self._facts = facts
        self._evaluate = evaluate
        self._keeps_rows = keeps_rows
        self._owed: int | None = None  # the step of a checkpoint that worker 0 writes just now
        self._plan = plan
        self._peers = peers
        self._worker_context = worker_context
        self._checkpoints = checkpoints
        self._rows: list[dict[str, Any]] = []
        self._rows_sent_ns = 0
        self._began_ns = time.monotonic_ns()
        self._reached = 0
        self._evaluated: dict[str, float] = {}
        self._failed_to_save = False  # and said so
        self._patience = StoppingCount(plan.stopping) if plan.stopping is not None else None
        self._scheduler: LRScheduler | None = None
        self.saving = Traffic()
        """What this worker sent for checkpoints."""

        self.loss = math.nan
        """Of the newest steps: what a checkpoint is judged by where there is no evaluation."""

    def begin(
        self,
        step: int = 0,
        extra: Mapping[str, Any] | None = None,
        scheduler: LRScheduler | None = None,
    ) -> None:
        """Training begins now, with `step` steps done and what the checkpoint says besides.

        `scheduler` advances with the evaluations, on every worker alike.
        """
        self._reached = step
        self._scheduler = scheduler
        if self._patience is not None and extra and "early_stopping" in extra:
            self._patience.restore(extra["early_stopping"])
        if scheduler is not None and extra and "scheduler" in extra:
            scheduler.load_state_dict(extra["scheduler"])
        self._began_ns = time.monotonic_ns()
        if extra and "began_ns" in extra:  # from a worker of this host, who has trained before this one came
            self._began_ns, self._evaluated = extra["began_ns"], dict(extra["evaluated"])

    @property
    def seconds(self) -> float:
        """Since training began."""
        return (time.monotonic_ns() - self._began_ns) / 1e9

    def next_due(self, step: int) -> int:
        """The number of steps after which all workers have something to do together next, at the end at the latest."""
        plan = self._plan
        evaluates = plan.evaluate_every if plan.task.evaluation is not None else 0
        saves = plan.checkpoint_every if self._checkpoints is not None else 0
        return min([plan.steps, *(step - step % every + every for every in (evaluates, saves) if every)])

    def uses_model(self, step: int, *, last: bool) -> bool:
        """Whether `after` is going to evaluate or save the model after `step` steps, or the run ends with them."""
        plan, before = self._plan, self._reached
        evaluates = plan.task.evaluation is not None and is_due(before, step, plan.evaluate_every)
        saves = self._checkpoints is not None and is_due(before, step, plan.checkpoint_every)
        return last or evaluates or saves

    def after(self, step: int, model: nn.Module, called: nn.Module, *, last: bool) -> bool:
        """Collective: do what is due after `step` steps; `called` is `model` as it is computed with.

        What became due in steps since the last call, after which the workers were not alike, is done now. Returns
        whether the run ends here because an evaluation says so, on every worker the same.
        """
        plan, before = self._plan, self._reached
        ends, due = False, is_due(before, step, plan.evaluate_every)
        if last or due:
            ends = self.evaluate(step, called, decides=due)
        self._reached = step  # not before: an evaluation that was cut is made again
        last = last or ends
        if self._checkpoints and (last or is_due(before, step, plan.checkpoint_every)):
            self._save(step, model, self._checkpoints)
        self.send(now=last)
        return ends

    def evaluate(self, step: int, called: nn.Module, *, decides: bool = False) -> bool:
        """Collective: every worker evaluates its share of the evaluation batches; all learn the means.

        Where it `decides`, a schedule that goes by evaluations advances, and those that were not better are counted:
        returns whether there were so many that the run is to end. One that a longer run would not have made there, as
        at the end of a run, decides nothing, or a run that is resumed would be another.
        """
        peers = self._peers
        if self._plan.task.evaluation is None or self._evaluate is None:
            return False
        self._worker_context.mark(step, State.EVALUATING)
        begin = time.monotonic_ns()
        self._worker_context.record(EventKind.EVALUATE, begin, step=step - 1)
        evaluated = self._evaluate(called)
        assert evaluated is not None, "there is evaluation data"
        self._evaluated, samples = evaluated
        self._worker_context.record(
            EventKind.EVALUATE, begin, time.monotonic_ns() - begin, step=step - 1, count=samples
        )
        if peers.rank == 0 or self._keeps_rows:
            self.add(step=step, metrics=self._evaluated, at_s=self.seconds, **self._facts())
        if not decides:
            return False
        self._advance_schedule()
        if self._patience is None or not self._patience.add(step, self._evaluated):
            return False
        if peers.rank == 0 and step < self._plan.steps:
            self._worker_context.note(
                WorkerNote(notice=f"stopped after step {step}: {self._patience.sentence}")
            )
        return True

    def _advance_schedule(self) -> None:
        task = self._plan.task
        if self._scheduler is not None and isinstance(task, Task):
            assert task.scheduler_metric is not None, "or the schedule would go by steps"
            self._scheduler.step(self._evaluated[task.scheduler_metric])  # type: ignore[arg-type]

    def _save(self, step: int, model: nn.Module, checkpoints: CheckpointStore) -> None:
        """Collective: worker 0 writes what the others may have a part of."""
        self._worker_context.mark(step, State.SAVING)
        begin, before = time.monotonic_ns(), self._peers.traffic()
        optimizer_state, model_state = self._peers.optimizer_state(), self._peers.model_state(model)
        memory = self._peers.memory()
        self.saving += self._peers.traffic() - before
        if optimizer_state is None or model_state is None:
            self._owed = step
            return
        # What a resumed run keeps must be on disk before the checkpoint that names it.
        self.send(now=True)
        kept = {"exchange": memory} if memory else {}
        snapshot = Snapshot(
            step=step,
            model=model_state,
            optimizer=optimizer_state,
            extra={"seed": self._plan.seed, **self._kept(), **kept},
            score=self._evaluated.get("evaluation_loss", self.loss),
            may_hold_infinity=frozenset(name for name, _ in model.named_buffers()),
        )
        try:
            path = checkpoints.save(snapshot)
            self._worker_context.note(WorkerNote(saved=Saved(step=step, path=str(path))))
            self._failed_to_save = False
        except WriteFailed as error:  # a full disk costs the checkpoint and not the run
            if not self._failed_to_save:
                self._worker_context.note(WorkerNote(notice=f"{error}; the run goes on"))
            self._failed_to_save = True
        self._worker_context.record(EventKind.CHECKPOINT, begin, time.monotonic_ns() - begin, step=step - 1)

    def _kept(self) -> dict[str, Any]:
        """What goes on from evaluation to evaluation."""
        kept: dict[str, Any] = {}
        if self._patience is not None:
            kept["early_stopping"] = self._patience.state()
        if self._scheduler is not None:
            kept["scheduler"] = self._scheduler.state_dict()
        return kept

    def for_newcomers(self) -> dict[str, Any]:
        """What a worker has to know that joins now: as a checkpoint's `extra`, and on this host's clock.

        Rows up to now are told here, for the newcomer has none of them and may be worker 0 from now on.
        """
        self._send()
        return {**self._kept(), "began_ns": self._began_ns, "evaluated": dict(self._evaluated)}

    def save_owed(self, step: int, model: nn.Module) -> None:
        """Write the checkpoint of `step` that was worker 0's to write, if it is this worker's now."""
        if self._owed == step and self._checkpoints is not None and self._peers.rank == 0:
            self._owed = None
            self._save(step, model, self._checkpoints)

    def add(self, **row: Any) -> None:
        """A row of the run's history."""
        self._rows.append(row)

    def send(self, *, now: bool = False) -> None:
        """Send the rows, if it is time to or `now`."""
        if self._keeps_rows and self._peers.rank != 0:
            del self._rows[:-_ROWS_KEPT]
            return
        if now or time.monotonic_ns() - self._rows_sent_ns > _ROWS_EVERY_S * 1e9:
            self._send()

    def _send(self) -> None:
        if self._rows:
            self._worker_context.note(WorkerNote(rows=tuple(self._rows)))
            self._rows = []
            self._rows_sent_ns = time.monotonic_ns()


def is_due(before: int, step: int, every: int) -> bool:
    """Whether what happens after `every` steps, 0 for never, is due in the steps after `before` up to `step`."""
    return every > 0 and step // every > before // every
