"""What a built-in task is: a function from typed options to a Task, and what a command line shows of it.

Options are a frozen dataclass per task. A field's type, default and help text, together in its definition,
give Python's keyword options, the checks and the command line's `--options`: nothing is said twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from manyhands.errors import UserError, nearest, printable
from manyhands.task import Task

__all__ = ["BuiltinTask", "Option", "TaskCurve", "TaskEnd", "TaskTable", "about", "check_options"]

Options = TypeVar("Options")
_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Path: "a path"}


def about(
    help_text: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> dict[str, Any]:
    """The metadata of an options field: what it is for, and the bounds of a number."""
    return {"help": help_text, "at_least": at_least, "above": above, "at_most": at_most}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of a task, as a command line would offer it."""

    name: str
    kind: type
    """int, float, bool, str or Path."""
    default: Any
    """None where the option may be left out and has no value then, and where it is required."""
    required: bool
    help: str
    at_least: float | None
    above: float | None
    at_most: float | None = None

    def parse(self, text: str) -> Any:
        """The value that `text` stands for; UserError where it stands for none."""
        try:
            value = _SWITCH[text.lower()] if self.kind is bool else self.kind(text)
        except (ValueError, KeyError) as error:
            raise UserError(f"{self.name} is {text!r}; it must be {self.allowed}") from error
        return self.check(value)

    def check(self, value: Any) -> Any:
        """`value` as this option holds it; UserError names the option, the value and what is allowed."""
        if value is None and not self.required and self.default is None:
            return value
        if self.kind is Path and isinstance(value, str):
            value = Path(value)
        if self.kind is float and type(value) is int and abs(value) <= sys.float_info.max:
            value = float(value)
        fits = isinstance(value, self.kind) and (self.kind is bool or not isinstance(value, bool))
        if fits and self.kind in (int, float):
            fits = (
                (isinstance(value, int) or math.isfinite(value))
                and (self.at_least is None or value >= self.at_least)
                and (self.above is None or value > self.above)
                and (self.at_most is None or value <= self.at_most)
            )
        if fits and self.kind is Path:
            fits = _is_path(value)
        if not fits:
            raise UserError(f"{self.name} is {printable(repr(value))}; it must be {self.allowed}")
        return value

    @property
    def allowed(self) -> str:
        """What a value may be, in words."""
        words = _KINDS[self.kind]
        if self.at_least is not None:
            words += f" of at least {self.at_least:g}"
        if self.above is not None:
            words += f" above {self.above:g}"
        if self.at_most is not None:
            words += f" and at most {self.at_most:g}"
        return words


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
    curves: tuple[TaskCurve, ...] = ()
    """What is drawn of it, where something is: y over x, at the same xs."""

    against: str = ""
    """The name of the curve whose distance from the others is drawn as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltinTask(Generic[Options]):
    """A named task: how it is made from its options, and how long it is usually trained."""

    name: str
    help: str
    options_type: type[Options]
    make: Callable[[Options], Task]
    epochs: int | None = None
    """The usual training length in epochs; a task has this or `steps`."""
    steps: int | None = None
    """The usual training length in global batches."""
    table: Callable[[Task, TaskEnd], TaskTable] | None = None
    """What a run of it shows at its end besides."""
    model: Callable[[Options], nn.Module] | None = None
    """The model alone, for those that use a trained one where the data may be gone; None: only `make` can build it."""

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"task {self.name!r} has epochs={self.epochs} and steps={self.steps}; it must have one"
            )

    @property
    def options(self) -> tuple[Option, ...]:
        """Its options, in order."""
        return _options_of(self.options_type)

    def build(self, /, **options: Any) -> Task:
        """The Task with these options; an unknown one, or a required one left out, is a UserError."""
        chosen = self._chosen(options)
        recorded = {option.name: _recorded(getattr(chosen, option.name)) for option in self.options}
        return dataclasses.replace(self.make(chosen), options=recorded)

    def without_data(self, /, **options: Any) -> Task:
        """The same with one number in the place of its data: enough for a trained model, where the data may be gone."""
        if self.model is None:
            return self.build(**options)
        chosen = self._chosen(options)
        return Task(
            name=self.name,
            model=functools.partial(self.model, chosen),
            loss=_cannot_train,
            data=torch.zeros(1),
            optimizer=torch.optim.AdamW,
        )

    def _chosen(self, options: dict[str, Any]) -> Options:
        names = [option.name for option in self.options]
        for name in options:
            if name not in names:
                raise UserError(f"task {self.name!r} has no option {name!r}; {nearest(name, names)}")
        for option in self.options:
            if option.required and option.name not in options:
                raise UserError(f"task {self.name!r} needs {option.name}: {option.help}")
        return self.options_type(**options)


def _cannot_train(_model: nn.Module, _batch: Any) -> Tensor:
    raise UserError("this task has no data: it is only good for the model that was trained before")


def _is_path(value: Path) -> bool:
    """Whether a file can be called this at all."""
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _recorded(value: Any) -> Any:
    """An option as a run's configuration keeps it: a path means the same from everywhere."""
    return str(value.absolute()) if isinstance(value, Path) else value


def check_options(options: Any) -> None:
    """Check every field of an options dataclass and bring it to its type; called from `__post_init__`."""
    for option in _options_of(type(options)):
        value = option.check(getattr(options, option.name))
        object.__setattr__(options, option.name, value)  # the fields are frozen once this has run


def _options_of(options_type: type) -> tuple[Option, ...]:
    hints = typing.get_type_hints(options_type)
    found = []
    for field in dataclasses.fields(options_type):
        required = field.default is dataclasses.MISSING
        found.append(
            Option(
                name=field.name,
                kind=_without_none(hints[field.name]),
                default=None if required else field.default,
                required=required,
                **field.metadata,
            )
        )
    return tuple(found)


def _without_none(hint: Any) -> type:
    """`Path | None` as `Path`."""
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    if len(kinds) != 1 or kinds[0] not in _KINDS:
        raise TypeError(
            f"an option cannot be of type {hint!r}; allowed: {', '.join(kind.__name__ for kind in _KINDS)}"
        )
    return typing.cast(type, kinds[0])
