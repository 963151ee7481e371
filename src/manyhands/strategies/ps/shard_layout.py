"""The layout of the parameters: all dense ones in one flat buffer, of which each shard has one range.

    elementwise    a a a a b│b c c c d        cut at any line: shard 0 has the first part of b, shard 1 the rest
    whole          a a a a d│b b c c c        any other optimizer: tensors stay whole, d has moved to its shard

A worker has two such buffers, one of values and one of gradients, and a server keeps its range of the values: what
travels is always one range, whole, and never a parameter. The entries of the buffer begin at multiples of 64 bytes in
registration order; where tensors stay whole, the largest goes first to the shard that has least (LPT, Graham 1969), and
those of a shard lie together. Tied weights are one entry. Frozen parameters and buffers never travel.

Row-sparse tables lie apart: their rows are spread over the shards by hashing (`placement`), and travel by row.

Pure: the same model and optimizer give the same layout in every process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.errors import UserError, check_count, nearest
from manyhands.facts import Stepping
from manyhands.native.dtypes import SUMMED
from manyhands.native.segment import round_up
from manyhands.strategies.common.sharding.optimizers import positions, stepping_for
from manyhands.strategies.common.sharding.sliced_optimizer import MergedState, Part, Piece
from manyhands.strategies.common.tables.row_tables import Placement, place, require_lazy
from manyhands.wire.flat_layout import LINE_BYTES, least_loaded, side_by_side, trainable

_TABLE_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A dense parameter: from byte `offset` of the buffer on."""

    name: str
    aliases: tuple[str, ...]  # all its names in the `state_dict()`: several where weights are tied
    shape: torch.Size
    dtype: torch.dtype
    offset: int
    position: int | None  # its number in the `state_dict()` of the optimizer, if that has it

    @property
    def end(self) -> int:
        return self.offset + self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A row-sparse parameter: its first dimension counts rows, of `width` items each."""

    name: str
    aliases: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    position: int

    @property
    def width(self) -> int:
        return self.shape[1:].numel()

    def placed(self, shards: int) -> Placement:
        return place(self.shape[0], shards)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardRange:
    """A shard's range of some flat buffer, as tensors; make it once for memory that is used again and again."""

    memory: Tensor  # the bytes, as they travel
    pieces: tuple[Tensor, ...]  # by piece: of the parameter's shape where the shard has all of it, else flat
    runs: tuple[Tensor, ...]  # the same memory in as few tensors as the types allow, padding included; flat


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """All dense trainable parameters of a model in one buffer, and the shards' parts of it; `of` makes it."""

    entries: tuple[Entry, ...]  # in registration order; pieces count them
    bounds: tuple[tuple[int, int], ...]  # by shard: its first byte, and the one after its last
    pieces: tuple[tuple[Piece, ...], ...]
    """By shard: what it has, in registration order; at most one piece of each parameter."""
    tables: tuple[Table, ...] = ()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        shards: int,
        sparse: Collection[str] = (),
        ways: Sequence[Stepping] = (Stepping.IN_PIECES, Stepping.APART),
    ) -> FlatLayout:
        """Lay out `model` for `shards` shards; the parameters named in `sparse` are row-sparse tables.

        `ways` says how several shards have the optimizer step, as `Ps.stepping` does.

        A UserError names an optimizer that cannot be shared out, or a parameter of the wrong kind.
        """
        check_count("shards", shards)
        if sparse:
            require_lazy(optimizer)
        named = trainable(model)
        names = [name for names in named.values() for name in names]
        for name in sparse:
            if name not in names:
                raise UserError(
                    f"sparse names {name!r}, which is not a trainable parameter; {nearest(name, names)}"
                )
        is_table = {parameter: any(name in sparse for name in names) for parameter, names in named.items()}
        dense = [parameter for parameter in named if not is_table[parameter]]
        way = stepping_for(optimizer, ways, f"ps servers={shards}") if shards > 1 else Stepping.TOGETHER
        place = _keep_whole if way is Stepping.APART else _cut
        offsets, bounds = place([parameter.nbytes for parameter in dense], shards)
        position_of = positions(optimizer)
        entries = tuple(
            _entry(named[parameter], parameter, offset, position_of.get(id(parameter)))
            for parameter, offset in zip(dense, offsets, strict=True)
        )
        tables = tuple(
            _table(named[parameter], parameter, position_of.get(id(parameter)))
            for parameter in named
            if is_table[parameter]
        )
        pieces = tuple(_pieces(entries, bounds, shard) for shard in range(shards))
        return cls(entries=entries, bounds=bounds, pieces=pieces, tables=tables)

    @property
    def shards(self) -> int:
        return len(self.bounds)

    @property
    def num_bytes(self) -> int:
        return self.bounds[-1][1]

    def range_bytes(self, shard: int) -> int:
        begin, end = self.bounds[shard]
        return end - begin

    def flag_bytes(self, shard: int) -> int:
        """The size of the presence flags before a gradient: one byte per piece, filled up to a line."""
        return round_up(len(self.pieces[shard]), LINE_BYTES)

    def flags(self, shard: int, reached: Collection[str]) -> Tensor:
        """The presence flags of a gradient that reached the parameters of these names."""
        names = (self.entries[piece.parameter].name for piece in self.pieces[shard])
        flags = bytes(name in reached for name in names)
        return torch.tensor(tuple(flags.ljust(self.flag_bytes(shard), b"\0")), dtype=torch.uint8)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The parameters in a flat buffer of bytes, by name and in their shapes; tied ones under the first name."""
        _check_capacity(buffer, self.num_bytes, "the flat buffer")
        return {
            entry.name: buffer[entry.offset : entry.end].view(entry.dtype).view(entry.shape)
            for entry in self.entries
        }

    def part(self, buffer: Tensor, shard: int) -> ShardRange:
        _check_capacity(buffer, self.num_bytes, "the flat buffer")
        begin, end = self.bounds[shard]
        return self.range_in(buffer[begin:end], shard)

    def range_in(self, memory: Tensor, shard: int) -> ShardRange:
        """A shard's range in memory that holds nothing else, such as a received message."""
        _check_capacity(memory, self.range_bytes(shard), f"the range of shard {shard}")
        begin, _ = self.bounds[shard]
        pieces: list[Tensor] = []
        starts: list[tuple[int, torch.dtype]] = []
        for piece in self.pieces[shard]:
            entry = self.entries[piece.parameter]
            offset = entry.offset + piece.begin * entry.dtype.itemsize - begin
            num_bytes = (piece.end - piece.begin) * entry.dtype.itemsize
            view = memory[offset : offset + num_bytes].view(entry.dtype)
            is_whole = view.numel() == entry.shape.numel()
            pieces.append(view.view(entry.shape) if is_whole else view)
            if num_bytes:
                starts.append((offset, entry.dtype))
        starts.sort(key=lambda start: start[0])
        return ShardRange(memory=memory, pieces=tuple(pieces), runs=_runs(memory, starts))


def _runs(memory: Tensor, starts: Sequence[tuple[int, torch.dtype]]) -> tuple[Tensor, ...]:
    """Neighbours of one type joined; each begins at a line, so whole items lie between two of them."""
    changes = [
        start for number, start in enumerate(starts) if number == 0 or starts[number - 1][1] != start[1]
    ]
    ends = [offset for offset, _ in changes[1:]] + [memory.numel()]
    return tuple(
        memory[begin:end].view(dtype)
        for (begin, dtype), end in zip(changes, ends[: len(changes)], strict=True)
    )


def _check_capacity(memory: Tensor, num_bytes: int, what: str) -> None:
    if memory.dtype != torch.uint8 or memory.shape != (num_bytes,):
        raise ValueError(f"{what} needs {num_bytes} bytes, not {tuple(memory.shape)} of {memory.dtype}")


def _cut(sizes: Sequence[int], shards: int) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Where each entry begins, and the ranges of the shards: the lines divided evenly, wherever that falls."""
    offsets, end = side_by_side(sizes)
    cuts = [end // LINE_BYTES * shard // shards * LINE_BYTES for shard in range(shards + 1)]
    return offsets, tuple(pairwise(cuts))


def _keep_whole(sizes: Sequence[int], shards: int) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """The same with every entry in one shard, as even as the sizes allow."""
    owners = least_loaded([round_up(size, LINE_BYTES) for size in sizes], shards)
    offsets, end, cuts = [0] * len(sizes), 0, [0]
    for shard in range(shards):
        own = [number for number, owner in enumerate(owners) if owner == shard]
        begins, end = side_by_side((sizes[number] for number in own), begin=end)
        cuts.append(end)
        for number, begin in zip(own, begins, strict=True):
            offsets[number] = begin
    return offsets, tuple(pairwise(cuts))


def _entry(names: Sequence[str], parameter: nn.Parameter, offset: int, position: int | None) -> Entry:
    if parameter.dtype not in SUMMED:
        raise UserError(
            f"parameter {names[0]!r} is {parameter.dtype}; a parameter server holds float32, float64, bfloat16 and "
            "float16"
        )
    return Entry(
        name=names[0],
        aliases=tuple(names),
        shape=parameter.shape,
        dtype=parameter.dtype,
        offset=offset,
        position=position,
    )


def _table(names: Sequence[str], parameter: nn.Parameter, position: int | None) -> Table:
    if parameter.dim() == 0 or parameter.dtype not in _TABLE_DTYPES:
        raise UserError(
            f"sparse names {names[0]!r}, a {parameter.dtype} of shape {tuple(parameter.shape)}; a table needs rows of "
            "float32 or float64"
        )
    if position is None:
        raise UserError(
            f"sparse names {names[0]!r}, which the optimizer does not have; a table must be one of its parameters"
        )
    return Table(
        name=names[0], aliases=tuple(names), shape=parameter.shape, dtype=parameter.dtype, position=position
    )


def _pieces(entries: Sequence[Entry], bounds: Sequence[tuple[int, int]], shard: int) -> tuple[Piece, ...]:
    first, last = bounds[shard]
    pieces = []
    for number, entry in enumerate(entries):
        begin, end = max(first, entry.offset), min(last, entry.end)
        if begin < end:
            item = entry.dtype.itemsize
            pieces.append(Piece(number, (begin - entry.offset) // item, (end - entry.offset) // item))
        elif entry.end == entry.offset and shard == 0:  # nothing of it travels, but it has an owner too
            pieces.append(Piece(number, 0, 0))
    return tuple(pieces)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardState:
    """The state of one shard; `model` and `optimizer` are as a checkpoint's `Snapshot` takes them.

    All shards' states form the `state_dict()`s of model and optimizer that a single process would have, so a
    checkpoint is the same whatever strategy wrote it, and any number of shards can resume from it.
    """

    model: dict[str, Tensor]  # by parameter or table: the shard's part, flat unless it is all of it
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
    layout: FlatLayout, shard: int, model: Mapping[str, Tensor], optimizer: Mapping[str, Any], batches: int
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
