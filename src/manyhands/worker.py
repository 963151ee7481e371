"""One worker's training: the loop that every strategy runs, in a process of its own or in the caller's.

It fetches this worker's share of each global batch, computes, and leaves the rest to the strategy's `Exchange`. Times
are taken before the exchange, so that a straggler shows as itself and not as everyone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from manyhands.cluster.board import State
from manyhands.computing import Computer, TrainingPlan
from manyhands.errors import NonFinite
from manyhands.exchange import Exchange, LocalStep, SharedStep
from manyhands.observe.events import NO_STEP, NOBODY, EventKind
from manyhands.store.checkpoint import CheckpointStore, Loaded, Snapshot
from manyhands.store.optimizer_state import restore_optimizer

__all__ = ["Surroundings", "Trained", "Trainer"]

_ROWS_EVERY_S = 0.1


class Surroundings(Protocol):
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
    ) -> bool:
        """Write one event; its step is the global batch, from 0."""

    def mark(self, step: int, state: State) -> None:
        """Say where this worker is, for those who wait for it."""

    def note(self, payload: dict[str, Any]) -> None:
        """Send rows of the run's history to the launcher."""

    def stop_requested(self) -> bool:
        """Whether the launcher asked to stop early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What one worker ended with."""

    model: nn.Module
    steps_done: int
    samples: int
    seconds: float
    stopped_early: bool


class Trainer:
    """Trains one worker's replica; `run` is called once.

    All workers are given `checkpoints` or none is: saving is collective, though worker 0 alone writes.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        exchange: Exchange,
        around: Surroundings,
        checkpoints: CheckpointStore | None = None,
    ) -> None:
        self._plan = plan
        self._exchange = exchange
        self._around = around
        self._checkpoints = checkpoints
        self._computer = Computer(plan, exchange.rank)
        self._rows: list[dict[str, Any]] = []
        self._rows_sent_ns = 0
        self._began_ns = 0
        self._samples = 0
        self._loss = math.nan
        self._evaluated: dict[str, float] = {}

    def run(self, start: Loaded | None = None) -> Trained:
        """Train from `start` (or from nothing) to the last step; raises NonFinite on the worker whose loss broke.

        Takes the tensors out of `start`.
        """
        first = start.step if start is not None else 0
        built = self._computer.build(first)
        model, optimizer, scheduler = built.model, built.optimizer, built.scheduler
        if start is not None:
            model.load_state_dict(start.model)
            restore_optimizer(optimizer, start.optimizer)
            start.model.clear()  # or every worker would hold the whole checkpoint for the length of the run
            start.optimizer.clear()
        self._exchange.attach(model, optimizer)
        model.train()
        called = cast(nn.Module, torch.compile(model)) if self._plan.compile else model
        self._began_ns = time.monotonic_ns()
        step, stopped = first, False
        while step < self._plan.steps and not stopped:
            shared = self._step(step, called, scheduler)
            step += 1
            if shared.bad_workers:
                self._refuse(shared, step, model)
                return self._trained(model, step - 1, stopped=True)
            stopped = shared.stop and step < self._plan.steps
            self._after_step(step, model, called, last=stopped or step == self._plan.steps)
        if first >= self._plan.steps:
            self._evaluate(step, called)
        self._send_rows(now=True)
        self._around.mark(step, State.FINISHED)
        return self._trained(model, step, stopped)

    def _step(self, step: int, model: nn.Module, scheduler: LRScheduler | None) -> SharedStep:
        """Train on global batch `step`, from 0."""
        exchange, around = self._exchange, self._around
        around.mark(step + 1, State.COMPUTING)
        before = exchange.traffic()
        begin = time.monotonic_ns()
        mine = self._computer.compute(model, step, exchange.rank, exchange.world, exchange.backward)
        local = LocalStep(loss=mine.loss, share=mine.share, stop=around.stop_requested())
        computed = time.monotonic_ns()
        overlapped = exchange.take_times().exchange_ns
        around.mark(step + 1, State.EXCHANGING)
        shared = exchange.agree(local)
        agreed = time.monotonic_ns()
        waits = exchange.take_times().wait_ns
        if not shared.bad_workers:
            exchange.apply()
            if scheduler is not None:
                scheduler.step()
        end = time.monotonic_ns()
        around.record(EventKind.COMPUTE, begin, max(0, computed - begin - overlapped), step=step)
        waited = self._record_waits(step, computed, waits)
        if exchange.world > 1:
            sent = exchange.traffic() - before
            around.record(
                EventKind.EXCHANGE,
                computed + waited,
                max(0, agreed - computed - waited) + overlapped,
                step=step,
                num_bytes=sent.bytes_sent,
                count=sent.messages_sent,
            )
        closing = exchange.take_times().wait_ns
        applied = max(agreed, end - sum(closing.values()))
        around.record(EventKind.COMPUTE, agreed, applied - agreed, step=step)
        self._record_waits(step, applied, closing)
        around.record(EventKind.STEP, begin, end - begin, step=step, count=mine.samples, value=shared.loss)
        self._samples += self._computer.batch_samples(step)
        self._loss = shared.loss
        if not shared.bad_workers:
            at_s = (end - self._began_ns) / 1e9
            self._add_row(step=step + 1, loss=shared.loss, seconds=(end - begin) / 1e9, at_s=at_s)
        return shared

    def _record_waits(self, step: int, begin_ns: int, waits: Mapping[int, int]) -> int:
        """Book waiting to the workers that were late; the nanoseconds in all."""
        waited = 0
        for peer, duration in waits.items():
            self._around.record(EventKind.WAIT, begin_ns + waited, duration, step=step, peer=peer)
            waited += duration
        return waited

    def _after_step(self, step: int, model: nn.Module, called: nn.Module, *, last: bool) -> None:
        plan = self._plan
        if last or (plan.evaluate_every and step % plan.evaluate_every == 0):
            self._evaluate(step, called)
        if self._checkpoints and (last or (plan.checkpoint_every and step % plan.checkpoint_every == 0)):
            self._save(step, model, self._checkpoints)
        self._send_rows(now=last)

    def _evaluate(self, step: int, model: nn.Module) -> None:
        """Collective: every worker evaluates its share of the evaluation batches; all learn the means."""
        exchange = self._exchange
        if self._plan.task.evaluation is None:
            return
        self._around.mark(step, State.EVALUATING)
        begin = time.monotonic_ns()
        evaluated = self._computer.evaluate(model, exchange.rank, exchange.world, exchange.total)
        assert evaluated is not None, "there is evaluation data"
        self._evaluated, samples = evaluated
        exchange.take_times()
        self._around.record(
            EventKind.EVALUATE, begin, time.monotonic_ns() - begin, step=step - 1, count=samples
        )
        self._add_row(step=step, metrics=self._evaluated, at_s=(time.monotonic_ns() - self._began_ns) / 1e9)

    def _save(self, step: int, model: nn.Module, checkpoints: CheckpointStore) -> None:
        """Collective: worker 0 writes what the others may have a part of."""
        self._around.mark(step, State.SAVING)
        begin = time.monotonic_ns()
        optimizer_state = self._exchange.optimizer_state()
        self._exchange.take_times()
        if optimizer_state is None:
            return
        # What a resumed run keeps must be on disk before the checkpoint that names it.
        self._send_rows(now=True)
        snapshot = Snapshot(
            step=step,
            model=model.state_dict(),
            optimizer=optimizer_state,
            extra={"seed": self._plan.seed},
            score=self._evaluated.get("evaluation_loss", self._loss),
            may_hold_infinity=frozenset(name for name, _ in model.named_buffers()),
        )
        checkpoints.save(snapshot)
        self._around.record(EventKind.CHECKPOINT, begin, time.monotonic_ns() - begin, step=step - 1)

    def _refuse(self, shared: SharedStep, step: int, model: nn.Module) -> None:
        """Stop every worker at this step; the first whose loss broke is the one that tells."""
        self._send_rows(now=True)
        if shared.bad_workers[0] != self._exchange.rank:
            return
        raise NonFinite(
            f"worker {shared.bad_workers[0]}, step {step}: the loss is not finite; {_first_bad(model)}; all workers "
            "stopped before this step and no parameter was changed; lower the learning rate or look at that batch"
        )

    def _trained(self, model: nn.Module, step: int, stopped: bool) -> Trained:
        return Trained(
            model=model,
            steps_done=step,
            samples=self._samples,
            seconds=(time.monotonic_ns() - self._began_ns) / 1e9,
            stopped_early=stopped,
        )

    def _add_row(self, **row: Any) -> None:
        if self._exchange.rank == 0:
            self._rows.append(row)

    def _send_rows(self, *, now: bool) -> None:
        clock = time.monotonic_ns()
        if self._rows and (now or clock - self._rows_sent_ns > _ROWS_EVERY_S * 1e9):
            self._around.note({"rows": self._rows})
            self._rows = []
            self._rows_sent_ns = clock


def _first_bad(model: nn.Module) -> str:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the first parameter with a value that is not finite is {name!r}"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return f"the first parameter with a gradient that is not finite is {name!r}"
    return "every parameter and gradient is finite, so the loss function itself made it"
