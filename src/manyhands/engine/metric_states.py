"""Metrics that keep a state over the batches of an evaluation, as those of torchmetrics do.

Workers evaluate different batches. Each then gets the arguments of every update, bit for bit and in the order of the
batches, and computes what one process computes: an object needs no rule to merge its states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from manyhands.data.store.state_tree import pack_tree, unpack_tree
from manyhands.task import StatefulMetric

_WORD: Final = np.dtype("<u4")  # a sum of words, of which all workers' but one are 0, is exact in float64


class MetricUpdates:
    """The arguments with which one worker's batches of an evaluation update the metrics."""

    def __init__(self, metrics: Mapping[str, StatefulMetric], part: int = 0, parts: int = 1) -> None:
        self._metrics, self._part, self._parts = metrics, part, parts
        self._mine: dict[str, list[list[Tensor]]] = {name: [] for name in metrics}  # of each batch, in order

    def add(self, name: str, arguments: Sequence[Tensor]) -> None:
        self._mine[name].append(list(arguments))

    def values(self, total: Callable[[Tensor], Tensor] | None, *, counts: bool = True) -> dict[str, float]:
        """Over all parts, where `total` sums (collective); a worker whose batches another reports does not count."""
        if not self._metrics:
            return {}
        parts: list[Any] = [self._mine]
        if total is not None:
            mine = b"".join(pack_tree(self._mine)) if counts else b""
            parts = [unpack_tree(one) for one in _gathered(mine, self._part, self._parts, total)]
        found = {}
        for name, one in self._metrics.items():
            rows = [part[name] for part in parts]  # part p has every so many batches, from batch p on
            batches = (row[number] for number in range(len(rows[0])) for row in rows if number < len(row))
            found[name] = one.value(batches)
        return found


def _gathered(mine: bytes, part: int, parts: int, total: Callable[[Tensor], Tensor]) -> list[bytes]:
    """Collective: the bytes of each part; of each, one worker gives `mine` and the others nothing."""
    sizes = torch.zeros(parts, dtype=torch.float64)
    sizes[part] = len(mine)
    lengths = [int(size) for size in total(sizes).tolist()]
    words = [-(-length // _WORD.itemsize) for length in lengths]
    begins = [sum(words[:number]) for number in range(parts + 1)]
    whole = torch.zeros(begins[-1], dtype=torch.float64)
    if mine:
        padded = mine + bytes(words[part] * _WORD.itemsize - len(mine))
        own = torch.from_numpy(np.frombuffer(padded, _WORD).astype(np.float64))
        whole[begins[part] : begins[part + 1]] = own
    found = total(whole).numpy().astype(_WORD)
    return [
        found[begin : begin + count].tobytes()[:length]
        for begin, count, length in zip(begins[:-1], words, lengths, strict=True)
    ]
