"""Who uses which unit of a model, and when: hooks, and the state machine that says what is fetched and dropped.

    forward     a layer begins: its unit is fetched, and, where the last step tells, the one after it; it ends: dropped
    backward    what autograd saved of a unit is asked for: fetched, the next one ahead; its gradient is whole: passed
                on, and the unit dropped
    anything    a parameter that is used outside of its layer's forward is fetched, and stays to the end of the step

The order in which units were needed is remembered for each course (training, evaluation), and is a guess, no more:
what was fetched for nothing is dropped at the end.

A parameter whose memory was given back must not be read: torch would read from nowhere, and the process would die. So
every way to it is watched: the forward of its layer, the forward of the module that has it, the attribute or the list
of parameters of that module, and what autograd saved of it for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.strategies.common.sharding.layer_units import Unit, UnitMemory

__all__ = ["Action", "Await", "Fetch", "Hand", "Release", "UnitFlow", "UnitVisits"]


@dataclass(frozen=True, slots=True)
class Action:
    """What a flow asks for, of one unit."""

    unit: int


class Fetch(Action):
    """Begin to fetch its values."""


class Await(Action):
    """Wait until its values are present."""


class Hand(Action):
    """Hand on its gradient."""


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
    """What was saved of a unit."""

    unit: int
    tensor: Tensor


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
        self._watching = False
        self._others: Any = None
        self._by_storage = {storage: one.unit.number for one in memories for storage in one.storages}
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
        before, self._watching, self._others = self._watching, True, others
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # or copies of all layers would stay to the end of a forward
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            torch.set_autocast_cache_enabled(caches)
            self._watching, self._others = before, None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, plain in self._plain:
            module._parameters = plain
        self._hooks, self._plain = [], []

    def _report(self, event: Callable[[int], list[Action]], unit: Unit, *_of_hook: Any) -> None:
        if self._watching:
            self._carry_out(event(unit.number))

    def _touch(self, *numbers: int) -> None:
        for number in numbers if self._watching else ():
            self._carry_out(self._flow.touch(number))

    def _pack(self, tensor: Tensor) -> Any:
        """What autograd saves of a unit is remembered by the unit, whose memory may go in between."""
        has_storage = tensor.layout is torch.strided
        number = self._by_storage.get(tensor.untyped_storage()._cdata) if has_storage else None
        if number is not None:
            return _OfUnit(number, tensor.detach())
        return tensor if self._others is None else self._others.pack(tensor)

    def _unpack(self, packed: Any) -> Any:
        if isinstance(packed, _OfUnit):
            self._carry_out(self._flow.touch(packed.unit))
            return packed.tensor
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
