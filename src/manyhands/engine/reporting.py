"""What a worker does besides its steps, for every strategy: evaluate, save, report the history, and book times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.checkpoint import CheckpointStore, Loaded, Snapshot
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import ExchangeState, Meter, MicrobatchTime, PeerTraffic, Traffic
from manyhands.engine.loss_scaling import LossScale
from manyhands.engine.options import EarlyStopping, StoppingCount
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import EventKind
from manyhands.places.local.control import RoleContext, TypedNotes
from manyhands.places.local.status import State
from manyhands.task import Task

_ROWS_EVERY_S = 0.1
_ROWS_KEPT = 4096  # kept by a worker that may have to report them for another: more than arrive in that time

# Collective: (model) -> means over the evaluation data and the number of samples
Evaluate = Callable[[nn.Module], tuple[dict[str, float], int] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNote:
    """A worker's message to the launcher: rows of the history, a checkpoint, and a notice for the user."""

    rows: tuple[Mapping[str, Any], ...] = ()
    saved: tuple[int, str] | None = None  # the step and the path
    notice: str | None = None
    best_step: int | None = None  # the run ends with the weights that it had after this step


NOTES = TypedNotes(WorkerNote)


class WorkerContext(Protocol):
    """A worker's interface to the process that started it, for reports and stop requests; `fit` provides it."""

    @property
    def record(self) -> Callable[..., bool]:
        """Write one event, as `EventRing.record` does; its step is the global batch, from 0."""

    def mark(self, step: int, state: State, *, place: tuple[int, int] | None = None) -> None:
        """Set this worker's status, which waiting peers show; in a pipeline with its (stage, micro-batch)."""

    def note(self, note: WorkerNote) -> None:
        """Send something to the launcher."""

    def stop_requested(self) -> bool:
        """Whether the launcher requested an early stop."""


class ProcessContext:
    """The worker context of a process of this host: its event ring, its row of the status table, its channel."""

    def __init__(self, context: RoleContext, ring: EventRing) -> None:
        self.record, self.mark, self.stop_requested = ring.record, context.mark, context.stop_requested
        self.note = lambda note: context.send(NOTES.write(note))


class Peers(Protocol):
    """The collective operations that evaluations and checkpoints need; as those of `Exchange`."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def meter(self) -> Meter: ...
    @property
    def kept(self) -> ExchangeState | None: ...
    def total(self, values: torch.Tensor) -> torch.Tensor: ...
    def optimizer_state(self) -> dict[str, Any] | None: ...
    def model_state(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None: ...


class Reporter:
    """One worker's reports; the launcher gets rows in portions, ten times a second at most.

    All workers are given `checkpoints` or none is: saving is collective, though worker 0 alone writes.
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
        """With `keeps_rows`, every worker gets all rows; worker 0 reports them, and its successor the newest.

        `facts` gives the extra fields of an evaluation's row.
        """
        self._plan, self._peers, self._worker_context = plan, peers, worker_context
        self._checkpoints, self._evaluate, self._facts = checkpoints, evaluate, facts
        self._keeps_rows = keeps_rows
        self._unwritten: int | None = None  # the step of the checkpoint that worker 0 is writing
        self._rows: list[dict[str, Any]] = []
        self._rows_sent_ns = 0
        self._began_ns = time.monotonic_ns()
        self._reached = 0
        self._evaluated: dict[str, float] = {}
        self._failed_to_save = False  # and reported it
        self._patience = StoppingCount(plan.stopping) if plan.stopping is not None else None
        self._best = BestWeights(plan.stopping or EarlyStopping()) if plan.restore_best else None
        self._scheduler: LRScheduler | None = None
        self._scale: LossScale | None = None
        self.saving = Traffic()  # what this worker sent for checkpoints
        # Of the newest steps: what a checkpoint is judged by where there is no evaluation
        self.loss = math.nan

    def begin(
        self,
        step: int = 0,
        extra: Mapping[str, Any] | None = None,
        scheduler: LRScheduler | None = None,
        scale: LossScale | None = None,
    ) -> None:
        """Start the clock, after `step` steps, with the checkpoint's `extra`; `scheduler` advances with evaluations."""
        self._reached, self._scheduler, self._scale, extra = step, scheduler, scale, extra or {}
        if scale is not None and "loss_scale" in extra:
            scale.restore(extra["loss_scale"])
        if self._patience is not None and "early_stopping" in extra:
            self._patience.restore(extra["early_stopping"])
        if self._best is not None and "best" in extra:
            self._best.restore(extra["best"])
            if self._peers.rank and not self._keeps_rows:
                self._best.take(None)
        if scheduler is not None and "scheduler" in extra:
            scheduler.load_state_dict(extra["scheduler"])
        # Sent by a worker of this host that trained before this one joined, or the beginning
        self._began_ns = extra.get("began_ns", time.monotonic_ns())
        self._evaluated = dict(extra.get("evaluated", {}))

    @property
    def seconds(self) -> float:
        return (time.monotonic_ns() - self._began_ns) / 1e9

    def next_due(self, step: int) -> int:
        """The number of steps after which the next collective action is due, at the latest the end of the run."""
        plan = self._plan
        evaluates = plan.evaluate_every if plan.task.evaluation is not None else 0
        saves = plan.checkpoint_every if self._checkpoints is not None else 0
        return min([plan.steps, *(step - step % every + every for every in (evaluates, saves) if every)])

    def uses_model(self, step: int, *, last: bool) -> bool:
        """Whether `after` will evaluate or save the model after `step` steps, or the run ends with them."""
        return last or self.next_due(self._reached) <= step

    def after(self, step: int, model: nn.Module, *, last: bool) -> bool:
        """Collective: do what is due after `step` steps.

        Actions that became due since the last call, while the workers were not synchronized, are done now. Returns
        whether an evaluation ends the run here, the same on every worker.
        """
        plan, before = self._plan, self._reached
        ends, due = False, is_due(before, step, plan.evaluate_every)
        pauses = plan.pauses and step < plan.steps
        if due or (last and not pauses):
            ends = self.evaluate(step, model, decides=due)
            if due and self._best is not None and self._best.add(step, self._evaluated):
                state = self._peers.model_state(model)
                self._best.take(model.state_dict() if state is None and self._keeps_rows else state)
        self._reached = step  # only now: an interrupted evaluation is repeated
        last = last or ends
        at_end = last and (pauses or plan.checkpoint_every > 0)
        if self._checkpoints and (at_end or is_due(before, step, plan.checkpoint_every)):
            self._save(step, model, self._checkpoints)
        self.send(now=last)
        return ends

    def evaluate(self, step: int, model: nn.Module, *, decides: bool = False) -> bool:
        """Collective: every worker evaluates its share of the evaluation batches; all get the means.

        With `decides`, a schedule that depends on evaluations advances, and evaluations without improvement are
        counted: returns whether they end the run. An evaluation that a longer run would not have made at this step,
        as at the end of a run, must not decide; a resumed run would otherwise differ.
        """
        peers = self._peers
        if self._plan.task.evaluation is None or self._evaluate is None:
            return False
        self._worker_context.mark(step, State.EVALUATING)
        begin = time.monotonic_ns()
        self._worker_context.record(EventKind.EVALUATE, begin, step=step - 1)
        evaluated = self._evaluate(model)
        assert evaluated is not None, "there is evaluation data"
        self._evaluated, samples = evaluated
        spent_ns = time.monotonic_ns() - begin
        self._worker_context.record(EventKind.EVALUATE, begin, spent_ns, step=step - 1, count=samples)
        if peers.rank == 0 or self._keeps_rows:
            self.add(step=step, metrics=self._evaluated, at_s=self.seconds, **self._facts())
        if not decides:
            return False
        task = self._plan.task
        if self._scheduler is not None and isinstance(task, Task):
            assert task.scheduler_metric is not None, "or the schedule would go by steps"
            self._scheduler.step(self._evaluated[task.scheduler_metric])  # type: ignore[arg-type]
        if self._patience is None or not self._patience.add(step, self._evaluated):
            return False
        if peers.rank == 0 and step < self._plan.steps:
            notice = f"stopped after step {step}: {self._patience.sentence}"
            self._worker_context.note(WorkerNote(notice=notice))
        return True

    def _save(self, step: int, model: nn.Module, checkpoints: CheckpointStore) -> None:
        """Collective: worker 0 writes the checkpoint, of whose state the others may hold parts."""
        self._worker_context.mark(step, State.SAVING)
        begin, before = time.monotonic_ns(), self._peers.meter.traffic()
        optimizer_state, model_state = self._peers.optimizer_state(), self._peers.model_state(model)
        memory = self._peers.kept.gather() if self._peers.kept is not None else {}
        self.saving += self._peers.meter.traffic() - before
        if optimizer_state is None or model_state is None:
            self._unwritten = step
            return
        # What a resumed run keeps must be on disk before the checkpoint that names it.
        self.send(now=True)
        kept = {"exchange": memory} if memory else {}
        snapshot = Snapshot(
            step=step,
            model=model_state,
            optimizer=optimizer_state,
            extra={"seed": self._plan.seed, **self._kept(), **kept},
            score=self._score,
            may_hold_infinity=frozenset(name for name, _ in model.named_buffers()),
        )
        try:
            path = checkpoints.save(snapshot)
            self._worker_context.note(WorkerNote(saved=(step, str(path))))
            self._failed_to_save = False
        except WriteFailed as error:  # a full disk costs the checkpoint and not the run
            if not self._failed_to_save:
                self._worker_context.note(WorkerNote(notice=f"{error}; the run continues"))
            self._failed_to_save = True
        self._worker_context.record(EventKind.CHECKPOINT, begin, time.monotonic_ns() - begin, step=step - 1)

    @property
    def _score(self) -> float:
        if self._best is not None and self._evaluated:
            return self._best.count.score(self._evaluated)
        return self._evaluated.get("evaluation_loss", self.loss)

    def chosen(self, weights: Mapping[str, torch.Tensor] | None) -> Mapping[str, torch.Tensor] | None:
        """The weights that the run ends with: those given, or of an evaluation better than the newest."""
        best = self._best
        if best is None:
            return weights
        newest = best.count.better(self._evaluated)
        step = self._reached if newest else best.count.best_step
        if self._peers.rank == 0 and step:
            notice = None if newest else f"the weights are those of the best evaluation: {best.count.best}"
            self._worker_context.note(WorkerNote(notice=notice, best_step=step))
        return weights if newest or not step else best.weights

    def _kept(self) -> dict[str, Any]:
        kept: dict[str, Any] = (
            {"early_stopping": self._patience.state()} if self._patience is not None else {}
        )
        if self._best is not None and self._best.weights is not None:
            kept["best"] = {**self._best.state(), "newest": self._best.count.better(self._evaluated)}
        if self._scale is not None:
            kept["loss_scale"] = self._scale.state()
        return {**kept, **({"scheduler": self._scheduler.state_dict()} if self._scheduler else {})}

    def for_newcomers(self) -> dict[str, Any]:
        """What a worker that joins now needs, as a checkpoint's `extra`; sends all rows first: it may lead."""
        self._send()
        return {**self._kept(), "began_ns": self._began_ns, "evaluated": dict(self._evaluated)}

    def save_missing(self, step: int, model: nn.Module) -> None:
        """Write the checkpoint of `step` that the old worker 0 did not finish, if this is worker 0 now."""
        if self._unwritten == step and self._checkpoints is not None and self._peers.rank == 0:
            self._unwritten = None
            self._save(step, model, self._checkpoints)

    def add(self, **row: Any) -> None:
        self._rows.append(row)

    def send(self, *, now: bool = False) -> None:
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


class BestWeights:
    """The weights of the best evaluation so far, in the host's memory, on the worker that hands the model over."""

    def __init__(self, rule: EarlyStopping) -> None:
        self.count = StoppingCount(replace(rule, min_delta=0.0))
        self.weights: dict[str, torch.Tensor] | None = None

    def add(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the evaluation after `step` steps is the best; its weights are then to be taken."""
        self.count.add(step, metrics)
        return self.count.best_step == step

    def take(self, state: Mapping[str, torch.Tensor] | None) -> None:
        self.weights = None
        if state is not None:
            self.weights = {name: one.detach().to("cpu", copy=True) for name, one in state.items()}

    def state(self) -> dict[str, Any]:
        return {"count": self.count.state(), "weights": self.weights}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.count.restore(state["count"])
        if self.count.best_step:  # else by another metric
            self.weights = dict(state["weights"])


def kept_weights(loaded: Loaded) -> tuple[int, dict[str, torch.Tensor]]:
    """The weights that a run with this checkpoint as its last ends with, and the steps that they have seen."""
    best = loaded.extra.get("best")
    if best is None or best.get("newest", False):
        return loaded.step, loaded.model
    return int(best["count"]["best_step"]), best["weights"]


def is_due(before: int, step: int, every: int) -> bool:
    """Whether an action of interval `every` (0: never) is due in the steps after `before` up to `step`."""
    return every > 0 and step // every > before // every


class StepBook:
    """Books the parts of step `step` (a global batch, from 0) in order: each begins where the one before it ended."""

    def __init__(self, record: Callable[..., bool], step: int, begin_ns: int) -> None:
        self._record, self._step, self._begin_ns = record, step, begin_ns
        self.at_ns = begin_ns  # where the last part ended; a caller may let the next begin elsewhere

    def input(self, duration_ns: int, samples: int) -> None:
        self._record(EventKind.INPUT, self.at_ns, duration_ns, step=self._step, count=samples)
        self.at_ns += duration_ns

    def compute(self, until_ns: int, less_ns: int = 0) -> None:
        """Book computing up to `until_ns`, less the time `less_ns` that is booked as something else."""
        duration_ns = max(0, until_ns - self.at_ns - less_ns)
        self._record(EventKind.COMPUTE, self.at_ns, duration_ns, step=self._step)
        self.at_ns = until_ns

    def microbatches(self, items: Sequence[MicrobatchTime]) -> None:
        """Book the work items that computing was made of, each at its time, where workers share micro-batches."""
        for item in items:
            about = {"step": self._step, "count": item.microbatch + 1}
            kind = EventKind.COMPUTE
            if item.waited_for is not None:
                kind, about["peer"] = EventKind.WAIT, item.waited_for
            self._record(kind, item.begin_ns, item.end_ns - item.begin_ns, **about)
            self.at_ns = item.end_ns + item.exchange_ns

    def waits(self, waited_ns: Mapping[int, int]) -> None:
        for peer, duration_ns in waited_ns.items():
            self._record(EventKind.WAIT, self.at_ns, duration_ns, step=self._step, peer=peer)
            self.at_ns += duration_ns

    def exchange(self, until_ns: int, sent: Traffic, wire: int, hidden_ns: int = 0) -> None:
        """Book the exchange up to `until_ns`, plus `hidden_ns` that computing overlapped, with the traffic `sent`."""
        duration_ns = max(0, until_ns - self.at_ns) + hidden_ns
        about = {"num_bytes": sent.bytes_sent, "count": sent.messages_sent, "wire": wire}
        self._record(EventKind.EXCHANGE, self.at_ns, duration_ns, step=self._step, **about)
        self.at_ns = until_ns

    def posts(self, posts: Mapping[int, PeerTraffic], wire: int) -> None:
        """Book the traffic with each other worker: one message a step and direction, of one number at both ends."""
        for peer, post in posts.items():
            about = {"peer": peer, "message": (self._step + 1) & 0xFFFFFFFF, "wire": wire}
            if post.messages_sent:
                sent = {"num_bytes": post.bytes_sent, "count": post.messages_sent}
                self._record(EventKind.SEND, post.sent_ns, step=self._step, **sent, **about)
            if post.received_ns:
                self._record(EventKind.RECEIVE, post.received_ns, step=self._step, **about)

    def end(self, end_ns: int, samples: int, loss: float = 0.0) -> None:
        begin_ns = self._begin_ns
        self._record(EventKind.STEP, begin_ns, end_ns - begin_ns, step=self._step, count=samples, value=loss)
