"""What the server benchmark exchanges: a gradient goes to a server, its optimizer steps, parameters come back.

Each is a value that travels as JSON: the task that our own server is given, what a user would write to hold the
parameters (`PushPull`), and what must come back after any number of steps, computed by numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from manyhands.errors import UserError
from manyhands.task import Task

ITEM_BYTES = np.dtype(np.float32).itemsize
PARAMETER = "parameter"
_PARTS = 1024  # of 1: with rates and gradients of whole such parts, float32 adds exactly

Array = NDArray[np.float32]

PushPull = Callable[..., Tensor]
"""In a server of the user's own, which holds the parameters: apply what came, and give what goes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """All parameters, by plain SGD; the result is known to the bit."""

    rate: ClassVar[float] = 1 / _PARTS
    about: ClassVar[str] = "SGD"
    period: ClassVar[int] = 1

    name: str
    num_bytes: int

    def __post_init__(self) -> None:
        if self.num_bytes < ITEM_BYTES or self.num_bytes % ITEM_BYTES:
            raise UserError(
                f"{self.name}: {self.num_bytes} is not a multiple of {ITEM_BYTES}, the bytes of a float32"
            )

    @property
    def gradient_bytes(self) -> int:
        return self.num_bytes

    def pushed(self, step: int) -> tuple[NDArray[Any], ...]:
        del step
        return (self._pattern(12, 1),)

    def expected(self, steps: int) -> Array:
        return self._pattern(13, 0) - np.float32(steps / _PARTS) * self._pattern(12, 1)

    def agrees(self, pulled: Array, steps: int) -> bool:
        return np.array_equal(pulled, self.expected(steps))

    def task(self) -> Task:
        return _task(lambda: torch.from_numpy(self.expected(0)), partial(torch.optim.SGD, lr=self.rate))

    def in_place(self) -> PushPull:
        values = torch.from_numpy(self.expected(0))
        return lambda gradient: values.sub_(gradient, alpha=self.rate)

    def _pattern(self, period: int, least: int) -> Array:
        return np.resize(np.arange(least, least + period, dtype=np.float32), self.num_bytes // ITEM_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """Some rows of a large table, by AdaGrad: in turn one of a few sets of rows, as epochs bring them again."""

    rate: ClassVar[float] = 1 / 16
    epsilon: ClassVar[float] = 1e-10

    name: str
    table_rows: int
    width: int
    rows: int
    sets: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.rows <= self.table_rows or self.width < 1 or self.sets < 1:
            raise UserError(
                f"{self.name}: {self.sets} sets of {self.rows} rows of {self.width} are not of a table of "
                f"{self.table_rows} rows"
            )

    @property
    def gradient_bytes(self) -> int:
        return self.rows * self.width * ITEM_BYTES

    @property
    def about(self) -> str:
        return f"{self.rows:,} rows × {self.width} of {self.table_rows:,}, AdaGrad"

    @property
    def period(self) -> int:
        return self.sets

    def row_set(self, step: int) -> NDArray[np.int64]:
        draw = np.random.default_rng(step % self.sets)
        return np.sort(draw.choice(self.table_rows, self.rows, replace=False))

    def pushed(self, step: int) -> tuple[NDArray[Any], ...]:
        rows = self.row_set(step)
        return rows, self._gradient(rows)

    def expected(self, steps: int) -> Array:
        sums = np.zeros((self.table_rows, 1), dtype=np.float32)
        moved = np.zeros((self.table_rows, 1), dtype=np.float32)
        row_sets = [self.row_set(step) for step in range(self.sets)]
        last = row_sets[steps % self.sets]
        for step in range(1, steps + 1):  # a row has one gradient, in all its items and always
            rows = row_sets[step % self.sets]
            gradient = self._gradient(rows)[:, :1]
            sums[rows] += gradient**2
            moved[rows] -= np.float32(self.rate) * gradient / (np.sqrt(sums[rows]) + np.float32(self.epsilon))
        return np.broadcast_to(moved[last], (self.rows, self.width))

    def agrees(self, pulled: Array, steps: int) -> bool:
        return np.allclose(pulled, self.expected(steps), rtol=1e-4, atol=1e-6)

    def task(self) -> Task:
        optimizer = partial(torch.optim.Adagrad, lr=self.rate, eps=self.epsilon)
        return _task(
            lambda: torch.zeros(self.table_rows, self.width), optimizer, {PARAMETER: lambda rows: rows}
        )

    def in_place(self) -> PushPull:
        all_values, all_sums = (torch.zeros(self.table_rows, self.width) for _ in range(2))

        def push_pull(rows: Tensor, gradient: Tensor) -> Tensor:
            values, sums = all_values[rows], all_sums[rows]
            sums.addcmul_(gradient, gradient)
            values.addcdiv_(gradient, sums.sqrt().add_(self.epsilon), value=-self.rate)
            all_values[rows], all_sums[rows] = values, sums
            return values

        return push_pull

    def _gradient(self, rows: NDArray[np.int64]) -> Array:
        return np.repeat((rows % 7 + 1).astype(np.float32)[:, None], self.width, axis=1)


TimedExchange = Flat | RowWork
"""Something to push and to pull, again and again; steps count from 1.

`pushed` is what a worker sends in a step: the gradient, after the rows that it is of where it is not of all; the same
again after `period` steps. `expected` comes back from the last of so many steps. `task` is for our own server: a model
of nothing but the parameters; `in_place` is written for speed, without an optimizer.
"""


def by_module(exchange: TimedExchange) -> PushPull:
    """As the parameter server of Ray's documentation: a module and its optimizer, the gradients added up."""
    task = exchange.task()
    model = task.model()
    weight, optimizer = model.get_parameter(PARAMETER), task.optimizer(model.parameters())

    def push_pull(*pushed: Tensor) -> Tensor:
        *rows, gradient = pushed
        optimizer.zero_grad()
        if rows:
            weight.grad = torch.sparse_coo_tensor(
                rows[0][None], gradient, weight.shape, check_invariants=False
            )
        else:
            weight.grad = torch.from_numpy(np.stack([gradient.numpy()]).sum(axis=0))
        optimizer.step()
        weights = weight.detach()
        return weights[rows[0]] if rows else weights

    return push_pull


def _task(values: Callable[[], Tensor], optimizer: Any, sparse: Any = None) -> Task:
    """A task whose gradients are made by the benchmark: its loss is never computed."""
    return Task(
        name="server-benchmark",
        model=lambda: nn.ParameterDict({PARAMETER: nn.Parameter(values())}),
        loss=lambda model, _: model.get_parameter(PARAMETER).sum(),
        data=torch.zeros(1),
        optimizer=optimizer,
        batch_size=1,
        sparse=sparse or {},
    )
