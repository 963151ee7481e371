"""Who holds which samples: the splits of one data set over clients that papers use, and the natural one.

| text | each client has |
|---|---|
| `iid` | as many as any other, drawn at random |
| `shards:2` | two runs of the samples sorted by label (McMahan et al., AISTATS 2017) |
| `dirichlet:0.5` | of every label a share drawn from Dirichlet(0.5) (Hsu et al., 2019) |
| `quantity:0.5` | a share of the samples, drawn from Dirichlet(0.5), with labels at random (Li et al., NIID-Bench) |
| `natural` | what `Parties` says is its own |
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import StackDataset, TensorDataset

from manyhands.data.batches import BatchSource, as_dataset
from manyhands.data.own import Parties
from manyhands.data.randomness import drawn_apart, mix
from manyhands.engine.device import moved
from manyhands.errors import UserError, nearest
from manyhands.task import Task

if TYPE_CHECKING:
    from manyhands.places.local.loaders import Loaders

Indices = NDArray[np.int64]
NATURAL: Final = "natural"
_DEFAULTS: Final[dict[str, float]] = {"shards": 2, "dirichlet": 0.5, "quantity": 0.5}
_WORDS: Final = ("iid", *_DEFAULTS, NATURAL)
_FEWEST = 1  # samples of a client, whatever the draw
_SELECTING, _HOLDING = 1, 3


def selected(seed: int, number: int, clients: int, count: int) -> list[int]:
    """The clients of round `number`: `count` of them, all equally likely, in ascending order."""
    random = np.random.default_rng(mix(seed, number, _SELECTING))
    return sorted(random.choice(clients, count, replace=False).tolist())


@dataclass(frozen=True, slots=True)
class Partition:
    """One of the splits, and its number where it has one."""

    word: str
    number: float

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Read `dirichlet:0.5`; a UserError lists what there is."""
        word, colon, number = text.partition(":")
        if word not in _WORDS:
            raise UserError(f"partition={text}: unknown; {nearest(word, _WORDS)}")
        default = _DEFAULTS.get(word)
        if default is None:
            if colon:
                raise UserError(f"partition={text}: {word} takes no number; write partition={word}")
            return cls(word, 0.0)
        try:
            value = float(number) if colon else default
        except ValueError:
            value = 0.0
        if not 0 < value < 1e6 or (word == "shards" and value != int(value)):
            kind = "an integer of at least 1" if word == "shards" else "a number above 0"
            raise UserError(f"partition={text}: {word} takes {kind}, as in {word}:{default:g}")
        return cls(word, value)

    def split(self, data: Any, samples: int, clients: int, seed: int) -> list[Indices]:
        """The indices of each client's samples, ascending; every sample has a client, and no client is empty."""
        if self.word == NATURAL:
            if not isinstance(data, Parties):
                why = "partition=natural: the data has no parties; give mh.Parties({name: data})"
                raise UserError(why)
            return data.split()
        if samples < clients * _FEWEST:
            raise UserError(f"clients={clients}: there are {samples} samples; give at most that many clients")
        random = np.random.default_rng(seed)
        if self.word == "iid":
            found = list(np.array_split(random.permutation(samples), clients))
        elif self.word == "quantity":
            found = _cut(random.permutation(samples), random.dirichlet([self.number] * clients))
        elif self.word == "shards":
            each = int(self.number)
            if (count := clients * each) > samples:
                raise UserError(
                    f"partition=shards:{each}: {clients} clients need {count} samples, but there are {samples}; use "
                    "fewer of either"
                )
            shards = np.array_split(np.argsort(labels_of(data, samples), kind="stable"), count)
            dealt = random.permutation(count).reshape(clients, each)
            found = [np.concatenate([shards[number] for number in mine]) for mine in dealt]
        else:  # of each label, cut at random
            labels, alphas = labels_of(data, samples), [self.number] * clients
            cuts = []
            for label in np.unique(labels):
                mine = random.permutation(np.flatnonzero(labels == label))
                cuts.append(_cut(mine, random.dirichlet(alphas)))
            found = [np.concatenate(pieces) for pieces in zip(*cuts, strict=True)]
        for number, part in enumerate(found):
            if len(part) < _FEWEST:  # it gets one of the client that has most, to take part
                richest = max(range(len(found)), key=lambda one: len(found[one]))
                found[number], found[richest] = found[richest][:_FEWEST], found[richest][_FEWEST:]
        return [np.sort(part).astype(np.int64) for part in found]


def held_back(parts: Sequence[Indices], share: float, seed: int) -> tuple[list[Indices], list[Indices]]:
    """What each client trains on, and what it is measured by: this share of its samples, drawn at random.

    It is at least one of two or more samples, and never all; with a share of 0, what clients train on.
    """
    if not share:
        return list(parts), list(parts)
    trained, held = [], []
    for client, part in enumerate(parts):
        count = min(len(part) - 1, max(1, round(share * len(part))))
        order = np.random.default_rng(mix(seed, client, _HOLDING)).permutation(part)
        held.append(np.sort(order[:count]))
        trained.append(np.sort(order[count:]))
    return trained, held


def labels_of(data: Any, samples: int) -> Indices:
    """The label of each sample: the last column of integers, or the data set's `targets`."""
    columns: Sequence[Any] = ()
    if isinstance(data, TensorDataset):
        columns = data.tensors
    elif isinstance(data, StackDataset):
        held = data.datasets
        columns = held if isinstance(held, tuple) else tuple(held.values())
    elif isinstance(data, tuple | list):
        columns = data
    elif isinstance(data, dict):
        columns = tuple(data.values())
    elif getattr(data, "targets", None) is not None:
        columns = (data.targets,)
    if columns:
        last = columns[-1]
        labels = last.numpy() if isinstance(last, Tensor) else np.asarray(last)
        if labels.shape == (samples,) and labels.dtype.kind in "iub":
            return labels.astype(np.int64)
    raise UserError(
        "partition: the data has no labels to split by (a last column of integers, or `targets`); use iid, "
        "quantity or natural"
    )


def _cut(indices: Indices, shares: NDArray[np.float64]) -> list[Indices]:
    ends = np.round(np.cumsum(shares)[:-1] * len(indices)).astype(np.int64)
    return list(np.split(indices, ends))


# The samples of all simulated clients, looked up by index; arrays stay on the device, for many batches at once.

_PART_OF_MEMORY = 0.25  # of what is free on a GPU, for the data
_BatchKey: TypeAlias = tuple[int, ...]  # a seed, and the numbers of the samples


@dataclass(frozen=True, slots=True)
class Batches:
    """The samples of several batches, and the seed of what is drawn by chance in making them."""

    indices: Sequence[Indices]
    seed: int

    def keys(self) -> list[_BatchKey]:
        own = enumerate(self.indices)
        return [(mix(self.seed, number), *indices.reshape(-1).tolist()) for number, indices in own]


@dataclass(frozen=True, slots=True)
class IndexReader:
    """Reads batches in a loader process."""

    source: BatchSource

    def read(self, key: _BatchKey, kept_from: int = 0) -> Any:
        del kept_from
        seed, *indices = key
        with drawn_apart(seed):
            return self.source.fetch(indices)


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
            found: list[Tensor] = []
            each_tensor(columns, lambda one: (found.append(one), one)[1])  # type: ignore[func-returns-value]
            free, _ = torch.cuda.mem_get_info(device)
            fits = sum(one.numel() * one.element_size() for one in found) <= _PART_OF_MEMORY * free
            columns = moved(columns, device) if fits else None
        self._columns = columns
        self.resident = columns is not None
        self.loaders: Loaders[_BatchKey] | None = None  # the loader processes that read ahead, if any
        self._input_ns = 0

    def fetch(self, indices: Indices) -> Any:
        if self._columns is not None:
            return self.gather(torch.from_numpy(np.ascontiguousarray(indices)).to(self._device))
        batch = self._source.fetch(indices)
        return batch if self._device.type == "cpu" else moved(batch, self._device)

    def each(self, wanted: Batches, then: Batches | None = None) -> Iterator[Any]:
        """The batches of these samples, each drawn from its key alone; the first of `then` may be read meanwhile."""
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

    def gather(self, indices: Tensor) -> Any:
        return each_tensor(self._columns, lambda column: column.index_select(0, indices))


def apart(batch: Any, shape: Sequence[int]) -> Any:
    """The batch with the two dimensions (clients, batch) in front; TypeError where it is not one of tensors alone."""
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
    raise TypeError(f"a batch has a {type(tree).__name__}, which is not a tensor")


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
            columns = each_tensor(columns, itemgetter(torch.from_numpy(chosen)))
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
