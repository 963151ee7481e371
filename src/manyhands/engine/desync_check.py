"""Desync check: parameter hashes are compared at intervals, and the first difference is named.

Where every worker holds the model, all take the same step from the same sum, so parameters are the same to the last bit
on every worker; if they are not, some worker went its own way, and nothing else would show it. Where a model is split
(`pipeline data=2`), each part is compared with its copies. One check is one 64-bit hash over all parameters of a worker
and one small sum over workers; only when that differs is each parameter's own hash exchanged. Buffers are not compared:
between evaluations, running statistics are each worker's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from manyhands.errors import Desync
from manyhands.native.hashing import xxh64

Hashes = npt.NDArray[np.uint64]
# In the same order on every worker; None for what this one does not hold
NamedParameters: TypeAlias = Iterable[tuple[str, torch.Tensor | None]]
_HALF = np.uint64(32)


class Agreement:
    """One worker's side of the checks; `total` is the collective sum over workers of a float64 vector."""

    def __init__(
        self,
        named: Callable[[], NamedParameters],
        *,
        rank: int,
        world: int,
        total: Callable[[torch.Tensor], torch.Tensor],
        copies: Sequence[Sequence[int]] = (),
        agreed_step: int = 0,
    ) -> None:
        """All hold the same parameters after `agreed_step` steps: worker 0's.

        `named` gives the same names on every worker, and None for what another one holds; the workers of each group of
        `copies` hold the same (none: all do).
        """
        self._named, self._rank, self._world, self._total = named, rank, world, total
        self._copies = [list(group) for group in copies] or [list(range(world))]
        self._agreed_step = agreed_step

    def check(self, step: int) -> None:
        """Collective: raise Desync, on every worker, if any parameter differs between workers after `step` steps."""
        named = dict(self._named())
        mine = parameter_hashes(named.items())
        whole = np.array([xxh64(mine.view(np.uint8))], np.uint64)
        hashes = self._exchanged(whole)
        if not any((hashes[group] != hashes[group[0]]).any() for group in self._copies):
            self._agreed_step = step
            return
        hashes = self._exchanged(mine)
        unlike = next(group for group in self._copies if (hashes[group] != hashes[group[0]]).any())
        found = describe_difference(list(named), hashes[unlike], unlike)
        raise Desync(
            f"after step {step} the workers no longer hold the same parameters: {found}; after step "
            f"{self._agreed_step} they still did; look for a step that a worker skips, and for random numbers or "
            "changes of the model that depend on the rank"
        )

    def _exchanged(self, mine: Hashes) -> Hashes:
        """Everyone's hashes, one row per worker: halves of 32 bits, which a float64 holds exactly."""
        table = np.zeros((self._world, 2, len(mine)), np.float64)
        table[self._rank] = mine >> _HALF, mine & np.uint64(0xFFFFFFFF)
        summed = self._total(torch.from_numpy(table).view(-1)).numpy().reshape(table.shape).astype(np.uint64)
        hashes: Hashes = summed[:, 0] << _HALF | summed[:, 1]
        return hashes


def parameter_hashes(named: NamedParameters) -> Hashes:
    """The XXH64 of each parameter's bytes, in their order; 0 of one that is held elsewhere."""

    def hash_of(tensor: torch.Tensor) -> int:
        return xxh64(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())

    return np.fromiter((hash_of(one) if one is not None else 0 for _, one in named), np.uint64)


def describe_difference(names: Sequence[str], hashes: Hashes, ranks: Sequence[int] | None = None) -> str:
    """The first parameter (column) that differs, and the workers (rows: `ranks`, or all) on which it does."""
    ranks = range(len(hashes)) if ranks is None else ranks
    differs = (hashes != hashes[0]).any(axis=0)
    first = int(np.argmax(differs))
    more = int(differs.sum()) - 1
    others = "" if more == 0 else f" and in {more} other parameter{'s' if more > 1 else ''}"
    values: list[int] = hashes[:, first].tolist()
    (common, count), (_, next_count) = Counter(values).most_common(2)
    pairs = list(zip(ranks, values, strict=True))
    odd = [rank for rank, value in pairs if value != common]
    who = f"{_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from the other {count}"
    if count == next_count and len(values) == 2:
        who = f"ranks {ranks[0]} and {ranks[1]} differ"
    elif count == next_count:
        groups = [[rank for rank, value in pairs if value == one] for one in dict.fromkeys(values)]
        who = f"{', '.join(map(_ranks, groups[:-1]))} and {_ranks(groups[-1])} differ from each other"
    return f"{who} in {names[first]!r}{others}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
