"""One worker's training loop, for every strategy, in a worker process or in the caller's.

It fetches this worker's share of each global batch, computes, and leaves the rest to the strategy's `Exchange`. Times
are taken before the exchange, so that a straggler's delay is booked to the straggler and not to all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.data.store.checkpoint import CheckpointStore, Loaded
from manyhands.data.store.state_tree import restore_optimizer
from manyhands.engine.buffers import make_alike, synchronize_batch_norms
from manyhands.engine.clipping import clip, logged
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.engine.desync_check import Agreement
from manyhands.engine.exchange import Exchange, LocalStep, SentFor, SharedStep, Traffic
from manyhands.engine.fp8 import fp8_products
from manyhands.engine.loss_scaling import LossScale, left_out, unscale
from manyhands.engine.options import MEAN, SYNCHRONIZE
from manyhands.engine.profiler import StepProfiler, named_span
from manyhands.engine.recomputing import recomputing
from manyhands.engine.reduction import require_reduction
from manyhands.engine.reporting import Reporter, StepBook, WorkerContext, WorkerNote, is_due
from manyhands.errors import NonFinite
from manyhands.native.heap import keep_freed_memory
from manyhands.observe.record.torch_traces import EXCHANGE
from manyhands.places.local.status import State

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The final state of one worker."""

    model: nn.Module
    steps_done: int
    samples: int
    seconds: float
    stopped_early: bool
    # The whole model's, on worker 0, where its `model` may hold a part; None: those of `model`
    weights: Mapping[str, torch.Tensor] | None = None

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return self.weights if self.weights is not None else self.model.state_dict()


class Trainer:
    """Trains one worker's replica; `run` is called once. All are given `checkpoints`, or none: saving is collective."""

    def __init__(
        self,
        plan: TrainingPlan,
        exchange: Exchange,
        worker_context: WorkerContext,
        checkpoints: CheckpointStore | None = None,
    ) -> None:
        self._plan, self._exchange, self._worker_context = plan, exchange, worker_context
        self._members = exchange.members
        self._worker = exchange.rank if exchange.members is None else exchange.members.slot
        self._computer = Computer(plan, self._worker)
        evaluate = partial(exchange.evaluate, self._computer)
        facts = exchange.rounds.evaluation_facts if exchange.rounds is not None else dict
        keeps_rows = self._members is not None
        self.reporter = Reporter(
            plan, exchange, worker_context, checkpoints, evaluate, keeps_rows=keeps_rows, facts=facts
        )
        self._clips = self._computer.task.clips
        self._scale = LossScale() if plan.half else None
        self._profiler = StepProfiler(plan.profiled, self._worker)
        self.model: nn.Module  # once `run` has built it
        self._optimizer: Optimizer
        self._samples = 0
        self._agreed_step = 0  # after which all held the same parameters
        self._course = Course()
        self._weight = 0.0  # shares of global batches computed since buffers were last made alike
        self._in_steps = Traffic()
        self._unsettled: list[dict[str, Any]] = []  # rows of steps whose loss is not agreed on yet

    def run(self, start: Loaded | None = None) -> Trained:
        """Train from `start`, whose tensors are taken out, to the end; NonFinite on the worker whose loss broke."""
        with self._computer.loading_ahead(), closing(self._profiler), ExitStack() as self._at_end:
            return self._run(start)

    def _run(self, start: Loaded | None) -> Trained:
        first = start.step if start is not None else 0
        built = self._computer.build(first, on_host=self._exchange.builds_on_host)
        model, optimizer, scheduler = built.model, built.optimizer, built.scheduler
        if start is not None:
            model.load_state_dict(start.model)
            restore_optimizer(optimizer, start.optimizer)
            start.model.clear()  # or every worker would hold the whole checkpoint for the length of the run
            start.optimizer.clear()
        exchange = self._exchange
        exchange.attach(model, optimizer)
        keep_freed_memory()  # every step frees what the next one takes
        if start is not None and exchange.kept is not None:
            exchange.kept.load(start.extra.get("exchange", {}))
        part = exchange.part
        if self._plan.buffers == SYNCHRONIZE and part.count > 1:
            synchronize_batch_norms(model, part.total_in_step or exchange.total, part.index, part.count)
        self.model, self._optimizer, self._agreed_step = model, optimizer, first
        self._at_end.enter_context(_blocks_as_asked(self._plan, model))
        model.train()
        extra = start.extra if start is not None else None
        self.reporter.begin(first, extra, built.metric_scheduler, self._scale)
        self._samples = (extra or {}).get("samples", 0)
        if self._members is not None:
            self._members.on_join(lambda: {**self.reporter.for_newcomers(), "samples": self._samples})
        splits = exchange.rounds is None and (part.count > 1 or self._computer.task.microbatches > 1)
        if start is None and splits:  # a loss or a gradient is combined from those of parts of a batch
            self._worker_context.mark(first, State.EVALUATING)
            alike = partial(exchange.evaluate, model=model, alike=True)
            require_reduction(self._computer, self._worker, model, alike)
            exchange.meter.take_times()  # not part of the first step
        step, settled, stopped = first, first, self._is_over(first)
        while step < self._plan.steps and not stopped:
            shared = self._atomically(partial(self._step, step, scheduler), step, at_border=True)
            step += 1
            if shared.bad_workers:
                self.reporter.send(now=True)
                if shared.bad_workers[0] != self._worker:  # the first whose loss broke says so
                    return self._trained(step - 1, stopped=True)
                raise self._non_finite(step, is_first=step == first + 1)
            if not shared.settled:
                continue  # collective work waits until the workers are synchronized
            stopped = (shared.stop and step < self._plan.steps) or self._is_over(step)
            last = stopped or step == self._plan.steps
            checks = last or is_due(settled, step, self._plan.check_every)
            settled = step
            if self.reporter.uses_model(step, last=last):
                self._atomically(self._make_buffers_alike, step)
            between = partial(self._between, step, checks=checks, last=last)
            ends = self._atomically(between, step)
            stopped = stopped or (ends and not last)
            exchange.meter.take_times()  # collective work is not part of the next step
        if step == first:
            self._atomically(partial(self.reporter.evaluate, step, model), step)
        self.reporter.send(now=True)
        self._worker_context.mark(step, State.FINISHED)
        before = exchange.meter.traffic()
        weights = exchange.model_state(model)
        self.reporter.saving += exchange.meter.traffic() - before
        return self._trained(step, stopped, self.reporter.chosen(weights))

    def _non_finite(self, step: int, *, is_first: bool) -> NonFinite:
        since = "" if is_first else f"the update of step {step - 1}"
        cause = diagnose(self.model, self._course, since=since, clip=not self._clips)
        where = f"worker {self._worker}, step {step}"
        return NonFinite(f"{where}: the loss is not finite; {self._exchange.when_broken}; {cause}")

    def sent(self) -> SentFor:
        steps, saving = self._in_steps, self.reporter.saving
        between = self._exchange.meter.traffic() - steps - saving
        return SentFor(gradients=steps, control=between, checkpoints=saving)

    def _is_over(self, step: int) -> bool:
        """Whether the exchange ends the run after `step` steps, before the last; worker 0 reports why."""
        rounds = self._exchange.rounds
        if rounds is None or step >= self._plan.steps:
            return False
        why = rounds.cannot_continue(self._computer, step)
        if why and self._exchange.rank == 0:
            self._worker_context.note(WorkerNote(notice=why))
        return bool(why)

    def _atomically(self, work: Callable[[], _T], steps_done: int, *, at_border: bool = False) -> _T:
        """Collective: do `work` completely on every worker, or on none; again where somebody was lost meanwhile."""
        if self._members is None:
            return work()
        return cast(_T, self._members.atomically(work, steps_done=steps_done, at_border=at_border))

    def _between(self, step: int, *, checks: bool, last: bool) -> bool:
        """Collective: what is due between two steps; returns whether the run ends here."""
        exchange, part, model = self._exchange, self._exchange.part, self.model
        if checks and self._plan.check_every and any(len(group) > 1 for group in part.copies):
            Agreement(
                partial(part.parameters, model),
                rank=exchange.rank,
                world=exchange.world,
                total=exchange.total,
                copies=part.copies,
                agreed_step=self._agreed_step,
            ).check(step)
            self._agreed_step = step
        return self.reporter.after(step, model, last=last)

    def _make_buffers_alike(self) -> None:
        """Collective: synchronize the buffers before the model is evaluated, saved or handed over."""
        part = self._exchange.part
        if part.count > 1:
            total = part.total_of_copies or self._exchange.total
            weight = self._weight if self._plan.buffers == MEAN else None
            make_alike(list(part.buffers(self.model)), total, first=part.index == 0, weight=weight)
            self._weight = 0.0

    def _step(self, step: int, scheduler: LRScheduler | None) -> SharedStep:
        exchange, worker_context = self._exchange, self._worker_context
        self.reporter.save_missing(step, self.model)
        worker_context.mark(step + 1, State.COMPUTING)
        meter, before = exchange.meter, exchange.meter.traffic()
        if self._plan.profiled is not None:
            self._profiler.before(step)
        begin = time.monotonic_ns()
        if self._scale is not None:
            self._computer.loss_scale = self._scale.scale
        mine = exchange.compute(self._computer, self.model, step)
        stop, last = worker_context.stop_requested(), step + 1 == self._plan.steps
        local = LocalStep(loss=mine.loss, share=mine.share, stop=stop, step=step, last=last)
        self._weight += mine.share
        computed = time.monotonic_ns()
        during = meter.take_times()
        overlapped = during.exchange_ns
        worker_context.mark(step + 1, State.EXCHANGING)
        with nullcontext() if self._plan.profiled is None else named_span(EXCHANGE):
            shared = exchange.agree(local)
        agreed = time.monotonic_ns()
        times = meter.take_times()
        facts = {} if shared.bad_workers else {**self._advance(scheduler), **self._computer.collected()}
        for sentence in self._computer.notices():
            worker_context.note(WorkerNote(notice=sentence))
        end = time.monotonic_ns()
        book = StepBook(worker_context.record, step, begin)
        book.input(mine.input_ns, mine.samples)
        book.microbatches(during.microbatches)
        in_micro_batches = sum(item.exchange_ns for item in during.microbatches)
        book.compute(computed - sum(during.wait_ns.values()), less_ns=overlapped - in_micro_batches)
        book.waits(during.wait_ns)
        book.waits(times.wait_ns)
        if exchange.world > 1:
            sent = meter.traffic()
            self._in_steps += sent - before
            book.exchange(agreed, sent - before, exchange.wire, hidden_ns=overlapped)
            book.posts(times.posts, exchange.wire)
            before = sent
        closing = meter.take_times().wait_ns
        book.compute(max(agreed, end - sum(closing.values())))
        book.waits(closing)
        if exchange.average is not None and not shared.bad_workers and exchange.average(False):
            # The synchronization after a step is exchange, and waits for late workers.
            end, times, sent = time.monotonic_ns(), meter.take_times(), meter.traffic() - before
            book.waits(times.wait_ns)
            self._in_steps += sent
            book.exchange(end, sent, exchange.wire)
            book.posts(times.posts, exchange.wire)
        book.end(end, mine.samples, shared.loss if shared.settled else mine.loss)
        if self._plan.profiled is not None:
            self._profiler.after()
        self._add_row(step, (end - begin) / 1e9, shared, facts)
        return shared

    def _advance(self, scheduler: LRScheduler | None) -> Mapping[str, Any]:
        """Collective: take the step that was agreed on, unless a scaled gradient overflowed; what its row tells."""
        exchange, scale, facts = self._exchange, self._scale, dict[str, Any]()
        finite = scale is None or unscale(exchange, self.model, scale.scale)
        if finite and self._plan.log:
            facts |= logged(self._plan.log, exchange, self.model, self._optimizer)
        if finite and self._clips:
            clip(self._computer.task, exchange, self.model)
        with nullcontext() if finite else left_out(self._optimizer):
            exchange.apply()
        if scale is not None:
            scale.update(finite=finite)
            facts |= {} if finite else {"skipped": True}
        if scheduler is not None:
            scheduler.step()
        return facts

    def _add_row(self, step: int, seconds: float, shared: SharedStep, facts: Mapping[str, Any]) -> None:
        rounds = self._exchange.rounds
        self._samples += self._computer.batch_samples if rounds is None else rounds.step_samples()
        facts = {**facts, **(rounds.row_facts() if rounds is not None else {})}
        self._unsettled.append({"step": step + 1, "seconds": seconds, "at_s": self.reporter.seconds, **facts})
        if not shared.settled or shared.bad_workers:
            return
        self.reporter.loss = shared.loss
        self._course.add(shared.loss)
        rows, self._unsettled = self._unsettled, []
        if self._exchange.rank == 0 or self._members is not None:
            for row, loss in zip(rows, (*shared.earlier, shared.loss), strict=True):
                self.reporter.add(**{**row, "loss": None if math.isnan(loss) else loss})

    def _trained(
        self, step: int, stopped: bool, weights: Mapping[str, torch.Tensor] | None = None
    ) -> Trained:
        return Trained(
            model=self.model,
            steps_done=step,
            samples=self._samples,
            seconds=self.reporter.seconds,
            stopped_early=stopped,
            weights=weights,
        )


_GROWN_LOSS = 10.0  # times the first one
_GROWN_WEIGHT = 1e3  # trained weights are some orders smaller


@contextmanager
def _blocks_as_asked(plan: TrainingPlan, model: nn.Module) -> Iterator[None]:
    """While this is open, blocks of `model` compute activations again, and in 8 bits, where that was asked."""
    with ExitStack() as stack:
        if plan.recompute:
            stack.enter_context(recomputing(model))
        if plan.fp8:
            stack.enter_context(fp8_products(model))
        yield


@dataclass(slots=True)
class Course:
    """The course of a run's loss so far."""

    first: float | None = None
    last: float | None = None

    def add(self, loss: float) -> None:
        self.first, self.last = loss if self.first is None else self.first, loss

    @property
    def has_grown(self) -> bool:
        if self.first is None or self.last is None:
            return False
        return self.last > _GROWN_LOSS * max(abs(self.first), 1e-3)


def diagnose(
    model: nn.Module, course: Course, *, what: str = "loss", since: str = "", clip: bool = False
) -> str:
    """What broke first and what to try, as a part of a sentence; from the weights and the earlier losses.

    No step is taken with a loss that is not finite, so the weights are those of the step before, by the update `since`
    (empty: the model was built with them). `what` is not finite now; `clip` says whether clipping can be tried.
    """
    bad, largest, where, grown = None, 0.0, "", ""
    for name, parameter in model.named_parameters():
        most = float(parameter.detach().abs().max()) if parameter.numel() else 0.0  # a NaN comes through
        if not math.isfinite(most):
            bad = name
            break
        if most >= largest:
            largest, where = most, name
    if course.has_grown:
        grown = f", and the loss had grown from {course.first:.3g} to {course.last:.3g}"
    rate = "lower the learning rate" + (" or clip the gradient (Task(clip_norm=1.0))" if clip else "")
    if bad is not None and not since:
        return f"the initial weights are not finite, the first in {bad!r}; start from others"
    if bad is not None:
        return f"the weights are not finite since {since}, the first in {bad!r}{grown}; {rate}"
    if course.has_grown or largest > _GROWN_WEIGHT:
        return (
            f"the {what} is the first value that is not finite: training diverges, the weights are up to {largest:.3g} "
            f"({where!r}){grown}; {rate}"
        )
    gradients = ((name, one.grad) for name, one in model.named_parameters() if one.grad is not None)
    reached = next((name for name, grad in gradients if not torch.isfinite(grad).all()), None)
    so = f", but the gradient is not, the first in {reached!r}" if reached is not None else ""
    return (
        f"the {what} is the first value that is not finite: the weights are finite, up to {largest:.3g} "
        f"({where!r}){so}; check that batch, and divisions and logarithms in the loss; a lower learning rate may help"
    )
