"""The predictor of a user's own Task: inputs and answers by its `read_input` and `write_answer`, or as nested arrays.

What the model takes is known from `example_input`, or from the first sample of the data: the task's loss is called
with the model, and left at the moment when it calls that.

Inputs of one shape are computed together; those of another are a batch of their own, so none is padded or mixed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from manyhands.data.batches import BatchSource
from manyhands.data.file_reader import read_values
from manyhands.data.randomness import preserved
from manyhands.errors import DataError, ManyhandsError, UserError, first_line
from manyhands.task import Task
from manyhands.workloads.predictor import ModulePredictor, ReadAs

ModelInput: TypeAlias = dict[int | str, Tensor]
"""What a model is called with, by place or name: for one input without the dimension of the batch."""


@dataclass(frozen=True, slots=True)
class OwnInput:
    """One input as read, and its number in its file or request, from 0."""

    number: int
    tensors: ModelInput


_AT_ONCE = 1024
_MOST_TYPED = 1024  # numbers of an example that is shown
_MOST_SHOWN = 120  # letters of somebody else's error
_JITTER = 0.1
_FITS = {
    "iuf": (int, float),
    "iu": (int,),
    "b": (bool,),
}  # what Python calls the kinds that a tensor can hold
_READ = {"f": np.float64, "i": np.int64, "u": np.uint64, "b": np.bool_}  # by the kind of an array's numbers


class OwnPredictor(ModulePredictor[list[OwnInput]]):
    """Asks `model`, which belongs to `task`; UserError where nothing tells what the model takes."""

    formats: ClassVar[tuple[str, ...]] = ("auto", "json", "npy")
    takes: str  # type: ignore[misc] # each task says its own

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__(model)
        self.task = task.name
        self._skips_bad = False
        self._read, self._write = task.read_input, task.write_answer or as_json
        self._example, self._first = task.example_input, ModelInput()
        said = (self._read.__doc__ if isinstance(self._read, FunctionType) else None) or ""
        line = said.strip().partition("\n")[0].rstrip(".")
        self.takes = "what its task reads" + (f" ({line})" if line else "")
        if self._read is None or self._example is None:
            self._first = _first_input(model, task)
        if self._read is None:
            if len(self._first) > 1:
                raise UserError(
                    f"task {task.name!r}: its model takes {len(self._first)} tensors; give the task read_input, a "
                    "function (JSON value) -> tuple or dict of them"
                )
            [first] = self._first.values()
            self.takes = f"an array of shape {_sizes(first)}" if first.ndim else f"a number ({_dtype(first)})"
            if self._example is None and first.numel() <= _MOST_TYPED:  # the sample itself is the user's data
                self._example = as_json(torch.zeros_like(first))
        if task.example_input is not None:
            try:
                json.dumps(task.example_input, allow_nan=False)
                self._first = self._row(0, task.example_input).tensors
            except UserError as error:
                raise UserError(f"task {task.name!r}: its example_input: {error}") from error
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"task {task.name!r}: its example_input is not JSON ({first_line(error)}); give numbers, texts, "
                    "lists or dicts of them"
                ) from error

    @property
    def example(self) -> Any:
        return self._example

    def warm(self) -> None:
        self.answers([OwnInput(0, self._first)])

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[list[OwnInput]]:
        self.check_format(read_as)
        self.left_out, self._skips_bad = 0, read_as.skip_bad
        values = read_values(source, read_as.format)
        for begin in range(0, len(values), _AT_ONCE):
            rows = []
            for number in range(begin, min(begin + _AT_ONCE, len(values))):
                try:
                    rows.append(self._row(number, values[number]))
                except UserError as error:
                    if not read_as.skip_bad:
                        raise DataError(f"{source}: {error}") from error
                    self.left_out += 1
            yield rows

    def inputs(self, values: Sequence[Any]) -> list[OwnInput]:
        return [self._row(number, value) for number, value in enumerate(values)]

    def together(self, parts: Sequence[list[OwnInput]]) -> list[OwnInput]:
        return [row for part in parts for row in part]

    def answers(self, inputs: list[OwnInput]) -> list[Any]:
        return list(self._in_order(inputs, skips_bad=False))

    def lines(self, inputs: list[OwnInput]) -> Iterator[str]:
        """Inputs whose shape the model cannot take are left out and counted, where that was asked for."""
        found = self._in_order(inputs, skips_bad=self._skips_bad)
        return (json.dumps(answer, ensure_ascii=False) for answer in found)

    def _in_order(self, inputs: Sequence[OwnInput], *, skips_bad: bool) -> Iterator[Any]:
        alike: dict[tuple[Any, ...], list[int]] = {}
        for place, row in enumerate(inputs):
            alike.setdefault(tuple((key, one.shape) for key, one in row.tensors.items()), []).append(place)
        found: dict[int, Any] = {}
        for places in alike.values():
            found |= self._of_one_shape({place: inputs[place] for place in places}, skips_bad=skips_bad)
        return (found[place] for place in sorted(found))

    def _of_one_shape(self, rows: Mapping[int, OwnInput], *, skips_bad: bool) -> dict[int, Any]:
        """The answers to inputs of one shape; where the model fails, each is computed alone to find which is wrong."""
        try:
            output = self._computed(list(rows.values()))
        except ManyhandsError as error:
            if len(rows) > 1:
                alone = [self._of_one_shape({place: rows[place]}, skips_bad=skips_bad) for place in rows]
                return {place: answer for one in alone for place, answer in one.items()}
            if not skips_bad or not isinstance(error, UserError):
                raise
            self.left_out += 1
            return {}
        found = {}
        for at, (place, row) in enumerate(rows.items()):
            one = _row_of(output, at, len(rows))
            try:
                found[place] = self._write(one)
            except Exception as error:
                raise ManyhandsError(f"write_answer failed for input {row.number} ({_why(error)})") from error
        return found

    def example_batch(self, count: int, seed: int = 0) -> tuple[Tensor, ...]:
        """The first input, repeated with some noise."""
        named = [key for key in self._first if isinstance(key, str)]
        if named:
            raise UserError(
                f"task {self.task!r}: its model takes {named[0]!r} by name; a program takes tensors by place"
            )
        drawn = torch.Generator().manual_seed(seed)
        return tuple(
            one + _JITTER * torch.randn(one.shape, generator=drawn, dtype=one.dtype)
            if one.is_floating_point()
            else one
            for one in (torch.stack([first] * count) for first in self._first.values())
        )

    def _computed(self, rows: Sequence[OwnInput]) -> Any:
        batch = {key: torch.stack([row.tensors[key] for row in rows]) for key in rows[0].tensors}
        kept = next(self.model.parameters(), torch.empty(0)).dtype
        if kept == torch.bfloat16:  # by `precision`
            batch = {key: one.to(kept) if one.is_floating_point() else one for key, one in batch.items()}
        places = [one for key, one in batch.items() if isinstance(key, int)]
        names = {key: one for key, one in batch.items() if isinstance(key, str)}
        try:
            with torch.inference_mode():
                return self.model(*places, **names)
        except Exception as error:
            number, given = rows[0].number, list(rows[0].tensors.values())
            usual = [one for key, one in self._first.items() if key in batch]
            if [one.shape for one in given] == [one.shape for one in usual]:
                raise ManyhandsError(f"the model failed on input {number} ({_why(error)})") from error
            raise UserError(
                f"input {number} has shape {_sizes(*given)}, which the model cannot take ({_why(error)}); a shape that "
                f"it takes is {_sizes(*usual)}"
            ) from error

    def _row(self, number: int, value: Any) -> OwnInput:
        if self._read is None:
            [(key, first)] = self._first.items()
            return OwnInput(number, {key: self._tensor(number, value, first)})
        try:
            given = self._read(value.tolist() if isinstance(value, np.ndarray | np.generic) else value)
        except Exception as error:
            raise UserError(
                f"input {number} cannot be read ({_why(error)}); it must be {self.takes}"
            ) from error
        row = _by_place(given)
        for key, one in row.items():
            first = self._first.get(key, one)
            if one.ndim != first.ndim or one.is_floating_point() != first.is_floating_point():
                raise UserError(
                    f"input {number} has shape {_sizes(one)}; a shape that the model takes is {_sizes(first)}"
                )
            row[key] = one.to(first.dtype)
        return OwnInput(number, row)

    def _tensor(self, number: int, value: Any, first: Tensor) -> Tensor:
        """An array of numbers as the tensor of one input; numpy reads it, because torch would cut off and overflow."""
        wanted = f"it must be {self.takes}"
        try:
            array = np.asarray(value)
        except ValueError:
            raise UserError(f"input {number} has rows of different lengths; {wanted}") from None
        kinds = "iuf" if first.is_floating_point() else "b" if first.dtype == torch.bool else "iu"
        if array.size and array.dtype.kind not in kinds:
            items = np.asarray(value, object).flat
            at = _place_of(np.array([type(one) not in _FITS[kinds] for one in items]), array)
            raise UserError(f"input {number} has a value that does not fit{at}; {wanted}")
        if array.shape != tuple(first.shape):
            raise UserError(f"input {number} has shape {_sizes(array)}; {wanted}")
        tensor = torch.from_numpy(array.astype(_READ[array.dtype.kind])).to(first.dtype)
        exact = tensor.isfinite().numpy() if first.is_floating_point() else tensor.numpy() == array
        if not exact.all():
            at = _place_of(~exact, array)
            raise UserError(f"input {number} has a number that is not finite or too large{at}; {wanted}")
        return tensor


def as_json(value: Any) -> Any:
    """Tensors as numbers in nested arrays; tuples and dicts of them, too."""
    if isinstance(value, Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).tolist()
    if isinstance(value, Mapping):
        return {key: as_json(one) for key, one in value.items()}
    return [as_json(one) for one in value] if isinstance(value, tuple | list) else value


def inputs_of_loss(model: nn.Module, task: Task, batch: Any) -> ModelInput:
    """What the task's loss calls the model with for this batch; UserError unless these are tensors."""

    def leave(_model: nn.Module, places: tuple[Any, ...], names: dict[str, Any]) -> None:
        raise _Called({**dict(enumerate(places)), **names})

    hook = model.register_forward_pre_hook(leave, with_kwargs=True)
    try:
        with torch.no_grad(), preserved():
            task.loss(model, batch)
    except _Called as called:
        given = called.given
    else:
        raise UserError(
            f"task {task.name!r}: its loss does not call the model; give the task read_input and example_input"
        )
    finally:
        hook.remove()
    for key, one in given.items():
        if not isinstance(one, Tensor):
            raise UserError(
                f"task {task.name!r}: its loss gives the model a {type(one).__name__} ({key!r}); give the task "
                "read_input and example_input"
            )
    return given


class _Called(BaseException):
    """Ends the call of a loss; a BaseException, so that no `except Exception` in user code stops it."""

    def __init__(self, given: dict[Any, Any]) -> None:
        self.given = given


def _first_input(model: nn.Module, task: Task) -> ModelInput:
    if task.streams:
        raise UserError(
            f"task {task.name!r}: its data can only be iterated, so what its model takes is not known; give the task "
            "read_input and example_input"
        )
    source = BatchSource(task.data, task.collate)
    count = min(2, len(source))
    given = inputs_of_loss(model, task, source.fetch(range(count)))
    for one in given.values():
        if not one.ndim or len(one) != count:
            raise UserError(
                f"task {task.name!r}: its loss gives the model a tensor of shape {_sizes(one)} for "
                f"{count} samples, but its first dimension must be the batch"
            )
    return {key: one[0].detach().clone() for key, one in given.items()}


def _by_place(given: Any) -> ModelInput:
    if isinstance(given, Tensor):
        return {0: given}
    row = (
        dict(given)
        if isinstance(given, Mapping)
        else dict(enumerate(given))
        if isinstance(given, tuple)
        else {}
    )
    if not row or not all(isinstance(one, Tensor) for one in row.values()):
        raise ManyhandsError(
            f"read_input gave a {type(given).__name__}; it must give a tensor, or a tuple or dict of them"
        )
    return row


def _row_of(output: Any, place: int, count: int) -> Any:
    if isinstance(output, Tensor):
        if not output.ndim or len(output) != count:
            raise ManyhandsError(
                f"the model gave a tensor of shape {_sizes(output)} for {count} inputs; its first dimension must "
                "be the batch"
            )
        row = output[place]
        return row.float() if row.dtype == torch.bfloat16 else row
    if isinstance(output, Mapping):
        kept = (Tensor, Mapping, tuple, list)  # a cache, say, is no answer
        return {key: _row_of(one, place, count) for key, one in output.items() if isinstance(one, kept)}
    if isinstance(output, tuple | list):
        return tuple(_row_of(one, place, count) for one in output)
    raise ManyhandsError(f"the model gave a {type(output).__name__}; it must give tensors")


def _sizes(*arrays: Tensor | NDArray[Any]) -> str:
    return ", ".join(f"{'×'.join(map(str, one.shape)) or '()'} ({_dtype(one)})" for one in arrays)


def _place_of(wrong: NDArray[np.bool_], array: NDArray[Any]) -> str:
    """Where in `array` the first of its items is that are `wrong`, as in ` at [2][0]`; nothing where there is none."""
    first = int(np.argmax(wrong))
    if not array.ndim or not wrong.flat[first]:
        return ""
    return " at " + "".join(f"[{one}]" for one in np.unravel_index(first, array.shape))


def _dtype(array: Tensor | NDArray[Any]) -> str:
    return str(array.dtype).removeprefix("torch.")


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:_MOST_SHOWN]
