"""One worker's training under `hogwild`: whole batches, one after another, each a step on the shared memory.

The batches of a run are those of the plain loop, and each is taken by exactly one worker. All workers synchronize
where the run evaluates or saves, and at the end. No worker steps then, so an evaluation measures one state of the
model, and a checkpoint after step s has seen exactly the first s batches.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.data.store.checkpoint import CheckpointStore, Loaded
from manyhands.data.store.state_tree import restore_optimizer
from manyhands.engine.buffers import make_alike
from manyhands.engine.clipping import clip_own, logged
from manyhands.engine.computing import Built, Computed, Computer, TrainingPlan
from manyhands.engine.exchange import Meter, Resources, SentFor, SingleExchange
from manyhands.engine.options import MEAN
from manyhands.engine.profiler import StepProfiler
from manyhands.engine.reduction import require_reduction
from manyhands.engine.reporting import Reporter, StepBook, WorkerContext, WorkerNote
from manyhands.engine.run import overlap_summary
from manyhands.engine.worker import Course, Trained, diagnose
from manyhands.engine.worker_processes import ProcessTraining, Train, WorkerJob
from manyhands.errors import NonFinite
from manyhands.native.counters import Counter
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.group.step_order import ORDERS, Order
from manyhands.native.heap import keep_freed_memory
from manyhands.places.local.status import State
from manyhands.strategies.hogwild.shared_model import SharedStepper
from manyhands.strategies.hogwild.strategy import Hogwild

_CONTROL_BYTES = Order.NUM_BYTES + Counter.NUM_BYTES
_SMALLEST_TOTALS = 64


class HogwildTrainer:
    """Trains on the shared parameters; `run` is called once, on every worker. Takes ownership of `group`.

    `order` is that of the strategy. `close` is idempotent; the model keeps its memory while it lives.
    """

    meter = Meter()  # memory is shared, and nothing is sent
    kept = None
    _built: Built
    _order: Order
    _bad: Counter  # the rank of a worker whose loss was not finite, plus one; 0: none
    _scheduled: int  # the number of steps that the learning-rate schedule has taken

    def __init__(
        self,
        plan: TrainingPlan,
        order: str,
        group: SharedGroup,
        worker_context: WorkerContext,
        checkpoints: CheckpointStore | None = None,
    ) -> None:
        self.rank, self.world = group.rank, group.world
        self.overlap: collections.Counter[int] = collections.Counter()
        """By number of other workers' steps between its read and its write: how many steps of this worker."""
        self._plan, self._kind, self._group = plan, ORDERS[order], group
        self._worker_context = worker_context
        self._computer = Computer(plan, group.rank)
        evaluate = partial(self._computer.evaluate, part=self.rank, parts=self.world, total=self.total)
        self._reporter = Reporter(plan, self, worker_context, checkpoints, evaluate)
        self._samples = self._samples_since_alike = 0
        self._since_met = (0.0, 0)  # this worker's sum of losses, and its samples
        self._stepper: SharedStepper | None = None
        self._broken = self._cause = ""
        self._course = Course()
        self._profiler = StepProfiler(plan.profiled, self.rank)

    def run(self, start: Loaded | None = None) -> Trained:
        """Train from `start`, whose tensors it removes, or from scratch; NonFinite on the worker whose loss broke."""
        with self._computer.loading_ahead(), closing(self._profiler):
            return self._run(start)

    def _run(self, start: Loaded | None) -> Trained:
        first = start.step if start is not None else 0
        built = self._computer.build(first)
        model = built.model
        if start is not None:
            model.load_state_dict(start.model)
            restore_optimizer(built.optimizer, start.optimizer)
            start.model.clear()  # otherwise every worker would hold the whole checkpoint during the run
            start.optimizer.clear()
        self._attach(built, first)
        model.train()
        self._group.take_stats()  # waits before training do not count
        extra = start.extra if start is not None else None
        self._reporter.begin(first, extra, built.metric_scheduler)
        if start is None and self._computer.task.microbatches > 1:
            require_reduction(
                self._computer, self.rank, model, lambda trial: trial.evaluate(self._built.model)
            )
        step, stopped = first, False
        while step < self._plan.steps and not stopped:
            step, stopped = self._until_met(step)
            if self._bad.get():
                self._reporter.send(now=True)
                # raised on the worker whose flag is set, the last one if several
                if self._bad.get() - 1 == self.rank:
                    raise NonFinite(
                        f"{self._broken}; this batch changed no parameter, and the other workers stopped after "
                        f"their current batch; {self._cause}"
                    )
                return self._trained(model, step, stopped=True)
            stopped = stopped and step < self._plan.steps
            last = stopped or step == self._plan.steps
            # buffers are in shared memory, except one that a module has replaced
            weight = float(self._samples_since_alike) if self._plan.buffers == MEAN else None
            make_alike(list(model.buffers()), self.total, first=self.rank == 0, weight=weight)
            self._samples_since_alike = 0
            ends = self._reporter.after(step, model, last=last)
            stopped = stopped or (ends and not last)
        if first >= self._plan.steps:
            self._reporter.evaluate(step, self._built.model)
        self._reporter.send(now=True)
        self._worker_context.mark(step, State.FINISHED)
        return self._trained(model, step, stopped, self._reporter.chosen(None))

    def total(self, values: Tensor) -> Tensor:
        room, sums = self._totals.tensor, []
        for piece in torch.split(values, room.numel()):
            room.zero_()
            room[: piece.numel()] = piece
            self._group.all_reduce(self._totals)
            sums.append(room[: piece.numel()].clone())
        return torch.cat(sums)

    def optimizer_state(self) -> dict[str, Any] | None:
        return self._need_stepper().optimizer_state() if self.rank == 0 else None

    def model_state(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        return model.state_dict() if self.rank == 0 else None

    def close(self) -> None:
        if self._stepper is not None:
            self._stepper.close()
        self._group.close()

    def _need_stepper(self) -> SharedStepper:
        assert self._stepper is not None, "run comes first"
        return self._stepper

    def _attach(self, built: Built, first: int) -> None:
        group, task = self._group, self._computer.task
        stepper = SharedStepper(group, built.model, built.optimizer, task.sparse, _CONTROL_BYTES)
        self._stepper = stepper
        count = max(_SMALLEST_TOTALS, 2 + len(task.metrics))
        group.allocate(count * torch.float64.itemsize, "what is measured")
        self._totals = group.bucket(0, count, torch.float64)
        segment = stepper.shared.segment
        self._built, self._scheduled = built, first
        self._order = self._kind(segment, 0, group)
        self._bad = Counter.within(segment, Order.NUM_BYTES)
        keep_freed_memory()  # every step frees what the next one takes

    def _until_met(self, step: int) -> tuple[int, bool]:
        """Train from `step` to the next synchronization; return the step reached and whether any worker stops."""
        end = self._reporter.next_due(step)
        self._meet(step)  # every worker has read the end of the last round
        self._order.begin(step, end)
        self._meet(step)
        while (mine := self._order.claim()) is not None:
            self._step(mine)
            self._reporter.send()
        self._reporter.send(now=True)
        self._worker_context.mark(end, State.WAITING)
        self._meet(end)
        report = (*self._since_met, float(self._worker_context.stop_requested()))
        self._since_met = (0.0, 0)
        loss, samples, stops = self.total(torch.tensor(report, dtype=torch.float64)).tolist()
        self._reporter.loss = loss / samples if samples else math.nan
        return self._order.done(), bool(stops)

    def _meet(self, step: int) -> None:
        book = StepBook(self._worker_context.record, max(0, step - 1), time.monotonic_ns())
        self._group.barrier()
        waits = enumerate(self._group.take_stats().waiting_ns)
        book.waits({peer: waited for peer, waited in waits if waited})

    def _step(self, step: int) -> None:
        worker_context, order, stepper = self._worker_context, self._order, self._need_stepper()
        worker_context.mark(step + 1, State.COMPUTING)
        if self._built.scheduler is not None:  # the batches of one worker only go forward
            for _ in range(self._scheduled, step):
                self._built.scheduler.step()
        self._scheduled = step
        if self._plan.profiled is not None:
            self._profiler.before(step)
        begin = time.monotonic_ns()

        def prepare(batch: Any) -> None:
            stepper.read(batch)
            order.enter(step)

        def backward(loss: Tensor, _share: float) -> None:
            loss.backward()  # type: ignore[no-untyped-call]  # unweighted: the whole batch is this worker's

        mine = self._computer.compute(self._built.model, step, 0, 1, backward, prepare)
        facts = dict(self._computer.collected())
        for sentence in self._computer.notices():
            worker_context.note(WorkerNote(notice=sentence))
        if math.isfinite(mine.loss):
            if self._plan.log:  # of this worker's own gradient
                facts |= logged(self._plan.log, SingleExchange(), self._built.model, self._built.optimizer)
            if self._computer.task.clips:
                clip_own(self._computer.task, self._built.model)
            stepper.step()
            self.overlap[order.applied()] += 1
        else:
            self._break(step)
        if worker_context.stop_requested() or self._broken:
            order.stop(step)
        order.leave(step)
        if self._plan.profiled is not None:
            self._profiler.after()
        end = time.monotonic_ns()
        waits = collections.Counter(order.take_waits()) + collections.Counter(stepper.take_waits())
        self._record(step, mine, (begin, end), waits, facts)

    def _record(
        self,
        step: int,
        mine: Computed,
        span_ns: tuple[int, int],
        waits: Mapping[int, int],
        facts: Mapping[str, float],
    ) -> None:
        begin, end = span_ns
        book = StepBook(self._worker_context.record, step, begin)
        book.waits(waits)
        book.input(mine.input_ns, mine.samples)
        book.compute(end)
        book.end(end, mine.samples, mine.loss)
        self._samples += mine.samples
        self._samples_since_alike += mine.samples
        if not self._broken:
            loss, samples = self._since_met
            self._course.add(mine.loss)
            self._since_met = loss + mine.loss * mine.samples, samples + mine.samples
            seconds = (end - begin) / 1e9
            at_s = self._reporter.seconds
            self._reporter.add(step=step + 1, loss=mine.loss, seconds=seconds, at_s=at_s, **facts)

    def _break(self, step: int) -> None:
        since = f"an update before step {step + 1}" if self._course.last is not None else ""
        clip = not self._computer.task.clips
        self._cause = diagnose(self._built.model, self._course, since=since, clip=clip)
        self._broken = f"worker {self.rank}, step {step + 1}: the loss is not finite"
        self._bad.set(self.rank + 1)

    def _trained(
        self, model: nn.Module, step: int, stopped: bool, weights: Mapping[str, Tensor] | None = None
    ) -> Trained:
        return Trained(
            model=model,
            steps_done=step,
            samples=self._samples,
            seconds=self._reporter.seconds,
            stopped_early=stopped,
            weights=weights,
        )


class HogwildTraining(ProcessTraining):
    """Uses a separate loop: each worker takes whole batches, without synchronizing at each step."""

    @classmethod
    @contextmanager
    def worker(
        cls,
        job: WorkerJob,
        resources: Resources,
        worker_context: WorkerContext,
        checkpoints: CheckpointStore | None,
    ) -> Iterator[Train]:
        assert isinstance(job.strategy, Hogwild), "the registry leads here from hogwild alone"
        trainer = HogwildTrainer(job.plan, job.strategy.order, resources.group(), worker_context, checkpoints)
        with closing(trainer):

            def train(start: Loaded | None) -> tuple[Trained, Mapping[str, Any]]:
                trained = trainer.run(start)
                return trained, {"sent": SentFor().to_dict(), "overlap": dict(trainer.overlap)}

            yield train

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        overlap = overlap_summary([one["overlap"] for one in finished])
        return sum(one["samples"] for one in finished), {"overlap": overlap}
