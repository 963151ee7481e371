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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import StackDataset, TensorDataset

from manyhands.data.parties import Parties
from manyhands.data.randomness import mix
from manyhands.errors import UserError, nearest

__all__ = ["NATURAL", "Partition", "held_back", "labels_of"]

Indices = NDArray[np.int64]
NATURAL: Final = "natural"
_FEWEST = 1  # samples of a client, whatever the draw
_HOLDING = 3


@dataclass(frozen=True, slots=True)
class Partition:
    """One of the splits, and its number where it has one."""

    word: str
    number: float

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Read `dirichlet:0.5`; a UserError lists what there is."""
        word, colon, number = text.partition(":")
        if word not in _SPLITS and word != NATURAL:
            raise UserError(f"partition={text}: unknown; {nearest(word, [*_SPLITS, NATURAL])}")
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
            raise UserError(f"partition={text}: after {word}: stands {kind}, as in {word}:{default:g}")
        return cls(word, value)

    def split(self, data: Any, samples: int, clients: int, seed: int) -> list[Indices]:
        """The indices of each client's samples, ascending; every sample has a client, and no client is empty."""
        if self.word == NATURAL:
            if not isinstance(data, Parties):
                raise UserError(
                    "partition=natural: the data does not say whose it is; give mh.Parties({name: data})"
                )
            return data.split()
        if samples < clients * _FEWEST:
            raise UserError(f"clients={clients}: there are {samples} samples; give at most as many clients")
        random = np.random.default_rng(seed)
        found = _SPLITS[self.word](lambda: labels_of(data, samples), samples, clients, self.number, random)
        for number, part in enumerate(found):
            if (
                len(part) < _FEWEST
            ):  # it gets one of the client that has most: without data it cannot take part
                richest = max(range(len(found)), key=lambda one: len(found[one]))
                found[number], found[richest] = found[richest][:_FEWEST], found[richest][_FEWEST:]
        return [np.sort(part).astype(np.int64) for part in found]


def held_back(parts: Sequence[Indices], share: float, seed: int) -> tuple[list[Indices], list[Indices]]:
    """What each client trains on, and what it is measured by: so large a part of its samples, drawn at random.

    With two samples or more it is at least one, and never all; with a single one there is nothing to measure by. Where
    `share` is 0 nothing is held back, and clients are measured by what they train on.
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


def _iid(_: Any, samples: int, clients: int, __: float, random: np.random.Generator) -> list[Indices]:
    return list(np.array_split(random.permutation(samples), clients))


def _shards(
    labels: Callable[[], Indices], samples: int, clients: int, each: float, random: np.random.Generator
) -> list[Indices]:
    count = clients * int(each)
    if count > samples:
        raise UserError(
            f"partition=shards:{each:g}: {clients} clients make {count} shards of {samples} samples; use "
            "fewer clients, or fewer shards each"
        )
    shards = np.array_split(np.argsort(labels(), kind="stable"), count)
    dealt = random.permutation(count).reshape(clients, int(each))
    return [np.concatenate([shards[number] for number in mine]) for mine in dealt]


def _dirichlet(
    labels: Callable[[], Indices], samples: int, clients: int, alpha: float, random: np.random.Generator
) -> list[Indices]:
    del samples
    found = labels()
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in np.unique(found):
        mine = random.permutation(np.flatnonzero(found == label))
        for part, piece in zip(parts, _cut(mine, random.dirichlet([alpha] * clients)), strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def _quantity(_: Any, samples: int, clients: int, alpha: float, random: np.random.Generator) -> list[Indices]:
    return _cut(random.permutation(samples), random.dirichlet([alpha] * clients))


def _cut(indices: Indices, shares: NDArray[np.float64]) -> list[Indices]:
    ends = np.round(np.cumsum(shares)[:-1] * len(indices)).astype(np.int64)
    return list(np.split(indices, ends))


_SPLITS: Final[dict[str, Callable[..., list[Indices]]]] = {
    "iid": _iid,
    "shards": _shards,
    "dirichlet": _dirichlet,
    "quantity": _quantity,
}
_DEFAULTS: Final[dict[str, float]] = {"shards": 2, "dirichlet": 0.5, "quantity": 0.5}
