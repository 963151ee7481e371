"""y = a x + b from noisy points: the smallest task there is, two numbers, to see what working together gives.

At the end stands what each worker would have found alone, from the parts of the batches that were its own, beside what
all found together; least squares, in closed form, says what there was to find.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from manyhands.data.plan import BatchPlan
from manyhands.randomness import preserved, seed_all
from manyhands.task import Task
from manyhands.tasks.builtin import BuiltinTask, TaskEnd, TaskTable, about, check_options

__all__ = ["LINE", "LineOptions", "alone", "least_squares", "line", "line_table", "own_parts"]

_NUM_TEST = 256
_POINTS = 0x11E  # whose draws are not those of a run's weights and batches


@dataclass(frozen=True, kw_only=True, slots=True)
class LineOptions:
    """What may be chosen about the line."""

    slope: float = field(default=2.0, metadata=about("a, of y = a x + b"))
    intercept: float = field(default=1.0, metadata=about("b"))
    noise: float = field(default=0.5, metadata=about("standard deviation of what is added to y", at_least=0))
    points: int = field(default=512, metadata=about("to train on", at_least=2))
    batch_size: int = field(default=32, metadata=about("points in a global batch", at_least=1))
    learning_rate: float = field(default=0.1, metadata=about("step size of SGD", above=0))
    data_seed: int = field(default=0, metadata=about("draws the points", at_least=0))

    def __post_init__(self) -> None:
        check_options(self)


def line(options: LineOptions | None = None) -> Task:
    """Find a and b of y = a x + b from points with x from -1 to 1 and noise on y."""
    options = options or LineOptions()
    draw = np.random.default_rng([_POINTS, options.data_seed])
    x = draw.uniform(-1, 1, options.points + _NUM_TEST)
    y = options.slope * x + options.intercept + options.noise * draw.standard_normal(len(x))
    xs, ys = torch.from_numpy(x)[:, None], torch.from_numpy(y)[:, None]
    train, test = slice(None, options.points), slice(options.points, None)
    return Task(
        name="line",
        model=_any_line,
        loss=_squared_error,
        data=(xs[train], ys[train]),
        optimizer=partial(torch.optim.SGD, lr=options.learning_rate),
        batch_size=options.batch_size,
        evaluation=(xs[test], ys[test]),
        metrics={"absolute_error": _absolute_error},
    )


def _any_line() -> nn.Module:
    """In float64; everybody begins with the same one."""
    return nn.Linear(1, 1, dtype=torch.float64)


def _found(model: nn.Module) -> tuple[float, float]:
    named = dict(model.named_parameters())
    return float(named["weight"].detach()), float(named["bias"].detach())


def _squared_error(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    error: Tensor = (model(x) - y).square().mean()
    return error


def _absolute_error(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    error: Tensor = (model(x) - y).abs().mean()
    return error


def line_table(task: Task, end: TaskEnd) -> TaskTable:
    """What each worker would have found alone, what they found together, and what there was to find."""
    assert task.options is not None, "a built-in task has them"
    options = LineOptions(**task.options)
    x, y = (column.numpy()[:, 0] for column in task.data)
    with preserved():
        seed_all(end.seed)
        start = _found(task.model())
    rows = []
    for rank in range(end.workers):
        mine = own_parts(BatchPlan(len(x), task.batch_size, end.seed), end, rank)
        a, b = alone(x, y, mine, options.learning_rate, start)
        rows.append([f"worker {rank}, alone", *_cells(task, a, b), f"{len(np.unique(np.concatenate(mine)))}"])
    rows.append(["together", *_cells(task, *_found(end.model)), f"{len(x)}"])
    rows.append(["least squares", *_cells(task, *least_squares(x, y)), f"{len(x)}"])
    rows.append(["the line itself", *_cells(task, options.slope, options.intercept), ""])
    return TaskTable(
        title="y = a x + b: what each worker found, and what they found together",
        head=("", "a", "b", "error on other points", "points"),
        rows=tuple(tuple(row) for row in rows),
    )


def own_parts(plan: BatchPlan, end: TaskEnd, rank: int) -> list[NDArray[np.int64]]:
    """By step: the points that were this worker's; where batches are not split, every so many-th batch, whole."""
    if end.splits_batches:
        return [plan.share(step, rank, end.workers) for step in range(end.steps)]
    return [plan.indices(step) for step in range(rank, end.steps, end.workers)] or [np.empty(0, np.int64)]


def alone(
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    parts: list[NDArray[np.int64]],
    rate: float,
    start: tuple[float, float],
) -> tuple[float, float]:
    """The line that gradient descent finds from these points, one step for each part, and no word from others."""
    a, b = start
    for part in parts:
        if len(part):
            error = a * x[part] + b - y[part]
            slope, shift = 2 * float(np.mean(error * x[part])), 2 * float(np.mean(error))
            a, b = a - rate * slope, b - rate * shift
    return a, b


def least_squares(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """The line nearest to all points: a = cov(x, y) / var(x), b = mean(y) - a mean(x)."""
    centred = x - x.mean()
    a = float(centred @ y / (centred @ centred))
    return a, float(y.mean() - a * x.mean())


def _cells(task: Task, a: float, b: float) -> list[str]:
    assert task.evaluation is not None, "a line has other points"
    x, y = (column.numpy()[:, 0] for column in task.evaluation)
    return [f"{a:.4f}", f"{b:.4f}", f"{np.mean((a * x + b - y) ** 2):.4f}"]


LINE = BuiltinTask(
    name="line",
    help="y = a x + b from noisy points: what each worker finds alone, and what they find together",
    options_type=LineOptions,
    make=line,
    epochs=8,
    table=line_table,
)
