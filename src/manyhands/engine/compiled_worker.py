"""One worker's training of a task with a compiled step, in a thread or a process, for every strategy.

A step of the run is a portion of the records, large enough that Python's overhead around it is negligible. The
strategy's `Order` assigns portions to workers. Workers synchronize after each pass over the records and where the run
saves. At these points no update is in flight: a pass sees all updates of the one before it, and a checkpoint after
step s holds exactly the first s portions.
"""

from __future__ import annotations

import collections
import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from manyhands.data.store.checkpoint import CheckpointStore, Loaded
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import Meter, Resources, SentFor, Traffic
from manyhands.engine.kernel_task import KernelStep, KernelTask, Taken
from manyhands.engine.reporting import Reporter, StepBook, WorkerContext, WorkerNote
from manyhands.engine.run import overlap_report
from manyhands.engine.training import Result, Stage
from manyhands.engine.worker import Trained
from manyhands.engine.worker_processes import ProcessTraining, Train, WorkerJob
from manyhands.errors import NonFinite
from manyhands.native.counters import Counter
from manyhands.native.group.gate import FREE
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.group.step_order import ORDERS, Order, Together
from manyhands.native.segment import CACHE_LINE, Segment
from manyhands.places.local.status import State
from manyhands.strategy import Strategy
from manyhands.transport.link.wire import Wire

_TALLY_ITEMS = CACHE_LINE // 8


class Control:
    """The workers' control block, at the start of their (zeroed) shared memory: step assignment, failed rank, sums."""

    def __init__(self, segment: Segment, group: SharedGroup, order: str, task: KernelTask) -> None:
        self.group = group
        self.order: Order = ORDERS[order](segment, 0, group, task.numbering)
        self.bad = Counter.within(segment, Order.NUM_BYTES)
        begin = Order.NUM_BYTES + Counter.NUM_BYTES
        self._tally = segment.array(begin, group.world * _TALLY_ITEMS, np.float64).reshape(group.world, -1)

    @staticmethod
    def num_bytes(world: int) -> int:
        return Order.NUM_BYTES + Counter.NUM_BYTES + world * CACHE_LINE

    def sums(self, *values: float) -> list[float]:
        """Collective: the sum over workers of each of a few numbers, in worker order."""
        if self.group.world == 1:
            return list(values)
        self._tally[self.group.rank, : len(values)] = values
        self.group.barrier()
        found: list[float] = self._tally[:, : len(values)].sum(axis=0).tolist()
        self.group.barrier()  # nobody writes the next values before all have read these
        return found


class KernelTrainer:
    """Trains by a compiled `step`; `run` is called once, on every worker. The caller closes step and group."""

    kept = None

    def __init__(
        self,
        plan: TrainingPlan,
        step: KernelStep,
        control: Control,
        worker_context: WorkerContext,
        checkpoints: CheckpointStore | None = None,
    ) -> None:
        self._plan, self._task, self._kernel = plan, kernel_task(plan), step
        self._control, self._group = control, control.group
        self.rank, self.world = self._group.rank, self._group.world
        self._in_lockstep = isinstance(control.order, Together)
        self._is_free = not self._in_lockstep and control.order.compiled_gate.order == FREE
        self._worker_context = worker_context
        self._reporter = Reporter(plan, self, worker_context, checkpoints)
        self._samples = 0
        self._unreported = (0.0, 0.0)  # this worker's sums of losses and of weights
        # What other workers have read from this one, and in how many pieces; all of it counts as step traffic
        self.sent = Traffic()
        self.meter = Meter(traffic=lambda: self.sent)
        self._broken = self._ends = ""
        # Where nobody waits: how many steps of this worker had so many of others come between begin and end
        self.overlap: collections.Counter[int] = collections.Counter()

    def run(self, start: Loaded | None = None) -> Trained:
        """Train from `start` (or from nothing) to the last step; raises NonFinite on a worker where the loss broke."""
        first = start.step if start is not None else 0
        if self.rank == 0 or not self._kernel.shares_memory:
            if start is None:
                self._kernel.fill()
            else:
                self._kernel.restore(start.model)
        self._group.barrier()
        if start is not None:
            start.model.clear()  # or every worker would hold the whole checkpoint for the length of the run
        self._group.take_stats()  # the wait for late starters is not part of the training
        self._reporter.begin(first)
        step, stopped, model = first, False, self._kernel.model
        while step < self._plan.steps and not stopped and not self._kernel.is_done:
            step, stopped = self._until_synchronized(step)
            if bad := self._control.bad.get():
                self._reporter.send(now=True)
                if bad - 1 == self.rank:  # if several broke, the last to report it is named
                    raise NonFinite(f"{self._broken}; {self._task.advice}")
                return self._trained(step, stopped=True)
            stopped = (stopped or self._kernel.is_done) and step < self._plan.steps
            self._reporter.after(step, model, last=stopped or step == self._plan.steps)
        if stopped and self._ends and self.rank == 0:
            self._worker_context.note(WorkerNote(notice=f"stopped after step {step}: {self._ends}"))
        self._kernel.gather()
        self._reporter.send(now=True)
        self._worker_context.mark(step, State.FINISHED)
        return self._trained(step, stopped)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self._control.sums(*values.tolist()), dtype=torch.float64)

    def optimizer_state(self) -> dict[str, Any] | None:
        """Collective: the optimizer state, which is part of the shared memory and is gathered on worker 0."""
        self._kernel.gather()
        return {} if self.rank == 0 else None

    def model_state(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        return model.state_dict() if self.rank == 0 else None

    def _until_synchronized(self, step: int) -> tuple[int, bool]:
        """Train from `step` on until all synchronize; where they are then, and whether somebody wants to stop there."""
        order, per_pass = self._control.order, self._task.passes.steps
        end = min(self._reporter.next_due(step), step - step % per_pass + per_pass)
        self._synchronize(step)  # the readers of the last round's end have read it by now
        order.begin(step, end)
        self._synchronize(step)
        while (mine := order.claim()) is not None:
            self._step(mine)
            self._reporter.send()
        self._worker_context.mark(end, State.WAITING)
        self._synchronize(end)
        own = (*self._unreported, float(self._worker_context.stop_requested() or bool(self._ends)))
        loss, weight, stops = self._control.sums(*own)
        self._unreported = (0.0, 0.0)
        self._reporter.loss = loss / weight if weight else math.nan
        return order.done(), bool(stops)

    def _synchronize(self, step: int) -> None:
        if self.world == 1:
            return  # a short pass is over before a barrier is: a lone worker continues without one
        book = StepBook(self._worker_context.record, max(0, step - 1), time.monotonic_ns())
        self._group.barrier()
        waits = self._group.take_stats().waiting_ns
        book.waits({peer: waited for peer, waited in enumerate(waits) if waited})

    def _step(self, step: int) -> None:
        self._worker_context.mark(step + 1, State.COMPUTING)
        begin, order = time.monotonic_ns(), self._control.order
        order.note_reading()
        taken = self._kernel.take(self._task.portion(step))
        between = order.applied()
        if self._is_free:
            self.overlap[between] += 1
        slow = self._plan.slow
        if slow is not None:
            slow.sleep(self._plan.seed, step, self.rank, (time.monotonic_ns() - begin) / 1e9)
        loss, weight = taken.loss, taken.weight
        self._unreported = (self._unreported[0] + loss, self._unreported[1] + weight)
        if self._in_lockstep:
            loss, weight = self._control.sums(loss, weight)
        end = time.monotonic_ns()
        if not math.isfinite(loss):
            self._broken = f"worker {self.rank}, step {step + 1}: the loss is not finite"
            self._control.bad.set(self.rank + 1)
        self._ends = self._ends or taken.ends
        if self._worker_context.stop_requested() or self._broken or taken.ends:
            order.stop(step)
        mean = loss / weight if weight else 0.0
        self._record(step, taken, (begin, end), mean)
        if math.isfinite(loss) and (self.rank == 0 or not self._in_lockstep):
            at_s, seconds = self._reporter.seconds, (end - begin) / 1e9
            self._reporter.add(step=step + 1, loss=mean, seconds=seconds, at_s=at_s, weight=weight)
            if taken.metrics:
                self._reporter.add(step=step + 1, metrics=dict(taken.metrics), at_s=at_s)

    def _record(self, step: int, taken: Taken, span_ns: tuple[int, int], loss: float) -> None:
        begin, end = span_ns
        book = StepBook(self._worker_context.record, step, begin)
        book.input(taken.input_ns, taken.samples)
        sent = Traffic(bytes_sent=taken.bytes_sent, messages_sent=taken.messages_sent)
        if self.world > 1:
            stats = self._group.take_stats()
            book.waits({peer: waited for peer, waited in enumerate(stats.waiting_ns) if waited})
            if self._in_lockstep:
                book.exchange(book.at_ns + stats.reducing_ns, sent, Wire.MEMORY)
        book.compute(end)
        book.end(end, taken.samples, loss)
        self._samples += taken.samples
        if taken.bytes_sent:
            self.sent += sent

    def _trained(self, step: int, stopped: bool) -> Trained:
        model, samples, seconds = self._kernel.model, self._samples, self._reporter.seconds
        return Trained(model=model, steps_done=step, samples=samples, seconds=seconds, stopped_early=stopped)


def kernel_task(plan: TrainingPlan) -> KernelTask:
    assert isinstance(plan.task, KernelTask), "the registry leads here with compiled tasks alone"
    return plan.task


class KernelProcesses(ProcessTraining):
    """Trains a kernel task in worker processes of this host."""

    @classmethod
    @abstractmethod
    def assemble(cls, task: KernelTask, strategy: Strategy, group: SharedGroup) -> tuple[KernelStep, Control]:
        """Collective, in a worker's process: its compiled step, and the control block that the workers share."""

    def run(self, stage: Stage) -> Result:
        """Compile once in the launcher, so that workers do not each compile, then run."""
        kernel_task(self._request.plan).warm()
        return super().run(stage)

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        return sum(one["samples"] for one in finished), overlap_report([one["overlap"] for one in finished])

    @classmethod
    @contextmanager
    def worker(
        cls,
        job: WorkerJob,
        resources: Resources,
        worker_context: WorkerContext,
        checkpoints: CheckpointStore | None,
    ) -> Iterator[Train]:
        with closing(resources.group()) as group:
            step, control = cls.assemble(kernel_task(job.plan), job.strategy, group)
            with closing(step):

                def train(start: Loaded | None) -> tuple[Trained, Mapping[str, Any]]:
                    trainer = KernelTrainer(job.plan, step, control, worker_context, checkpoints)
                    trained, sent = trainer.run(start), SentFor(gradients=trainer.sent)
                    return trained, {"sent": sent.to_dict(), "overlap": dict(trainer.overlap)}

                yield train
