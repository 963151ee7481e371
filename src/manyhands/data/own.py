"""Data that resides in many places: every worker reads a stream of its own, or several parties hold a part each.

    Files("logs/*.txt.gz")            worker r of n reads files r, r + n, r + 2n, … of the sorted list
    Files("/local/part-{rank}-*")     what is on each worker's own disk, found there
    PerWorker(lambda rank, world: …)  any iterable, such as an IterableDataset
    a Ray Dataset                     cut into as many equal shards as there are workers

Batch k is every worker's next share: as many samples as it would have of a common batch, from its own stream, which is
gone through again and again. So who has how many samples in batch k is arithmetic.
"""

from __future__ import annotations

import glob
import gzip
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from manyhands.data.batches import as_dataset
from manyhands.errors import DataError, UserError

_GZIP_MAGIC = b"\x1f\x8b"


class WorkerData(ABC):
    """Data of which every worker reads a part of its own, as a stream that begins anew each time it is iterated."""

    @abstractmethod
    def dealt(self, parts: int) -> WorkerData:
        """For so many parts, checked; called once, in the process that asks for the run."""

    @abstractmethod
    def stream(self, part: int, parts: int) -> Iterable[Any]:
        """The samples of one part; called where they are read."""


@dataclass(frozen=True, slots=True)
class PerWorker(WorkerData):
    """A stream per worker: `make(rank, world)` gives what worker `rank` of `world` iterates.

    An `IterableDataset`, say. It is called in the worker, and what it gives must begin anew each time it is iterated.
    """

    make: Callable[[int, int], Iterable[Any]]
    """(rank, world) -> an iterable of samples."""

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise UserError(
                f"PerWorker: make is {self.make!r}; it must be a function (rank, world) -> an iterable of samples"
            )

    def dealt(self, parts: int) -> PerWorker:
        del parts
        return self

    def stream(self, part: int, parts: int) -> Iterable[Any]:
        made = self.make(part, parts)
        if isinstance(made, Iterator) or not isinstance(made, Iterable):
            raise UserError(
                f"PerWorker: make({part}, {parts}) returned a {type(made).__name__}; it must return something that "
                "starts again each time it is iterated, such as a list or an IterableDataset"
            )
        return made


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text file, plain or gzip, without their ends; DataError where it cannot be read."""
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        with gzip.open(path, "rt", encoding="utf-8") if is_gzip else path.open(encoding="utf-8") as lines:
            for line in lines:
                yield line.rstrip("\r\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Files(WorkerData):
    """Files that match a pattern, each read by one worker: `read(path)` gives the samples of one.

    The list is sorted, and worker r of n reads files r, r + n, r + 2n, …, whatever is in them. With `{rank}` (and
    `{world}`) in the pattern every worker looks for its own files where it runs, and reads all that it finds.
    """

    pattern: str
    """As `glob` has it; `**` stands for any folders between."""
    read: Callable[[Path], Iterable[Any]] = text_lines
    """(path) -> samples; by default, the lines of a text file, plain or gzip."""
    paths: tuple[str, ...] = field(default=(), repr=False)
    """What was found where the value was made; give none."""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise UserError(f"Files: pattern is {self.pattern!r}; it must be a string such as 'data/*.txt'")
        if not callable(self.read):
            raise UserError(f"Files: read is {self.read!r}; it must be a function (path) -> samples")
        object.__setattr__(self, "pattern", os.path.abspath(self.pattern))  # workers may run elsewhere
        if not self.is_local and not self.paths:
            object.__setattr__(self, "paths", _found(self.pattern, "there is no file"))

    @property
    def is_local(self) -> bool:
        return "{rank}" in self.pattern

    def dealt(self, parts: int) -> Files:
        if not self.is_local and len(self.paths) < parts:
            raise UserError(
                f"Files: {self.pattern!r} matches {len(self.paths)} of the {parts} files that {parts} workers need, "
                "one each; give more files, or fewer workers"
            )
        return self

    def stream(self, part: int, parts: int) -> Iterable[Any]:
        paths = self.dealt(parts).paths[part::parts]
        if self.is_local:
            pattern = self.pattern.replace("{rank}", str(part)).replace("{world}", str(parts))
            paths = _found(pattern, f"worker {part} finds no file")
        return _Samples(lambda: chain.from_iterable(self.read(Path(path)) for path in paths))


def _found(pattern: str, nothing: str) -> tuple[str, ...]:
    paths = tuple(sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()))
    if not paths:
        raise UserError(f"Files: {nothing} that matches {pattern!r}")
    return paths


@dataclass(frozen=True, slots=True)
class _Samples:
    """A stream that is `read` from its beginning at each iteration."""

    read: Callable[[], Iterable[Any]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())


@dataclass(frozen=True, slots=True)
class RayShards(WorkerData):
    """A Ray Dataset, cut into equal shards; a sample is a row, a dict of its columns.

    Rows that are left over (fewer than there are workers) belong to nobody. Ray keeps the shards, in the object stores
    of its nodes and beyond them on disk; a worker gets its own, block after block, while it iterates.
    """

    dataset: Any
    """As `ray.data` made it."""
    shards: tuple[Any, ...] = ()
    """One for each worker, once it is dealt."""

    def dealt(self, parts: int) -> RayShards:
        """Have Ray cut it; needs the connection to Ray that the dataset was made with."""
        if len(self.shards) == parts:
            return self
        shards = tuple(self.dataset.split(parts, equal=True))
        if not all(shard.count() for shard in shards):
            raise UserError(
                f"data, a Ray Dataset, has fewer rows than the {parts} workers that read it; give more rows, or fewer "
                "workers"
            )
        return RayShards(self.dataset, shards)

    def stream(self, part: int, parts: int) -> Iterable[Any]:
        assert len(self.shards) == parts, "a dataset is dealt before it is read"
        return _Samples(self.shards[part].iter_rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayShards, (None, self.shards)


def own_data(data: Any) -> WorkerData | None:
    """`data` as data of each worker's own, or None where it is any other."""
    if isinstance(data, WorkerData):
        return data
    is_rays = type(data).__module__.split(".")[:2] == ["ray", "data"]
    return RayShards(data) if is_rays and hasattr(data, "split") and hasattr(data, "iter_rows") else None


class Parties:
    """`Parties({"hospital": data, "clinic": data})`: a data set for each party, as `Task.data` takes one.

    Under `federated partition=natural` each party is a client that never sees the others' samples; any other strategy
    trains on all of them as one.
    """

    def __init__(self, parties: Mapping[str, Any]) -> None:
        if not isinstance(parties, Mapping) or not parties:
            raise UserError(f"Parties: give a dict of name: data, not {parties!r:.60}")
        self.names: tuple[str, ...] = tuple(map(str, parties))
        self._data = [as_dataset(data, f"party {name!r}") for name, data in parties.items()]
        self._ends = list(accumulate(len(data) for data in self._data))
        for name, data in zip(self.names, self._data, strict=True):
            if not len(data):
                raise UserError(f"party {name!r} has no samples; leave it out")

    @classmethod
    def by(cls, data: Any, owners: Sequence[Any]) -> Parties:
        """Of one data set, of which `owners` names the party of each sample: the natural split by user."""
        samples, each = as_dataset(data, "data"), np.asarray(owners)
        if len(each) != len(samples):
            raise UserError(f"Parties.by: {len(samples)} samples have {len(each)} owners; give one each")
        named = sorted(set(each.tolist()), key=str)
        return cls({str(name): Subset(samples, np.flatnonzero(each == name).tolist()) for name in named})

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """The sample of this number among all parties' samples, one party's after another's."""
        party = bisect_right(self._ends, index)
        begin = self._ends[party - 1] if party else 0
        return self._data[party][index - begin]

    def parts(self) -> Iterator[tuple[Any, NDArray[np.int64] | None]]:
        """Each party's data set and which of its samples are the party's; None: all."""
        for data in self._data:
            yield (data.dataset, np.asarray(data.indices)) if type(data) is Subset else (data, None)

    def split(self) -> list[NDArray[np.int64]]:
        begins = [0, *self._ends[:-1]]
        return [np.arange(begin, end) for begin, end in zip(begins, self._ends, strict=True)]
