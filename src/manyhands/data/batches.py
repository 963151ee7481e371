"""From sample indices to a batch, as torch's DataLoader would make it.

Data comes as a map-style dataset or as arrays: one array, a tuple or list of arrays (columns, as
TensorDataset has them), or a dict of arrays by name. `BatchSource.fetch(indices)` equals what
`DataLoader(data, batch_sampler=[indices])` yields, dtype and strides included. Where the data are arrays,
whole batches are gathered by index at once instead of sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from manyhands.errors import UserError

__all__ = ["BatchSource", "as_dataset"]

Indices: TypeAlias = NDArray[np.int64]
Gather: TypeAlias = Callable[[Indices], Any]
_ALLOWED = (
    "a map-style dataset (with __len__ and __getitem__), a tensor or array, or a tuple, list or dict of them"
)


class BatchSource:
    """Assembles batches of `data`; `field` is what error messages call it.

    Construction looks at lengths and types only. It raises UserError where the data cannot be indexed, are
    empty, or hold columns of different lengths.
    """

    def __init__(
        self, data: Any, collate: Callable[[list[Any]], Any] | None = None, *, field: str = "data"
    ) -> None:
        self._samples = as_dataset(data, field)
        self._length = _length(self._samples, field)
        self._collate = default_collate if collate is None else collate
        self._gather = _gatherer(self._samples) if collate is None else None

    def __len__(self) -> int:
        return self._length

    @property
    def gathers(self) -> bool:
        """Whether the data are arrays, of which a batch is gathered at once and nothing is drawn by chance."""
        return self._gather is not None

    def fetch(self, indices: Sequence[int] | Indices) -> Any:
        """The collated batch of these samples, at least one: a worker with an empty share has no batch."""
        if len(indices) == 0:
            raise ValueError("fetch needs at least one index; a worker with an empty share takes no batch")
        if self._gather is not None:
            return self._gather(np.asarray(indices, dtype=np.int64))
        wanted = [int(index) for index in indices]
        if getattr(self._samples, "__getitems__", None):
            return self._collate(self._samples.__getitems__(wanted))
        return self._collate([self._sample(index) for index in wanted])

    def _sample(self, index: int) -> Any:
        try:
            return self._samples[index]
        except Exception as error:
            error.add_note(f"raised for sample {index} of data")
            raise


def as_dataset(data: Any, field: str) -> Any:
    """`data` as something with `__len__` and `__getitem__`, or a UserError that says what to give instead."""
    if isinstance(data, DataLoader):
        raise UserError(
            f"{field} is a DataLoader; give {field}=loader.dataset, and batch_size= and collate= beside it"
        )
    if isinstance(data, str | bytes):
        raise UserError(f"{field} is {data[:40]!r}; read the file first and give {_ALLOWED}")
    if isinstance(data, IterableDataset | Iterator):
        raise UserError(
            f"{field} is {_kind(data)}, which can only be iterated, so samples of batch k cannot be "
            f"looked up; give {_ALLOWED}: where the samples fit in memory, list(...) of it will do; training data "
            "may be an IterableDataset, too"
        )
    if isinstance(data, tuple | list) and any(map(_is_array, data)):
        _check_columns({f"{field}[{position}]": column for position, column in enumerate(data)})
        return StackDataset(*data)
    if isinstance(data, dict) and data and all(isinstance(key, str) for key in data):
        _check_columns({f"{field}[{key!r}]": column for key, column in data.items()})
        return StackDataset(**data)
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        missing = " and ".join(name for name in ("__len__", "__getitem__") if not hasattr(data, name))
        raise UserError(f"{field} is {_kind(data)}, which has no {missing}; give {_ALLOWED}")
    return data


def _check_columns(columns: Mapping[str, Any]) -> None:
    for name, column in columns.items():
        if not _is_array(column):
            raise UserError(f"{name} is {_kind(column)}; beside tensors it must be a tensor or a numpy array")
        if column.ndim == 0:
            raise UserError(f"{name} is a single number; it must have one entry per sample")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UserError(f"tensors of different lengths: {listed}; each must have one entry per sample")


def _length(samples: Any, field: str) -> int:
    try:
        length = len(samples)
    except (TypeError, NotImplementedError) as error:  # a tensor without dimensions, an unfinished dataset
        raise UserError(f"{field} is {_kind(samples)} without a length ({error}); give {_ALLOWED}") from error
    if length == 0:
        raise UserError(f"{field} is empty; give at least one sample")
    return length


def _gatherer(samples: Any) -> Gather | None:
    """Whole-batch indexing for samples held as arrays; None where they must be asked for one by one.

    Exact types only: a subclass may have its own `__getitem__`.
    """
    if _is_array(samples):
        return _array_gatherer(samples)
    if type(samples) is TensorDataset:
        return _column_gatherer(samples.tensors)
    if type(samples) is StackDataset:
        columns = samples.datasets
        if isinstance(columns, tuple):
            return _column_gatherer(columns)
        gather_values = _column_gatherer(tuple(columns.values()))
        if gather_values is None:
            return None
        return lambda indices: dict(zip(columns, gather_values(indices), strict=True))
    if type(samples) is Subset:
        gather = _gatherer(samples.dataset)
        if gather is None:
            return None
        positions = np.fromiter(map(int, samples.indices), np.int64)
        return lambda indices: gather(positions[indices])
    return None


def _column_gatherer(columns: Sequence[Any]) -> Gather | None:
    gathers = [gather for gather in map(_gatherer, columns) if gather is not None]
    if len(gathers) < len(columns):
        return None
    return lambda indices: [gather(indices) for gather in gathers]


def _array_gatherer(array: Any) -> Gather | None:
    """Rows by index, laid out as a stack of single rows: contiguous, whatever the source's strides."""
    if isinstance(array, Tensor):
        if type(array) is not Tensor or array.layout != torch.strided or array.is_nested:
            return None
        tensor = array
        return lambda indices: tensor.index_select(
            0, torch.from_numpy(np.where(indices < 0, indices + len(tensor), indices)).to(tensor.device)
        )
    if array.dtype.kind not in "biufc" or not array.dtype.isnative:
        return None
    return lambda indices: torch.from_numpy(np.asarray(np.take(array, indices, axis=0)))


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
