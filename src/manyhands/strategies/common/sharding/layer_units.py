"""A model in units: groups of parameters that are fetched and freed together, because one layer uses them.

A unit is a child of the model that holds parameters; lists and sequences of layers are taken apart, and so is a child
that holds most of the model. What belongs to no single layer makes the last unit, which stays from its first use to
the end of a step: parameters of the model itself, and those that layers of several units share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from manyhands.data.batches import split
from manyhands.errors import UserError
from manyhands.native.dtypes import SUMMED
from manyhands.strategies.common.sharding.sliced_optimizer import Piece
from manyhands.wire.flat_layout import BucketLayout, bucket_of

__all__ = ["Unit", "UnitMemory", "move_buffers", "piece_ranges", "pieces_in", "require_apart", "units_of"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
REST = "what layers share"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Unit:
    """Some parameters of a model, laid out in one row for each of their types; slots number `parameters`."""

    number: int
    name: str
    module: nn.Module | None
    """Whose forward uses them; None where that is not one module, so that they stay through a step."""
    parameters: tuple[nn.Parameter, ...]
    layouts: tuple[BucketLayout, ...]

    @property
    def num_bytes(self) -> int:
        return sum(layout.count * layout.dtype.itemsize for layout in self.layouts)

    @property
    def trained(self) -> list[int]:
        return [number for number, one in enumerate(self.parameters) if one.requires_grad]


def units_of(model: nn.Module) -> list[Unit]:
    """The units of a model, each parameter in exactly one; a UserError names a parameter that has no place."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in named.items():
        if parameter.dtype not in SUMMED or parameter.layout is not torch.strided:
            raise UserError(
                f"parameter {name!r} is {parameter.dtype}, {parameter.layout}; parameters that are split are float32, "
                "float64, bfloat16 or float16, and dense"
            )
    total = sum(parameter.nbytes for parameter in model.parameters())
    layers = list(_layers(model, "", total))
    owners: dict[nn.Parameter, set[str]] = {}
    for name, module in layers:
        for parameter in module.parameters():
            owners.setdefault(parameter, set()).add(name)
    every: list[tuple[str, nn.Module | None, list[nn.Parameter]]] = [
        (name, module, [one for one in module.parameters() if owners[one] == {name}])
        for name, module in layers
    ]
    every.append((REST, None, [one for one in model.parameters() if len(owners.get(one, ())) != 1]))
    units = []
    for number, (name, of_module, own) in enumerate(unit for unit in every if unit[2]):
        by_dtype: dict[torch.dtype, list[tuple[int, int]]] = {}
        for index, parameter in enumerate(own):
            by_dtype.setdefault(parameter.dtype, []).append((index, parameter.numel()))
        layouts = tuple(bucket_of(dtype, tensors) for dtype, tensors in by_dtype.items())
        units.append(Unit(number=number, name=name, module=of_module, parameters=tuple(own), layouts=layouts))
    return units


def _layers(module: nn.Module, prefix: str, total: int) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        size = sum(parameter.nbytes for parameter in child.parameters())
        if not size:
            continue
        path = f"{prefix}{name}"
        branches = sum(any(True for _ in one.parameters()) for one in child.children())
        if isinstance(child, _CONTAINERS) or (2 * size > total and branches > 1):
            yield from _layers(child, f"{path}.", total)
        else:
            yield path, child


class UnitMemory:
    """Where the whole of a unit is while it is used; its parameters are views of that, with or without memory behind.

    What autograd has saved of a parameter is a view as well, so it is there again when the values are.
    """

    def __init__(self, unit: Unit, device: torch.device) -> None:
        self.unit = unit
        self.flats = [torch.empty(layout.count, dtype=layout.dtype, device=device) for layout in unit.layouts]
        # By which a tensor that lies here is known
        self.storages = frozenset(flat.untyped_storage()._cdata for flat in self.flats)
        self.is_here = True

    def adopt(self) -> None:
        for layout, flat in zip(self.unit.layouts, self.flats, strict=True):
            for number, items in layout.views(flat):
                parameter = self.unit.parameters[number]
                parameter.data = items.view(parameter.shape)

    def make_room(self) -> None:
        if not self.is_here:
            for flat in self.flats:
                flat.untyped_storage().resize_(flat.numel() * flat.element_size())
            self.is_here = True

    def let_go(self) -> None:
        if self.is_here:
            for flat in self.flats:
                flat.untyped_storage().resize_(0)
            self.is_here = False


def piece_ranges(layout: BucketLayout, owners: int, *, whole: bool) -> list[range]:
    """Which items of a row each owner keeps: equal parts, or, where tensors stay `whole`, the nearest to that."""
    parts = [split(layout.count, owner, owners) for owner in range(owners)]
    if not whole:
        return parts
    begins = [slot.offset for slot in layout.slots]
    borders = [0]
    for part in parts[1:]:
        border = min([*begins, layout.count], key=lambda begin: abs(begin - part.start))
        borders.append(max(border, borders[-1]))
    return [range(begin, end) for begin, end in pairwise([*borders, layout.count])]


def pieces_in(layout: BucketLayout, owned: range) -> Iterator[tuple[Piece, int]]:
    """The pieces of parameters among the items that one owner keeps, and where each begins among these."""
    for slot in layout.slots:
        begin, end = max(slot.offset, owned.start), min(slot.offset + slot.count, owned.stop)
        if begin < end:
            piece = Piece(parameter=slot.parameter, begin=begin - slot.offset, end=end - slot.offset)
            yield piece, begin - owned.start


def require_apart(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """UserError names two parameters in the same memory, which one shared copy cannot represent."""
    extents = sorted(
        (one.data_ptr(), one.data_ptr() + one.nbytes, name) for name, one in named if one.numel()
    )
    for (_, end, one), (begin, _, other) in pairwise(extents):
        if begin < end:
            raise UserError(
                f"parameters {one!r} and {other!r} are different parameters in the same memory, which would come "
                "apart; tie them by assigning one Parameter to both"
            )


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
