"""How long each part of a task's step takes here: measured within seconds, for two sizes of a worker's share.

Forward and backward are timed as a whole, for the full batch and a part of it; each layer has its share of a forward
by the hooks of its module. A line through both sizes gives the fixed and the per-sample time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from manyhands.data.batches import BatchSource
from manyhands.data.randomness import preserved, seed_all
from manyhands.engine.dynamo import optimizer_of
from manyhands.errors import UserError
from manyhands.facts import ComputeTime, LayerTimes, ModelFootprint, TaskProfile
from manyhands.strategies.common.sharding.layer_units import Unit, units_of
from manyhands.task import Task

__all__ = ["ProfiledTask", "measure_profile"]

_SECONDS, _MOST, _WARM = (
    1.0,
    30,
    2,
)  # of measuring each size: for how long, how often at most, and what does not count
_PART = 4  # the smaller share: a quarter of a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledTask:
    """A task's profile, and how much the measurements of its whole step differed from each other."""

    profile: TaskProfile
    noise: float  # (90th - 10th percentile) / median of forward and backward on a whole batch


@dataclass(slots=True)
class _Timed:
    """What was measured on so many samples, each a list over repeats."""

    samples: int
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    input_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    layers_s: dict[int, list[float]] = field(default_factory=dict)  # forward, by unit
    output_bytes: dict[int, float] = field(default_factory=dict)  # of a sample, by unit


def measure_profile(task: Task, footprint: ModelFootprint, threads: int) -> ProfiledTask:
    """Measure a task on this machine's CPU with so many threads; the caller's random state and threads are kept."""
    if task.streams:
        raise UserError(f"plan: data is {task.stream_name}, whose samples cannot be drawn for a measurement")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with preserved():
            return _measured(task, footprint)
    finally:
        torch.set_num_threads(before)


def _measured(task: Task, footprint: ModelFootprint) -> ProfiledTask:
    seed_all(0)
    model = task.model()
    optimizer = optimizer_of(task, model)
    source = BatchSource(task.data, task.collate)
    units = units_of(model)
    whole = min(task.batch_size, len(source))
    sizes = [_Timed(samples=samples) for samples in dict.fromkeys((whole, max(1, whole // _PART)))]
    for timed in sizes:
        _time(timed, task, model, optimizer, source, units)
    large, small = sizes[0], sizes[-1]
    forward, backward = (_line(large, small, name) for name in ("forward_s", "backward_s"))
    in_layers = {number: statistics.median(took) for number, took in large.layers_s.items()}
    total = sum(in_layers.values()) or 1.0
    layers = tuple(
        LayerTimes(
            name=unit.name,
            forward=_share(forward, in_layers.get(unit.number, 0.0) / total),
            backward=_share(backward, in_layers.get(unit.number, 0.0) / total),
            gradient_bytes=sum(unit.parameters[number].nbytes for number in unit.trained),
            output_bytes=large.output_bytes.get(unit.number, 0.0),
        )
        for unit in units
    )
    step_s = sorted(a + b for a, b in zip(large.forward_s, large.backward_s, strict=True))
    low, high = (step_s[round(at * (len(step_s) - 1))] for at in (0.1, 0.9))
    profile = TaskProfile(
        layers=layers,
        model=footprint,
        rest=_line(large, small, "input_s"),
        optimizer_s=statistics.median(large.optimizer_s),
    )
    return ProfiledTask(profile=profile, noise=(high - low) / statistics.median(step_s))


def _time(
    timed: _Timed, task: Task, model: nn.Module, optimizer: Any, source: BatchSource, units: Sequence[Unit]
) -> None:
    began = time.perf_counter()
    repeat = 0
    while repeat < _WARM + 3 or (repeat < _MOST and time.perf_counter() - began < _SECONDS):
        samples = [(repeat * timed.samples + index) % len(source) for index in range(timed.samples)]
        moments = [time.perf_counter()]
        batch = source.fetch(samples)
        moments.append(time.perf_counter())
        with _hooked(timed, units, counts=repeat >= _WARM):
            loss = task.loss(model, batch)
        moments.append(time.perf_counter())
        loss.backward()  # type: ignore[no-untyped-call]
        moments.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        moments.append(time.perf_counter())
        if repeat >= _WARM:
            lists = (timed.input_s, timed.forward_s, timed.backward_s, timed.optimizer_s)
            for took, begin, end in zip(lists, moments[:-1], moments[1:], strict=True):
                took.append(end - begin)
        repeat += 1


@contextmanager
def _hooked(timed: _Timed, units: Sequence[Unit], *, counts: bool) -> Iterator[None]:
    """Time the forward of each unit's module, and note what it hands on."""
    handles, begins = [], {}

    def watch(number: int, module: nn.Module) -> None:
        def enter(*_: Any) -> None:
            begins[number] = time.perf_counter()

        def leave(_module: Any, _args: Any, output: Any) -> None:
            if counts:
                timed.layers_s.setdefault(number, []).append(time.perf_counter() - begins[number])
            size = sum(one.nbytes for one in tree_leaves(output) if isinstance(one, Tensor))
            timed.output_bytes[number] = size / timed.samples

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))

    for unit in units:
        if unit.module is not None:
            watch(unit.number, unit.module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _line(large: _Timed, small: _Timed, name: str) -> ComputeTime:
    """Through the medians of both sizes; neither part is below 0."""
    at_large, at_small = (statistics.median(getattr(one, name)) for one in (large, small))
    if large.samples == small.samples:
        return ComputeTime(per_sample_s=at_large / large.samples)
    slope = max(0.0, (at_large - at_small) / (large.samples - small.samples))
    slope = min(slope, at_large / large.samples)
    return ComputeTime(fixed_s=at_large - slope * large.samples, per_sample_s=slope)


def _share(time_of_all: ComputeTime, share: float) -> ComputeTime:
    return ComputeTime(fixed_s=share * time_of_all.fixed_s, per_sample_s=share * time_of_all.per_sample_s)
