"""The state of a shard, and of all of them together: what a backup is installed from and what a checkpoint holds.

A shard's state is that of its pieces. All shards' states make the `state_dict()`s of model and optimizer that a single
process would have, so a checkpoint is the same whatever strategy wrote it, and any number of shards goes on from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.server.layout import Entry, FlatLayout, Table

__all__ = ["ShardState", "merge", "split"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardState:
    """What one shard holds; `model` and `optimizer` are as a checkpoint's `Snapshot` takes them."""

    model: dict[str, Tensor]
    """By parameter or table: the shard's part of it, in its shape where that is all of it and flat otherwise."""

    optimizer: dict[str, Any]
    """A `state_dict()` whose state is that of these parts."""

    batches: int
    """How far the scheduler is."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a parameter, or of the optimizer's state for it; the rows of a dense one are its items."""

    name: str
    shape: torch.Size
    position: int | None
    rows: slice | Tensor
    count: int
    width: int = 1

    @property
    def is_whole(self) -> bool:
        return self.count * self.width == self.shape.numel()

    def cut(self, value: Any) -> Any:
        """A copy of this part of a whole; what has another shape than the parameter is not cut."""
        if not isinstance(value, Tensor):
            return value
        if self.is_whole or value.shape != self.shape:
            return value.detach().clone()
        return value.detach().reshape(-1, self.width)[self.rows].reshape(-1).clone()

    def lay_into(self, whole: Tensor | None, value: Tensor) -> Tensor:
        """The whole with this part in it; the part itself where that is all."""
        if self.is_whole or value.shape != (self.count * self.width,):
            return value
        if whole is None:
            whole = torch.empty(self.shape, dtype=value.dtype)
        whole.view(-1, self.width)[self.rows] = value.view(-1, self.width)
        return whole


def _parts(layout: FlatLayout, shard: int) -> list[_Part]:
    parts = []
    for piece in layout.pieces[shard]:
        entry = layout.entries[piece.parameter]
        items = slice(piece.begin, piece.end)
        parts.append(_Part(entry.name, entry.shape, entry.position, items, piece.end - piece.begin))
    for table in layout.tables:
        rows = table.placed(layout.shards).rows(shard)
        parts.append(_Part(table.name, table.shape, table.position, rows, len(rows), table.width))
    return parts


def merge(
    layout: FlatLayout, states: Sequence[ShardState], model: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The `state_dict()`s of model and optimizer from the states of all shards, in their order.

    `model` is the `state_dict()` of any worker's model: buffers and frozen parameters come from there. Tensors that
    one shard has whole are its own, not copies.
    """
    values: dict[str, Tensor] = {}
    slots: dict[int, dict[str, Any]] = {}
    for shard, state in enumerate(states):
        for part in _parts(layout, shard):
            values[part.name] = part.lay_into(values.get(part.name), state.model[part.name])
            if part.position is None:
                continue
            for key, value in state.optimizer["state"].get(part.position, {}).items():
                merged = slots.setdefault(part.position, {})
                if isinstance(value, Tensor):
                    merged[key] = part.lay_into(merged.get(key), value)
                else:
                    merged.setdefault(key, value)
    everything: tuple[Entry | Table, ...] = (*layout.entries, *layout.tables)
    by_alias = {alias: values[one.name] for one in everything for alias in one.aliases}
    first = states[0].optimizer
    others = {key: value for key, value in first["state"].items() if not isinstance(key, int)}
    return (
        {name: by_alias.get(name, value) for name, value in model.items()},
        {**first, "state": {**others, **dict(sorted(slots.items()))}},
    )


def split(
    layout: FlatLayout,
    shard: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    batches: int,
) -> ShardState:
    """A shard's part of the `state_dict()`s of model and optimizer, as copies; `batches` have been trained on."""
    parts = _parts(layout, shard)
    others = {key: value for key, value in optimizer["state"].items() if not isinstance(key, int)}
    slots = {
        part.position: {key: part.cut(value) for key, value in optimizer["state"][part.position].items()}
        for part in parts
        if part.position in optimizer["state"]
    }
    return ShardState(
        model={part.name: part.cut(model[part.name]) for part in parts},
        optimizer={**optimizer, "state": {**others, **slots}},
        batches=batches,
    )
