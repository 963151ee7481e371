"""The samples of all simulated clients, looked up by index; arrays stay on the device, for many batches at once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import StackDataset, TensorDataset

from manyhands.data.batches import BatchSource, as_dataset
from manyhands.data.own import Parties
from manyhands.data.randomness import drawn_apart, mix
from manyhands.engine.device import moved
from manyhands.task import Task

if TYPE_CHECKING:
    from manyhands.places.local.loaders import Loaders

__all__ = ["Batches", "Samples", "apart", "columns_of", "reading_ahead"]

_PART_OF_MEMORY = 0.25  # of what is free on a GPU, for the data


_BatchKey: TypeAlias = tuple[int, ...]
"""A seed, and the numbers of the samples."""


@dataclass(frozen=True, slots=True)
class Batches:
    """The samples of several batches, and the seed of what is drawn by chance in making them."""

    indices: Sequence[NDArray[np.int64]]
    seed: int

    def keys(self) -> list[_BatchKey]:
        """One key for each batch: its seed and the indices of its samples."""
        return [
            (mix(self.seed, number), *indices.reshape(-1).tolist())
            for number, indices in enumerate(self.indices)
        ]


class IndexReader:
    """Reads batches in a loader process."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def read(self, key: _BatchKey, kept_from: int = 0) -> Any:
        del kept_from
        seed, *indices = key
        with drawn_apart(seed):
            return self._source.fetch(indices)


def reading_ahead(task: Task, owner: str) -> Loaders[_BatchKey] | None:
    if not task.loaders:
        return None
    from manyhands.places.local.loaders import Loaders

    source = BatchSource(task.data, task.collate)
    return Loaders(partial(IndexReader, source), task.loading, task.loaders, owner)


class Samples:
    """Batches of a task's data on one device."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._device = device
        self._source = BatchSource(task.data, task.collate)
        columns = columns_of(task.data) if task.collate is None else None
        if columns is not None and device.type != "cpu":
            columns = moved(columns, device) if _fits(columns, device) else None
        self._columns = columns
        self.loaders: Loaders[_BatchKey] | None = None
        """The loader processes that read ahead, if any."""
        self._input_ns = 0

    @property
    def resident(self) -> bool:
        return self._columns is not None

    def fetch(self, indices: NDArray[np.int64]) -> Any:
        if self._columns is not None:
            return self.gather(torch.from_numpy(np.ascontiguousarray(indices)).to(self._device))
        batch = self._source.fetch(indices)
        return batch if self._device.type == "cpu" else moved(batch, self._device)

    def each(self, wanted: Batches, then: Batches | None = None) -> Iterator[Any]:
        """The batches of these samples, one after another; the first of `then` come next, and may be read meanwhile.

        What is drawn by chance in making one follows from its key alone.
        """
        if self._columns is not None or self._source.gathers:
            yield from map(self.fetch, wanted.indices)
            return
        keys = wanted.keys()
        upcoming = [*keys, *(then.keys() if then is not None else ())]
        read, loaders = IndexReader(self._source).read, self.loaders
        for number, key in enumerate(keys, 1):
            begin_ns = time.monotonic_ns()
            after = upcoming[number : number + loaders.window] if loaders is not None else []
            batch = loaders.get(key, after) if loaders is not None else read(key)
            self._input_ns += time.monotonic_ns() - begin_ns
            yield batch if self._device.type == "cpu" else moved(batch, self._device)

    def take_input_ns(self) -> int:
        taken, self._input_ns = self._input_ns, 0
        return taken

    def fetch_apart(self, indices: NDArray[np.int64]) -> Any:
        """For indices of shape (clients, batch): a batch whose tensors have these two dimensions in front.

        TypeError where a batch has something else than tensors with an entry for each sample.
        """
        return apart(self.fetch(indices.reshape(-1)), indices.shape)

    def gather(self, indices: Tensor) -> Any:
        return each_tensor(self._columns, lambda column: column.index_select(0, indices))


def apart(batch: Any, shape: Sequence[int]) -> Any:
    """A batch of many samples as one of (clients, batch) samples."""
    count = int(np.prod(shape))

    def split(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != count:
            raise TypeError(f"a batch of {count} samples has a tensor of shape {tuple(tensor.shape)}")
        return tensor.view(*shape, *tensor.shape[1:])

    return each_tensor(batch, split)


def each_tensor(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with every tensor in it changed; TypeError where it has anything else."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, list | tuple):
        return [each_tensor(part, change) for part in tree]
    if isinstance(tree, dict):
        return {name: each_tensor(part, change) for name, part in tree.items()}
    raise TypeError(f"a batch has a {type(tree).__name__}, which is no tensor")


def columns_of(data: Any) -> Any:
    """The data as tensors, each with an entry for each sample: one, a list or a dict; None where they are none."""
    if isinstance(data, Parties):
        return _joined(data)
    samples = as_dataset(data, "data")
    if isinstance(samples, np.ndarray):
        plain = samples.dtype.kind in "biufc" and samples.dtype.isnative
        with warnings.catch_warnings():  # the array is read-only, and is not written to
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(np.ascontiguousarray(samples)) if plain else None
    if isinstance(samples, Tensor):
        return samples if type(samples) is Tensor and samples.layout == torch.strided else None
    if type(samples) is TensorDataset:
        return _all_of([columns_of(tensor) for tensor in samples.tensors])
    if type(samples) is StackDataset:
        parts = samples.datasets
        if isinstance(parts, tuple):
            return _all_of([columns_of(part) for part in parts])
        found = {name: columns_of(part) for name, part in parts.items()}
        return None if any(part is None for part in found.values()) else found
    return None


def _all_of(columns: list[Any]) -> list[Any] | None:
    return None if any(column is None for column in columns) else columns


def _joined(parties: Parties) -> Any:
    found = []
    for samples, chosen in parties.parts():
        columns = columns_of(samples)
        if columns is None:
            return None
        if chosen is not None:
            wanted = torch.from_numpy(chosen)
            columns = each_tensor(columns, lambda column, wanted=wanted: column[wanted])  # type: ignore[misc]
        found.append(columns)
    return _concatenated(found)


def _concatenated(trees: list[Any]) -> Any:
    """Trees of one form, leaf by leaf; None where the forms differ."""
    first = trees[0]
    if any(type(tree) is not type(first) for tree in trees):
        return None
    if isinstance(first, Tensor):
        alike = all(tree.shape[1:] == first.shape[1:] and tree.dtype == first.dtype for tree in trees)
        return torch.cat(trees) if alike else None
    if isinstance(first, list):
        if any(len(tree) != len(first) for tree in trees):
            return None
        return _all_of([_concatenated(list(parts)) for parts in zip(*trees, strict=True)])
    if any(tree.keys() != first.keys() for tree in trees):
        return None
    found = {name: _concatenated([tree[name] for tree in trees]) for name in first}
    return None if any(part is None for part in found.values()) else found


def _fits(columns: Any, device: torch.device) -> bool:
    """Whether the columns take no more of a GPU's free memory than is theirs to take."""
    sizes: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    each_tensor(columns, count)
    free, _ = torch.cuda.mem_get_info(device)
    return sum(sizes) <= _PART_OF_MEMORY * free
