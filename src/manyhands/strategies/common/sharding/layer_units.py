"""A model in units: groups of parameters that are fetched and freed together, because one layer uses them.

A unit is a child of the model that holds parameters; lists and sequences of layers are taken apart, and so is a child
that holds most of the model. What belongs to no single layer makes the last unit, which stays from its first use to
the end of a step: parameters of the model itself, and those that layers of several units share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.data.batches import split
from manyhands.errors import UserError
from manyhands.native.dtypes import SUMMED
from manyhands.strategies.common.sharding.sliced_optimizer import Piece
from manyhands.wire.flat_layout import BucketLayout, bucket_of

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
REST = "what layers share"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Unit:
    """Some parameters of a model, laid out in one row for each of their types; slots number `parameters`."""

    number: int
    name: str
    module: nn.Module | None  # whose forward uses them; None if not of one: they stay through a step
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
                f"parameter {name!r} is {parameter.dtype}, {parameter.layout}; split parameters must be float32, "
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


class Spot(NamedTuple):
    """Where a storage belongs."""

    unit: int
    row: int  # of its type, among those of the unit


class UnitMemory:
    """Where the whole of a unit is while it is used; its parameters are views of that, with or without memory behind.

    What autograd has saved of a parameter is a view as well, so it is there again when the values are.
    """

    def __init__(self, unit: Unit, device: torch.device) -> None:
        self.unit, self._device = unit, device
        self.flats = self._rows()
        self._known: dict[int, Spot] = {}
        self.is_here = True

    def adopt(self) -> None:
        for layout, flat in zip(self.unit.layouts, self.flats, strict=True):
            for number, items in layout.views(flat):
                parameter = self.unit.parameters[number]
                parameter.data = items.view(parameter.shape)

    def list_in(self, known: dict[int, Spot]) -> None:
        """From here on a tensor that lies here is known by its storage."""
        self._known = known
        known.update(self._spots())

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

    def _rows(self) -> list[Tensor]:
        layouts = self.unit.layouts
        return [torch.empty(layout.count, dtype=layout.dtype, device=self._device) for layout in layouts]

    def _spots(self) -> dict[int, Spot]:
        rows = enumerate(self.flats)
        return {flat.untyped_storage()._cdata: Spot(self.unit.number, row) for row, flat in rows}


class LentMemory(UnitMemory):
    """For code that is not ours: whoever still has a view of a unit that was let go has values of its own.

    A parameter that is not here reads as NaN. Torch would read the memory that `UnitMemory` has given back, and the
    process would die.
    """

    def list_in(self, known: dict[int, Spot]) -> None:
        self._known = known
        if self.is_here:
            known.update(self._spots())

    def make_room(self) -> None:
        if not self.is_here:
            self.flats, self.is_here = self._rows(), True
            self._known.update(self._spots())
            self.adopt()

    def let_go(self) -> None:
        if self.is_here:
            for storage in self._spots():
                self._known.pop(storage, None)
            self.flats, self.is_here = [flat.new_empty(0) for flat in self.flats], False
            for parameter in self.unit.parameters:
                parameter.data = parameter.new_full((), torch.nan).expand(parameter.shape)


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
                f"parameters {one!r} and {other!r} share memory but are different parameters; tie them by assigning "
                "one Parameter to both"
            )


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


# Who uses which unit of a model, and when: hooks, and the state machine that says what is fetched and dropped. The
# order in which units were needed in the last step is a guess at the next: what came for nothing is dropped at the end.
# A parameter whose memory was given back must not be read: torch would read from nowhere, and the process would die. So
# every way to it is watched: the forward of its layer, the forward of the module that has it, the attribute or the list
# of parameters of that module, and what autograd saved of it for backward.
@dataclass(frozen=True, slots=True)
class Action:
    """What a flow asks for, of one unit."""

    unit: int


class Fetch(Action):
    """Begin to fetch its values: a layer begins, or what autograd saved of it is needed."""


class Await(Action):
    """Wait until its values are present."""


class Hand(Action):
    """Hand on its gradient, which is whole."""


class Release(Action):
    """Free its values."""


class UnitFlow:
    """The state of all units, without a tensor; `lasting` ones stay from their first use to the end of a step."""

    def __init__(self, count: int, lasting: Collection[int] = (), *, ahead: bool = True) -> None:
        self._lasting, self._ahead = frozenset(lasting), ahead
        self._here: set[int] = set()
        self._coming: set[int] = set()
        self._held: set[int] = set()
        self._inside = [0] * count
        self._backward, self._course = False, ""
        self._order: list[int] = []
        self._last: dict[str, list[int]] = {}  # by course: the order of its last step

    def begin(self, course: str) -> None:
        self._course, self._order, self._backward = course, [], False

    def backward(self) -> None:
        """From here on what a layer's forward needs stays, as where it is computed again for its backward."""
        self._backward = True

    def enter(self, unit: int) -> list[Action]:
        self._inside[unit] += 1
        return self._need(unit)

    def leave(self, unit: int) -> list[Action]:
        self._inside[unit] -= 1
        if self._backward or unit in self._held or unit in self._lasting:
            return []
        return self._drop(unit)

    def touch(self, unit: int) -> list[Action]:
        """A parameter is used outside its layer's forward, or backward needs what was saved of it."""
        if self._inside[unit]:
            return []
        self._held.add(unit)
        return self._need(unit)

    def complete(self, unit: int) -> list[Action]:
        if not self._inside[unit]:
            self._held.discard(unit)
        return [Hand(unit), *self._drop(unit)]

    def end(self) -> list[Action]:
        self._last[self._course] = self._order
        self._inside = [0] * len(self._inside)
        self._backward = False
        waited: list[Action] = [Await(unit) for unit in sorted(self._coming)]
        left = sorted(self._here | self._coming)
        self._here, self._coming, self._held = set(), set(), set()
        return [*waited, *(Release(unit) for unit in left)]

    def _need(self, unit: int) -> list[Action]:
        if unit in self._here:
            return []
        actions: list[Action] = [] if unit in self._coming else [Fetch(unit)]
        self._order.append(unit)
        last, position = self._last.get(self._course, []), len(self._order)
        as_before = self._ahead and last[position - 1 : position] == self._order[-1:]
        if as_before and position < len(last):  # what came after this one in the last step of the course
            follower = last[position]
            if follower not in self._here and follower not in self._coming:
                actions.append(Fetch(follower))
                self._coming.add(follower)
        self._coming.discard(unit)
        self._here.add(unit)
        return [*actions, Await(unit)]

    def _drop(self, unit: int) -> list[Action]:
        if self._inside[unit] or unit not in self._here:
            return []
        self._here.discard(unit)
        return [Release(unit)]


class _OfUnit(NamedTuple):
    """What was saved of a unit: a view of one of its rows."""

    spot: Spot
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class UnitVisits:
    """Hooks on `model`, from construction to `close`; while `watching`, they report the uses of units to their `flow`.

    `carry_out` does what that asks for, in order, so that the values of a unit are present when it returns.
    """

    def __init__(
        self,
        model: nn.Module,
        memories: Sequence[UnitMemory],
        flow: UnitFlow,
        carry_out: Callable[[Iterable[Action]], None],
    ) -> None:
        self._flow, self._carry_out = flow, carry_out
        self.is_watching = False  # whether uses are reported
        self._others: Any = None
        self._memories = memories
        self._known: dict[int, Spot] = {}
        for memory in memories:
            memory.list_in(self._known)
        self._hooks: list[Any] = []
        self._plain: list[tuple[nn.Module, dict[str, Any]]] = []
        units = [memory.unit for memory in memories]
        unit_of = {parameter: unit.number for unit in units for parameter in unit.parameters}
        for unit in units:
            if unit.module is not None:
                enter, leave = (partial(self._report, one, unit) for one in (flow.enter, flow.leave))
                self._hooks.append(unit.module.register_forward_pre_hook(enter))
                self._hooks.append(unit.module.register_forward_hook(leave, always_call=True))
        for module in model.modules():  # every way to the parameters of a module passes here
            own = {name: unit_of[one] for name, one in module._parameters.items() if one is not None}
            if own:
                touch_all = partial(self._touch, *sorted(set(own.values())))
                self._hooks.append(module.register_forward_pre_hook(lambda *_, touch=touch_all: touch()))
                self._plain.append((module, module._parameters))
                module._parameters = _Guarded(module._parameters, own, self._touch, touch_all)

    @contextmanager
    def watching(self, others: Any = None) -> Iterator[None]:
        """While the model is computed with, forward and backward.

        `others` has `pack(tensor)` and `unpack(packed)` for what autograd saves besides units.
        """
        before, self.is_watching, self._others = self.is_watching, True, others
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # or copies of all layers would stay to the end of a forward
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            torch.set_autocast_cache_enabled(caches)
            self.is_watching, self._others = before, None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, plain in self._plain:
            module._parameters = plain
        self._hooks, self._plain = [], []

    def _report(self, event: Callable[[int], list[Action]], unit: Unit, *_of_hook: Any) -> None:
        if self.is_watching:
            self._carry_out(event(unit.number))

    def _touch(self, *numbers: int) -> None:
        for number in numbers if self.is_watching else ():
            self._carry_out(self._flow.touch(number))

    def _pack(self, tensor: Tensor) -> Any:
        """What autograd saves of a unit is remembered by the unit, whose memory may go in between."""
        has_storage = tensor.layout is torch.strided
        spot = self._known.get(tensor.untyped_storage()._cdata) if has_storage else None
        if spot is not None:
            return _OfUnit(spot, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return tensor if self._others is None else self._others.pack(tensor)

    def _unpack(self, packed: Any) -> Any:
        if isinstance(packed, _OfUnit):
            self._carry_out(self._flow.touch(packed.spot.unit))
            row = self._memories[packed.spot.unit].flats[packed.spot.row].view(packed.dtype)
            return row.as_strided(packed.shape, packed.stride, packed.offset)
        return packed if self._others is None else self._others.unpack(packed)


class _Guarded(dict[str, Any]):
    """The parameters of a module by name, which are asked for before they are looked at."""

    def __init__(
        self,
        plain: Mapping[str, Any],
        units: Mapping[str, int],
        touch: Callable[[int], None],
        touch_all: Callable[[], None],
    ) -> None:
        super().__init__(plain)
        self._units, self._touch, self._touch_all = units, touch, touch_all

    def __getitem__(self, name: str) -> Any:
        number = self._units.get(name)
        if number is not None:
            self._touch(number)
        return super().__getitem__(name)

    def items(self) -> Any:
        self._touch_all()
        return super().items()

    def values(self) -> Any:
        self._touch_all()
        return super().values()
