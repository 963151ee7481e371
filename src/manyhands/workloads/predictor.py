"""The seam between a trained model and its users: inputs from a file or from JSON, answers as JSON.

    for inputs in predictor.blocks("images.npy", ReadAs()): print(*predictor.lines(inputs), sep="\\n")
    predictor.answers(predictor.inputs([[[0, 3, ...], ...]]))    `manyhands serve`, one request

An answer may be computed again by another process, and beside any others. These change it by rounding, which may turn a
byte of a text and so all that follow, and with int8 by the scale of the activations, which is that of the batch.

A module may compute in fewer bits (`data.store.tensorfile` only keeps them):

fp32   as trained
bf16   weights and activations in bfloat16: half the memory traffic, fast where the processor multiplies it
int8   linear and LSTM layers with 8-bit weights and activations quantised as they come (torch's dynamic
       quantisation); all other layers stay in single precision
"""

from __future__ import annotations

import copy
import json
import platform
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from manyhands.data.store.tensorfile import check_precision
from manyhands.data.table_encoding import TableEncoding
from manyhands.errors import UserError, nearest

Inputs = TypeVar("Inputs")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadAs:
    """How `predict` reads its file."""

    format: str = "auto"
    skip_bad: bool = False  # leave out lines that are wrong, and count them
    threads: int = 1


class Predictor(ABC, Generic[Inputs]):
    """A trained model; several inputs make one value of the type `Inputs`, which is computed in one go."""

    takes: ClassVar[str]  # what one input is as JSON, in words: for sentences about inputs that are none
    formats: ClassVar[tuple[str, ...]] = ("auto",)
    """What `--format` may say; the first is to find out."""
    task: str = ""  # the name of its task
    precision: str = "fp32"  # what it computes in from `prepare` on
    device: str = "cpu"  # and where: cpu, cuda or cuda:1
    left_out: int = 0  # lines or rows of the last file that were wrong and skipped
    new_texts: int = 0  # values of the last table that are no category of training, and count as missing

    def __init__(self, model: Any = None) -> None:
        self.model = model

    @abstractmethod
    def blocks(self, source: Any, read_as: ReadAs) -> Iterator[Inputs]:
        """The inputs in a file or a DataFrame, some at a time; a UserError says what is wrong with it."""

    @abstractmethod
    def inputs(self, values: Sequence[Any]) -> Inputs:
        """The same from JSON, one or more; a UserError says which of `values`, from 0, is none, and why."""

    @abstractmethod
    def together(self, parts: Sequence[Inputs]) -> Inputs:
        """The inputs of several requests as one."""

    @abstractmethod
    def answers(self, inputs: Inputs) -> list[Any]:
        """One JSON value for each input."""

    @property
    @abstractmethod
    def example(self) -> Any:
        """An input that is easy to type, as JSON."""

    def lines(self, inputs: Inputs) -> Iterator[str]:
        """What `predict` prints for them, a line each."""
        return (json.dumps(answer, ensure_ascii=False) for answer in self.answers(inputs))

    def prepare(self) -> None:
        """Called once in the process that computes, before its first answer."""

    def warm(self) -> None:
        """Compute one answer, so that the first that is asked for does not wait for what is done once."""
        self.answers(self.inputs([self.example]))

    def check_precision(self, precision: str) -> None:
        if precision != "fp32":
            raise UserError(f"--precision {precision}: a model of {self.task} computes in fp32 only")

    def check_device(self, device: str) -> None:
        if device != "cpu":
            raise UserError(f"--device {device}: a model of {self.task} is asked on the CPU; leave it out")

    def check_format(self, read_as: ReadAs) -> None:
        if read_as.format not in self.formats:
            raise UserError(f"--format {read_as.format!r}: {nearest(read_as.format, self.formats)}")

    def check_read_as(self, read_as: ReadAs) -> None:
        """Refuse what makes no sense for files without rows that may be wrong."""
        self.check_format(read_as)
        if read_as.skip_bad:
            raise UserError("--skip-bad is only for gbdt, logreg and svd; leave it out for this run")


class ModulePredictor(Predictor[Inputs]):
    """One whose model is an `nn.Module`: it can be exported as a program, and compute in fewer bits."""

    model: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.eval())

    def prepare(self) -> None:
        self.model = in_precision(self.model, self.precision)

    def check_precision(self, precision: str) -> None:
        check_precision(precision)

    @abstractmethod
    def example_batch(self, count: int, seed: int = 0) -> tuple[Tensor, ...]:
        """Inputs of the module that somebody might give, `count` of them: what it is called with."""


def encoded_inputs(encoding: TableEncoding | None, values: Sequence[Any]) -> Sequence[Any]:
    """Rows of JSON with texts as the numbers of their categories, where a model has such."""
    if encoding is None:
        return values
    rows = enumerate(values)
    return [encoding.values_of(row, f"input {at}") if isinstance(row, list) else row for at, row in rows]


def table_of(values: Sequence[Any], columns: int, takes: str, missing: bool = False) -> NDArray[np.float64]:
    """Each value as one row of `columns` numbers; a UserError says which of them, from 0, is none.

    With `missing`, null and what is not finite may stand for a number; null becomes NaN. `takes` says what a row is.
    """
    table, wanted = np.empty((len(values), columns)), f"it must be {takes}, {columns} in all"
    for number, value in enumerate(values):
        if not isinstance(value, list):
            raise UserError(f"input {number} is not an array; {wanted}")
        if len(value) != columns:
            raise UserError(f"input {number} has {len(value)} numbers; {wanted}")
        for place, one in enumerate(value):
            # bool is an int to Python, and text that looks like a number is one to numpy
            if type(one) not in (int, float) and not (missing and one is None):
                raise UserError(f"input {number} has {str(one)[:40]!r} at position {place}; {wanted}")
        try:
            table[number] = np.array(value, np.float64)
        except OverflowError:
            raise UserError(f"input {number} has a number beyond double precision; {wanted}") from None
        if not missing and not np.isfinite(table[number]).all():
            raise UserError(f"input {number} has a number that is not finite; {wanted}")
    return table


def in_precision(model: nn.Module, precision: str) -> nn.Module:
    """A copy of `model` that computes so; the module itself for fp32. Called in the process that computes."""
    check_precision(precision)
    if precision == "fp32":
        return model
    warnings.filterwarnings("ignore", message=r"(?s).*mkldnn_matmul")  # it says which kernel it takes instead
    if precision == "bf16":
        return copy.deepcopy(model).to(torch.bfloat16)
    torch.backends.quantized.engine = "qnnpack" if platform.machine() in ("aarch64", "arm64") else "x86"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it will move to another package
        made: nn.Module = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
            copy.deepcopy(model), {nn.Linear, nn.LSTM}, dtype=torch.qint8
        )
    return made
