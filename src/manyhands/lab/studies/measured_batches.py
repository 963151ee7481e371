"""How long a task's model takes for batches of several sizes, in training and in inference."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from manyhands.data.batches import BatchSource
from manyhands.data.randomness import seed_all
from manyhands.engine.device import moved
from manyhands.engine.dynamo import optimizer_of
from manyhands.errors import UserError, first_line
from manyhands.lab.bench.harness import interleaved
from manyhands.lab.studies.latency_throughput import BatchTimes
from manyhands.lab.studies.measured_steps import ROUNDS, median_seconds, synchronize
from manyhands.serving.own_predictor import inputs_of_loss
from manyhands.task import Task

_FEWEST_CALLS = 20


def measure_batches(
    task: Task, batches: Sequence[int], device: str, seconds: float, report: Callable[[str], None]
) -> list[BatchTimes]:
    """Of each size in turn, several times; a UserError names the size that the task cannot compute."""
    timed = {batch: _Timed() for batch in batches}
    for done, batch in enumerate(interleaved(batches, ROUNDS)):
        report(f"batch {batch:,}, round {done // len(batches) + 1} of {ROUNDS}")
        try:
            timed[batch].add(task, batch, device, seconds / ROUNDS)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"--batches {batch}: task {task.name!r} fails with it: {first_line(error)}"
            ) from error
    return [one.times(batch) for batch, one in timed.items()]


@dataclass(slots=True)
class _Timed:
    """What was measured of one batch size in all rounds."""

    steps_s: list[float] = field(default_factory=list)  # the median of each round
    calls_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0  # of all calls, with what is between them

    def add(self, task: Task, batch: int, device: str, seconds: float) -> None:
        source = BatchSource(task.data, task.collate)
        seed_all(0)
        model = task.model().to(device)
        optimizer = optimizer_of(task, model)
        numbers = [number % len(source) for number in range(batch)]
        samples = moved(source.fetch(numbers), torch.device(device))

        def step() -> None:
            optimizer.zero_grad()
            loss = task.loss(model, samples)  # one number, or with weights one for each sample
            loss.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        self.steps_s.append(median_seconds(step, device, seconds))
        took, elapsed_s = _answer_times(model.eval(), task, samples, device, seconds)
        self.calls_s += took
        self.elapsed_s += elapsed_s

    def times(self, batch: int) -> BatchTimes:
        p50_s, p99_s = np.percentile(self.calls_s, [50, 99]).tolist()
        return BatchTimes(
            batch=batch,
            step_s=statistics.median(self.steps_s),
            p50_s=p50_s,
            p99_s=p99_s,
            mean_s=statistics.fmean(self.calls_s),
            calls=len(self.calls_s),
            clocked_per_s=batch * len(self.calls_s) / self.elapsed_s,
        )


def _answer_times(
    model: nn.Module, task: Task, samples: Any, device: str, seconds: float
) -> tuple[list[float], float]:
    """What each call of the model took, and all of them with what is between."""
    given = inputs_of_loss(model, task, samples)
    by_place = [given[key] for key in sorted(key for key in given if isinstance(key, int))]
    by_name = {key: one for key, one in given.items() if isinstance(key, str)}
    took: list[float] = []
    with torch.inference_mode():
        for _ in range(3):  # what is done once is not measured
            model(*by_place, **by_name)
        synchronize(device)
        began = time.perf_counter()
        while len(took) < _FEWEST_CALLS or time.perf_counter() - began < seconds:
            before = time.perf_counter()
            model(*by_place, **by_name)
            synchronize(device)
            took.append(time.perf_counter() - before)
        return took, time.perf_counter() - began
