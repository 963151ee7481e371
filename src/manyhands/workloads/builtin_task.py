"""What a built-in task is: a function from typed options to a Task, and what a command line shows of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from manyhands.errors import UserError
from manyhands.task import Task
from manyhands.workloads.task_options import Option, chosen, options_of

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEnd:
    """How a run of a task ended, for what the task itself has to say of it."""

    model: nn.Module
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskCurve:
    """One named curve of a task's picture, and the points that belong to it."""

    name: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    dots: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskTable:
    """What a task shows at the end of a run besides, in words and numbers that are ready to print."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    curves: tuple[TaskCurve, ...] = ()  # what is drawn of it, where something is: y over x, at the same xs
    against: str = ""  # the name of the curve whose distance from the others is drawn as well


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltinTask(Generic[Options]):
    """A named task: how it is made from its options, and how long it is usually trained."""

    name: str
    help: str
    options_type: type[Options]
    make: Callable[[Options], Task]
    epochs: int | None = None  # the usual training length; a task has this or `steps`
    steps: int | None = None  # the same in global batches
    table: Callable[[Task, TaskEnd], TaskTable] | None = None  # what a run of it shows at its end besides
    model: Callable[[Options], nn.Module] | None = None
    """The model alone, for those that use a trained one where the data may be gone; None: only `make` can build it."""

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            has = f"epochs={self.epochs} and steps={self.steps}"
            raise ValueError(f"task {self.name!r} has {has}; exactly one must be given")

    @property
    def options(self) -> tuple[Option, ...]:
        return options_of(self.options_type)

    def build(self, /, **options: Any) -> Task:
        """The Task with these options; an unknown one, or a required one left out, is a UserError."""
        made_of = chosen(self.name, self.options_type, options)
        recorded = {option.name: getattr(made_of, option.name) for option in self.options}
        for name, value in recorded.items():
            if isinstance(value, Path):  # it means the same from everywhere
                recorded[name] = str(value.absolute())
        return dataclasses.replace(self.make(made_of), options=recorded)

    def without_data(self, /, **options: Any) -> Task:
        """The same with one number in the place of its data: enough for a trained model, where the data may be gone."""
        if self.model is None:
            return self.build(**options)
        model = functools.partial(self.model, chosen(self.name, self.options_type, options))
        data = torch.zeros(1)
        return Task(name=self.name, model=model, loss=_cannot_train, data=data, optimizer=torch.optim.AdamW)


def _cannot_train(_model: nn.Module, _batch: Any) -> Tensor:
    raise UserError("this task has no data; it can only load a trained model")
