"""A worker's memory that the servers of its host share: its parameters, its gradients, and which of them it reached.

    flags of shard 0 · flags of shard 1 · … │ values, flat │ gradients, flat

The model's parameters are views of the values, so a pull is one copy by the server and none by the worker. A push is
none at all: the server reads the gradients where backward left them. Who may write when follows from the protocol: a
shard writes its range of the values only between the worker's Read and its own answer, and the worker writes gradients
only after every shard has answered the Read behind the push before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.memory.segment import PAGE, Segment, round_up
from manyhands.server.layout import FlatLayout, ShardRange

__all__ = ["AreaPart", "WorkerArea"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AreaPart:
    """One shard's part of a worker's area."""

    flags: Tensor
    values: Tensor
    """The range of the values, as bytes."""

    gradient: ShardRange


class WorkerArea:
    """The area in this process: made by the worker, attached by its servers; a segment of no name."""

    def __init__(self, segment: Segment, layout: FlatLayout) -> None:
        """Take over `segment`, which must have the size that this layout gives it."""
        expected = _num_bytes(layout)
        if segment.num_bytes != expected:
            segment.close()
            raise ValueError(f"a worker's area of this task has {expected} bytes, not {segment.num_bytes}")
        self.segment = segment
        self._layout = layout
        begin = _flags_bytes(layout)
        self.values = segment.tensor(begin, layout.num_bytes, torch.uint8)
        self.gradients = segment.tensor(begin + _value_bytes(layout), layout.num_bytes, torch.uint8)

    @classmethod
    def create(cls, layout: FlatLayout) -> WorkerArea:
        """Reserve it."""
        return cls(Segment.create(_num_bytes(layout), "a worker's parameters and gradients"), layout)

    def part(self, shard: int) -> AreaPart:
        """What one shard reads and writes."""
        return AreaPart(
            flags=self.flags(shard),
            values=self._layout.part(self.values, shard).memory,
            gradient=self._layout.part(self.gradients, shard),
        )

    def flags(self, shard: int) -> Tensor:
        """One byte per piece of the shard: whether the last backward reached it."""
        offset = sum(self._layout.flag_bytes(before) for before in range(shard))
        return self.segment.tensor(offset, self._layout.flag_bytes(shard), torch.uint8)

    def close(self) -> None:
        """Let go; the memory goes with its last holder."""
        self.segment.close()


def _flags_bytes(layout: FlatLayout) -> int:
    return round_up(sum(layout.flag_bytes(shard) for shard in range(layout.shards)), PAGE)


def _value_bytes(layout: FlatLayout) -> int:
    return round_up(layout.num_bytes, PAGE)


def _num_bytes(layout: FlatLayout) -> int:
    # at least a page: a model of tables alone has nothing here, and memory of no bytes can not be shared
    return max(PAGE, _flags_bytes(layout) + 2 * _value_bytes(layout))
