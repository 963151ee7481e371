"""Do all workers still hold the same parameters? Hashes are compared every so often, and the first difference is named.

Where every worker holds the model (`mirrored`, `allreduce`) all take the same step from the same sum, so parameters are
the same to the last bit on every worker, for ever; if they are not, some worker went its own way: a step left out, a
random number that depends on the rank, a broken machine. Nothing else would show it, and the weights would be worth
nothing.

One check is one 64-bit hash over all parameters of a worker and one small sum over workers; only when that differs is
each parameter's own hash exchanged. Buffers are not compared: running statistics are each worker's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from manyhands.errors import Desync
from manyhands.memory.hashing import xxh64

__all__ = ["Agreement", "describe_difference", "parameter_hashes"]

Hashes = npt.NDArray[np.uint64]
_HALF = np.uint64(32)


class Agreement:
    """One worker's side of the checks; `total` is the sum over workers of a float64 vector, in which all take part."""

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int,
        world: int,
        total: Callable[[torch.Tensor], torch.Tensor],
        agreed_step: int = 0,
    ) -> None:
        """All hold the same parameters after `agreed_step` steps: worker 0's."""
        self._model = model
        self._rank = rank
        self._world = world
        self._total = total
        self._agreed_step = agreed_step

    def check(self, step: int) -> None:
        """Collective: raise Desync, on every worker, if any parameter differs between workers after `step` steps."""
        mine = parameter_hashes(self._model)
        whole = np.array([xxh64(mine.view(np.uint8))], np.uint64)
        if len(set(self._exchanged(whole)[:, 0].tolist())) == 1:
            self._agreed_step = step
            return
        names = [name for name, _ in self._model.named_parameters()]
        found = describe_difference(names, self._exchanged(mine))
        raise Desync(
            f"after step {step} the workers no longer hold the same parameters: {found}; after step "
            f"{self._agreed_step} they still did; look for a step that a worker leaves out, and for random numbers or "
            "changes of the model that depend on the rank"
        )

    def _exchanged(self, mine: Hashes) -> Hashes:
        """Everyone's hashes, one row per worker: halves of 32 bits, which a float64 holds exactly."""
        table = np.zeros((self._world, 2, len(mine)), np.float64)
        table[self._rank] = mine >> _HALF, mine & np.uint64(0xFFFFFFFF)
        summed = self._total(torch.from_numpy(table).view(-1)).numpy().reshape(table.shape).astype(np.uint64)
        together: Hashes = summed[:, 0] << _HALF | summed[:, 1]
        return together


def parameter_hashes(model: nn.Module) -> Hashes:
    """The XXH64 of each parameter's bytes, in the model's order."""
    hashes = (xxh64(_bytes(parameter)) for parameter in model.parameters())
    return np.fromiter(hashes, np.uint64)


def describe_difference(names: Sequence[str], hashes: Hashes) -> str:
    """Which parameter is the first that differs, and on whom: `hashes` has a row per worker, a column per name."""
    differs = (hashes != hashes[0]).any(axis=0)
    first = int(np.argmax(differs))
    more = int(differs.sum()) - 1
    others = "" if more == 0 else f" and in {more} other parameter{'s' if more > 1 else ''}"
    return f"{_who(hashes[:, first].tolist())} in {names[first]!r}{others}"


def _who(values: Sequence[int]) -> str:
    """Who differs from whom."""
    (common, count), (_, next_count) = Counter(values).most_common(2)
    if count == next_count:
        groups = [
            [rank for rank, value in enumerate(values) if value == one] for one in dict.fromkeys(values)
        ]
        if len(values) == 2:
            return "ranks 0 and 1 differ"
        return f"{', '.join(map(_ranks, groups[:-1]))} and {_ranks(groups[-1])} differ from each other"
    odd = [rank for rank, value in enumerate(values) if value != common]
    return f"{_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from the other {count}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    flat: npt.NDArray[np.uint8] = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat
