"""Data that several parties hold, each its part; together one data set that other strategies can train on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.data.batches import as_dataset
from manyhands.errors import UserError

__all__ = ["Parties"]


class Parties:
    """`Parties({"hospital": data, "clinic": data})`: a data set for each party, as `Task.data` takes one.

    Under `federated partition=natural` each party is a client that never sees the others' samples; any other strategy
    trains on all of them as one.
    """

    def __init__(self, parties: Mapping[str, Any]) -> None:
        if not isinstance(parties, Mapping) or not parties:
            raise UserError(f"Parties: give a dict of name: data, and not {parties!r:.60}")
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
        return cls({str(name): _Chosen(samples, np.flatnonzero(each == name)) for name in named})

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
            yield (data.samples, data.indices) if isinstance(data, _Chosen) else (data, None)

    def split(self) -> list[NDArray[np.int64]]:
        """The numbers of each party's samples."""
        begins = [0, *self._ends[:-1]]
        return [np.arange(begin, end) for begin, end in zip(begins, self._ends, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class _Chosen:
    """A subset of the samples of a data set."""

    samples: Any
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.samples[int(self.indices[index])]
