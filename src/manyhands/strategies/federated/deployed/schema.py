"""What a device's data must look like, which the server says and the device compares before it trains.

    images=uint8:1x8x8,labels=int64       two columns: a name, a type, and the shape of one sample (none: a number)

The names are those of the tensors in a device's safetensors file, whose first dimension counts its samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.data.batches import BatchSource
from manyhands.data.store.tensorfile import read_tensors
from manyhands.errors import DataError, UserError
from manyhands.native.dtypes import NAMED
from manyhands.task import Task

__all__ = ["DataColumn", "DataSchema", "read_columns"]


@dataclass(frozen=True, slots=True)
class DataColumn:
    """One tensor of a sample."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{self.name}={self.dtype}" + (f":{sizes}" if sizes else "")


@dataclass(frozen=True, slots=True)
class DataSchema:
    """The columns of a sample, in the order in which the task's loss takes them."""

    columns: tuple[DataColumn, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.columns))

    @classmethod
    def parse(cls, text: str) -> DataSchema:
        """Read the text form; UserError says which column is wrong."""
        columns = tuple(_column(part.strip()) for part in text.split(","))
        if len({column.name for column in columns}) < len(columns):
            raise UserError(f"--data-schema {text}: two columns have one name")
        return cls(columns)

    @classmethod
    def of(cls, task: Task) -> DataSchema:
        """That of the task's own data, from its first sample."""
        batch = BatchSource(task.data, task.collate).fetch([0])
        named: Mapping[Any, Any] = batch if isinstance(batch, Mapping) else dict(enumerate(_parts(batch)))
        columns = []
        for name, one in named.items():
            if not isinstance(one, Tensor) or one.ndim == 0:
                raise UserError(
                    f"task {task.name!r}: column {name!r} of its batches is no tensor with a row for each sample, "
                    "and devices hold tensors; give the task another collate"
                )
            dtype = str(one.dtype).removeprefix("torch.")
            columns.append(DataColumn(str(name), dtype, tuple(one.shape[1:])))
        return cls(tuple(columns))

    def require_like(self, other: DataSchema, whose: str) -> None:
        """UserError where types or shapes differ; names may."""
        if len(self.columns) != len(other.columns):
            raise UserError(f"{whose} has {len(other.columns)} columns, and {self} is wanted")
        for mine, theirs in zip(self.columns, other.columns, strict=True):
            if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
                raise UserError(f"{whose}: a column is {theirs}, and {mine} is wanted")


def read_columns(path: Path, schema: DataSchema, task: Task) -> Task:
    """The task over the tensors of a device's file; DataError says how they differ from the schema."""
    try:
        found = read_tensors(path)
    except ValueError as error:
        raise DataError(f"--data {path} {error}") from error
    names = [column.name for column in schema.columns]
    for name in names:
        if name not in found:
            raise DataError(f"--data {path}: has no tensor {name!r}; wanted: {schema}")
    lengths = {len(found[name]) if found[name].ndim else 0 for name in names}
    if len(lengths) > 1 or lengths == {0}:
        raise DataError(
            f"--data {path}: its tensors have {sorted(lengths)} rows; as many each, and some, are wanted"
        )
    columns = {name: found[name] for name in names}
    for column, tensor in zip(schema.columns, columns.values(), strict=True):
        mine = DataColumn(column.name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))
        if mine != column:
            raise DataError(f"--data {path}: has {mine}, and {column} is wanted")
    data: Any = columns if isinstance(task.data, Mapping) else tuple(columns.values())
    return replace(task, data=data if len(columns) > 1 or isinstance(data, dict) else data[0])


def _column(text: str) -> DataColumn:
    name, equals, kind = text.partition("=")
    dtype, colon, sizes = kind.partition(":")
    shape = sizes.split("x") if colon else []
    if not (name and equals and dtype in NAMED and all(size.isdigit() and int(size) > 0 for size in shape)):
        raise UserError(
            f"--data-schema: {text!r} is no column; write NAME=TYPE or NAME=TYPE:AxB, as in images=uint8:1x8x8, with a "
            "type of torch"
        )
    return DataColumn(name, dtype, tuple(map(int, shape)))


def _parts(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, tuple | list) else (torch.as_tensor(batch),)
