"""What a step of each strategy costs on this machine beside computing: measured once, on small made-up models.

A stack of layers is trained for a moment under each strategy. What the step takes beyond its prediction is due to the
strategy itself, to its messages and to their bytes; models that differ in these tell them apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from torch import nn

from manyhands.engine.fitting import fit
from manyhands.engine.options import Options
from manyhands.errors import ManyhandsError, first_line
from manyhands.facts import Machines, StepCosts
from manyhands.foresight.estimate import estimate, refusal
from manyhands.foresight.plan.seen_steps import seen_step_s
from manyhands.foresight.plan.task_profile import TaskProfiles
from manyhands.foresight.plan.track_record import cost_class
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy
from manyhands.task import Task

__all__ = ["CostSample", "fitted_costs", "measured_costs", "stack", "try_steps", "usual_costs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSample:
    """One step that was seen, and what of it the parts that are modelled explain."""

    kind: str  # see `cost_class`
    modelled_s: float
    seen_s: float
    messages: float
    num_bytes: float


_SMALL = StepCosts(step_s=1e-4, message_s=3e-5, byte_s=2e-10)
_AT_MOST = 3.0  # times what is usual, and at least so many small ones


def fitted_costs(
    samples: Iterable[CostSample], usual: Mapping[str, StepCosts] | None = None
) -> dict[str, StepCosts]:
    """By kind, the costs with the least squares of relative errors; none is below 0, and none far above its usual size.

    A few models cannot tell noise from a cost of bytes, of which a large model has a thousand times as many.
    """
    from scipy.optimize import lsq_linear

    by_kind: dict[str, list[CostSample]] = {}
    for one in samples:
        by_kind.setdefault(one.kind, []).append(one)
    found = {}
    for kind, of_kind in by_kind.items():
        columns = np.array([[1.0, one.messages, one.num_bytes] for one in of_kind])
        seen = np.array([one.seen_s for one in of_kind])
        beyond = np.array([one.seen_s - one.modelled_s for one in of_kind])
        scale = np.maximum(columns.max(axis=0), 1e-30)  # messages and bytes differ by orders of magnitude
        known = np.array(astuple((usual or {}).get(kind, StepCosts())))
        most = _AT_MOST * np.maximum(known, np.array(astuple(_SMALL)))
        solved = lsq_linear(columns / scale / seen[:, None], beyond / seen, bounds=(0.0, most * scale)).x
        step_s, message_s, byte_s = (solved / scale).tolist()
        found[kind] = StepCosts(step_s=step_s, message_s=message_s, byte_s=byte_s)
    return found


@dataclass(frozen=True, slots=True)
class _Shape:
    """A made-up model: so many layers of a width, outputs, and the samples of a batch for each worker."""

    layers: int
    width: int
    samples: int
    outputs: int = 1


_SHAPES = (
    _Shape(3, 32, 8),  # few bytes in few messages
    _Shape(20, 64, 32),  # few in many
    _Shape(6, 384, 64),
    _Shape(3, 768, 32),  # many in few
    _Shape(1, 256, 32, outputs=8192),  # many, and nearly all of one tensor, as of a table
    _Shape(4, 64, 2048),  # many bytes of activations
)
"""What tells a cost of bytes from one of messages. Each is seen once: models differ by more than repetitions do."""


def stack(layers: int, width: int, batch_size: int, outputs: int = 1) -> Task:
    """A task of so many linear layers on random numbers, and one to so many outputs."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        hidden = [one for _ in range(layers) for one in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(width, outputs))

    numbers = torch.randn(4 * batch_size, width, generator=torch.Generator().manual_seed(0))
    return Task(
        model=model,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(numbers, numbers.sum(1, keepdim=True)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=batch_size,
    )


_SECONDS = 0.25  # of each trial
_FEWEST, _MOST = 16, 1000  # steps of a trial


def usual_costs(machines: Machines) -> dict[str, StepCosts]:
    """Of each kind of strategy on a usual machine."""
    return {cost_class(one): one.facts.usual_costs for one in _tried_for(machines)}


def measured_costs(
    machines: Machines, say: Callable[[str], None] = lambda _: None, *, device: str = "cpu"
) -> dict[str, StepCosts]:
    """Of each kind of strategy with so many workers here; `machines` has no costs yet."""
    strategies = _tried_for(machines)
    samples: list[CostSample] = []
    for number, shape in enumerate(_SHAPES, 1):
        say(f"measuring what a step costs under each strategy: made-up model {number} of {len(_SHAPES)}")
        task = stack(shape.layers, shape.width, shape.samples * machines.workers, shape.outputs)
        profiles = TaskProfiles(task, estimate(task), device=device, seconds=_SECONDS)
        for strategy in strategies:
            try:
                samples += _sample(profiles, strategy, machines)
            except ManyhandsError as error:
                say(f"{strategy} failed: {first_line(error)}")
    return fitted_costs(samples, usual_costs(machines))


def _sample(profiles: TaskProfiles, strategy: Strategy, machines: Machines) -> Iterable[CostSample]:
    """What a step of a strategy took; nothing where the model cannot be trained so, or that is not modelled."""
    task, found = profiles.task, profiles.found
    workers = machines.workers
    count = workers if strategy.most_workers is None else min(workers, strategy.most_workers)
    if refusal(task, strategy, count, found):
        return
    profile = profiles.of(count, sum(strategy.processes(count).values()))
    step = strategy.predict(profile, replace(machines, hosts=1, per_host=count))
    if step is None:
        return
    seen_s = try_steps(task, strategy, count, _SECONDS, step.seconds, profiles.device)
    if seen_s is None:
        return
    traffic = strategy.sends(found.footprint, count) or ()
    yield CostSample(
        kind=cost_class(strategy),
        modelled_s=step.seconds,
        seen_s=seen_s,
        messages=max((one.messages for one in traffic), default=0.0),
        num_bytes=max((one.num_bytes for one in traffic), default=0.0),
    )


def _tried_for(machines: Machines) -> list[Strategy]:
    """One or two strategies of each kind: the first and the last that a plan would consider."""
    by_kind: dict[str, list[Strategy]] = {}
    for entry in STRATEGIES.values():
        kind = entry.load_value()
        for one in kind.choices(machines):
            if not one.facts.counts_rounds:
                by_kind.setdefault(cost_class(one), []).append(one)
    return [one for found in by_kind.values() for one in dict.fromkeys((found[0], found[-1]))]


def try_steps(
    task: Task,
    strategy: Strategy,
    workers: int,
    seconds: float,
    step_s: float | None = None,
    device: str = "cpu",
) -> float | None:
    """The time of a step in a run of about so many seconds; None where it was too short to tell."""
    steps = max(_FEWEST, min(_MOST, round(seconds / step_s))) if step_s else _FEWEST
    plain = replace(task, evaluation=None, metrics={}, scheduler_metric=None)
    plain = replace(plain, scheduler=None) if task.scheduler_metric is not None else plain
    options = Options(progress="none", check_every=0, allow_overload=True, resume_command="")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is only tried: who trains so is told then
        run = fit(plain, strategy, workers=workers, steps=steps, device=device, options=options)
    return seen_step_s(run.history, workers)
