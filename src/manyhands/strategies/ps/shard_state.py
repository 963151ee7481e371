"""The state of a shard, and of all of them together: what a backup is installed from and what a checkpoint holds.

A shard's state is that of its pieces. All shards' states form the `state_dict()`s of model and optimizer that a
single process would have, so a checkpoint is the same whatever strategy wrote it, and any number of shards can
resume from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from manyhands.strategies.common.sharding.sliced_optimizer import MergedState, Part
from manyhands.strategies.ps.shard_layout import Entry, FlatLayout, Table

__all__ = ["ShardState", "merge", "split"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardState:
    """The state of one shard; `model` and `optimizer` are as a checkpoint's `Snapshot` takes them."""

    model: dict[str, Tensor]
    """By parameter or table: the shard's part of it, in its shape where that is all of it and flat otherwise."""

    optimizer: dict[str, Any]  # a `state_dict()` whose state is that of these parts
    batches: int  # the number of batches by which the scheduler has advanced


class _Named(NamedTuple):
    """A shard's part of one parameter or table."""

    name: str
    position: int | None  # the parameter's number in the optimizer's `state_dict()`
    part: Part


def _parts(layout: FlatLayout, shard: int) -> list[_Named]:
    parts = []
    for piece in layout.pieces[shard]:
        entry = layout.entries[piece.parameter]
        part = Part(entry.shape, slice(piece.begin, piece.end), piece.end - piece.begin)
        parts.append(_Named(entry.name, entry.position, part))
    for table in layout.tables:
        rows = table.placed(layout.shards).rows(shard)
        parts.append(_Named(table.name, table.position, Part(table.shape, rows, len(rows), table.width)))
    return parts


def merge(
    layout: FlatLayout, states: Sequence[ShardState], model: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The `state_dict()`s of model and optimizer from the states of all shards, in their order.

    `model` is the `state_dict()` of any worker's model: buffers and frozen parameters come from there. Tensors
    that one shard has in full are not copied.
    """
    values: dict[str, Tensor] = {}
    merged = MergedState()
    for shard, state in enumerate(states):
        for name, position, part in _parts(layout, shard):
            values[name] = part.lay_into(values.get(name), state.model[name])
            kept = state.optimizer["state"].get(position)
            if (
                position is not None and kept
            ):  # SGD without momentum keeps nothing, and says so with an empty dict
                merged.add(position, kept, part)
    everything: tuple[Entry | Table, ...] = (*layout.entries, *layout.tables)
    by_alias = {alias: values[one.name] for one in everything for alias in one.aliases}
    first = states[0].optimizer
    others = {key: value for key, value in first["state"].items() if not isinstance(key, int)}
    return (
        {name: by_alias.get(name, value) for name, value in model.items()},
        {**first, "state": {**others, **merged.to_dict()}},
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
        position: {key: part.cut(value) for key, value in optimizer["state"][position].items()}
        for _, position, part in parts
        if position in optimizer["state"]
    }
    return ShardState(
        model={name: part.cut(model[name]) for name, _, part in parts},
        optimizer={**optimizer, "state": {**others, **slots}},
        batches=batches,
    )
