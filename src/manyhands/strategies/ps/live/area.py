"""A worker's memory that the servers of its host share: its parameters, its gradients, and which of them it reached.

    flags of shard 0 · flags of shard 1 · … │ gradients, flat │ values, flat

The model's parameters are views of the values, so a pull is one copy by the server and none by the worker. A push is
none at all: the server reads the gradients where backward left them. The protocol says who may write when: a
shard writes its range of the values only between the worker's Read and its own answer, and the worker writes gradients
only after every shard has answered the Read behind the push before.

Where no shard takes a step before every worker has pushed, a pull needs no copy either: all workers then read the
values where the shards keep them (`values` is given), and the area ends with the gradients.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.native.segment import PAGE, Segment, reserve, round_up
from manyhands.strategies.ps.shard_layout import FlatLayout, ShardRange


class SharedParameters:
    """The single flat copy of the dense parameters that all processes of a host share."""

    def __init__(self, segment: Segment, layout: FlatLayout) -> None:
        """Take over memory that begins with the parameters; whatever follows them is left alone."""
        self._segment = segment
        self.values = self._segment.tensor(0, layout.num_bytes, torch.uint8)
        self._parts = [self.values[begin:end] for begin, end in layout.bounds]

    def part(self, shard: int) -> Tensor:
        return self._parts[shard]

    def close(self) -> None:
        self._parts.clear()
        self._segment.close()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AreaPart:
    """One shard's part of a worker's area."""

    flags: Tensor
    values: Tensor  # the range of the values, as bytes
    gradient: ShardRange


class WorkerArea:
    """The area as mapped in this process: created by the worker, attached by its servers; an unnamed segment."""

    def __init__(self, segment: Segment, layout: FlatLayout, values: Tensor | None = None) -> None:
        """Take over `segment`, whose size must match the layout; `values` is given if the values lie elsewhere."""
        expected = _num_bytes(layout, with_values=values is None)
        if segment.num_bytes != expected:
            segment.close()
            raise ValueError(f"a worker's shared memory must have {expected} bytes, not {segment.num_bytes}")
        self.segment = segment
        self._layout = layout
        begin = _flags_bytes(layout)
        self.gradients = segment.tensor(begin, layout.num_bytes, torch.uint8)
        self.is_in_place = values is not None
        if values is None:
            values = segment.tensor(begin + _flat_bytes(layout), layout.num_bytes, torch.uint8)
        self.values = values

    @classmethod
    def create(cls, layout: FlatLayout, values: Tensor | None = None) -> WorkerArea:
        num_bytes = _num_bytes(layout, with_values=values is None)
        return cls(Segment.create(num_bytes, "a worker's parameters and gradients"), layout, values)

    @classmethod
    def shared(cls, descriptor: int, layout: FlatLayout) -> WorkerArea:
        """That of an inherited descriptor, which the first of its holders sizes."""
        num_bytes = _num_bytes(layout, with_values=True)
        if not os.fstat(descriptor).st_size:
            reserve(descriptor, num_bytes, "a worker's parameters and gradients")
        return cls(Segment.attach(os.dup(descriptor)), layout)

    def part(self, shard: int) -> AreaPart:
        begin, end = self._layout.bounds[shard]
        gradient = self._layout.part(self.gradients, shard)
        return AreaPart(flags=self.flags(shard), values=self.values[begin:end], gradient=gradient)

    def flags(self, shard: int) -> Tensor:
        """One byte per piece of the shard: whether the last backward reached it."""
        offset = sum(self._layout.flag_bytes(before) for before in range(shard))
        return self.segment.tensor(offset, self._layout.flag_bytes(shard), torch.uint8)

    def close(self) -> None:
        """Release the mapping; the memory is freed with its last holder."""
        self.segment.close()


def _flags_bytes(layout: FlatLayout) -> int:
    return round_up(sum(layout.flag_bytes(shard) for shard in range(layout.shards)), PAGE)


def _flat_bytes(layout: FlatLayout) -> int:
    return round_up(layout.num_bytes, PAGE)


def _num_bytes(layout: FlatLayout, *, with_values: bool) -> int:
    # at least a page: a model of tables alone has nothing here, and memory of no bytes cannot be shared
    return max(PAGE, _flags_bytes(layout) + (1 + with_values) * _flat_bytes(layout))
