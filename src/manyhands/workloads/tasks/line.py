"""y = a x + b from noisy points: the smallest task there is, two numbers, to see what working together gives.

At the end stands the line that each worker finds in its own share of the points, dealt once, so that no two workers
have a point in common; the mean of these lines; the line of all points; and the line that the run has trained. All but
the last are by least squares, in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from manyhands.data.batches import split
from manyhands.task import Task
from manyhands.workloads.builtin_task import BuiltinTask, TaskCurve, TaskEnd, TaskTable
from manyhands.workloads.task_options import CheckedOptions, option

_NUM_TEST = 256
_ALL = "all points at once"
_POINTS = 0x11E  # whose draws are not those of a run's weights and batches


@dataclass(frozen=True, kw_only=True, slots=True)
class LineOptions(CheckedOptions):
    """What may be chosen about the line."""

    slope: float = option(2.0, "slope a of y = a x + b")
    intercept: float = option(1.0, "intercept b of y = a x + b")
    noise: float = option(0.5, "standard deviation of the noise in y", at_least=0)
    points: int = option(512, "points to train on", at_least=2)
    batch_size: int = option(32, "points in a global batch", at_least=1)
    learning_rate: float = option(0.1, "learning rate of SGD", above=0)
    data_seed: int = option(0, "fixes the random points", at_least=0)


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
        model=partial(nn.Linear, 1, 1, dtype=torch.float64),  # everybody begins with the same one
        loss=_squared_error,
        data=(xs[train], ys[train]),
        optimizer=partial(torch.optim.SGD, lr=options.learning_rate),
        batch_size=options.batch_size,
        evaluation=(xs[test], ys[test]),
        metrics={"absolute_error": _absolute_error},
    )


def _squared_error(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _absolute_error(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.l1_loss(model(batch[0]), batch[1])


def line_table(task: Task, end: TaskEnd) -> TaskTable:
    """Each worker's line from its own share of the points, their mean, and the line of all points, as the run's."""
    assert task.options is not None, "a built-in task has them"
    options = LineOptions(**task.options)
    x, y = (column.numpy()[:, 0] for column in task.data)
    shares = [split(len(x), rank, end.workers) for rank in range(end.workers)]
    named = {f"worker {rank}, alone": mine for rank, mine in enumerate(shares) if len(mine) > 1}
    alone = {name: least_squares(x[mine], y[mine]) for name, mine in named.items()}
    parameters = dict(end.model.named_parameters())
    trained = float(parameters["weight"].detach()), float(parameters["bias"].detach())
    together = {_ALL: least_squares(x, y), "trained together": trained}
    if alone:  # a line takes two points
        a, b = np.average(list(alone.values()), axis=0, weights=[len(mine) for mine in named.values()])
        together = {"mean of these lines": (float(a), float(b)), **together}
    found = alone | together
    rows = [[name, *_cells(task, *one), f"{len(named.get(name, x))}"] for name, one in found.items()]
    rows.append(["the line itself", *_cells(task, options.slope, options.intercept), ""])
    ends = float(x.min()), float(x.max())
    curves = [
        TaskCurve(
            name=name,
            xs=ends,
            ys=tuple(a * end + b for end in ends),
            dots=tuple((float(x[at]), float(y[at])) for at in named.get(name, ())),
        )
        for name, (a, b) in found.items()
    ]
    return TaskTable(
        title="y = a x + b: lines found by each worker in its own points and by all together",
        head=("", "a", "b", "error on other points", "points"),
        rows=tuple(tuple(row) for row in rows),
        curves=tuple(curves),
        against=_ALL,
    )


def least_squares(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """The line nearest to these points: a = cov(x, y) / var(x), b = mean(y) - a mean(x)."""
    centred = x - x.mean()
    a = float(centred @ y / (centred @ centred))
    return a, float(y.mean() - a * x.mean())


def _cells(task: Task, a: float, b: float) -> list[str]:
    assert task.evaluation is not None, "a line has other points"
    x, y = (column.numpy()[:, 0] for column in task.evaluation)
    return [f"{a:.4f}", f"{b:.4f}", f"{np.mean((a * x + b - y) ** 2):.4f}"]


LINE = BuiltinTask(
    name="line",
    help="y = a x + b from noisy points: lines found by each worker alone and by all together",
    options_type=LineOptions,
    make=line,
    epochs=8,
    table=line_table,
)
