"""Who uses which unit of a model, and when: hooks that tell a listener, and keep anyone from reading what is not there.

A parameter whose memory was given back must not be read: torch would read from nowhere, and the process would die. So
every way to it is watched: the forward of its layer, the forward of the module that has it, the attribute or the list
of parameters of that module, and what autograd saved of it for backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from manyhands.strategies.common.sharding.flow import Action, UnitFlow
from manyhands.strategies.common.sharding.layer_units import Unit, UnitMemory

__all__ = ["FlowListener", "SavedTensors", "UnitListener", "UnitVisits"]


class UnitListener(Protocol):
    """Receives the uses of units, by number, and has their values present when it returns."""

    def enter(self, unit: int) -> None:
        """A layer's forward begins."""

    def leave(self, unit: int) -> None:
        """A layer's forward has ended."""

    def touch(self, unit: int) -> None:
        """A parameter is about to be read outside its layer's forward."""


class FlowListener(ABC):
    """Receives the uses of units, and carries out the actions of their flow."""

    _flow: UnitFlow

    @abstractmethod
    def _carry_out(self, actions: Iterable[Action]) -> None:
        """Carry out these actions in order."""

    def enter(self, unit: int) -> None:
        """A layer's forward begins."""
        self._carry_out(self._flow.enter(unit))

    def leave(self, unit: int) -> None:
        """A layer's forward has ended."""
        self._carry_out(self._flow.leave(unit))

    def touch(self, unit: int) -> None:
        """A parameter is used outside of its layer's forward."""
        self._carry_out(self._flow.touch(unit))


class SavedTensors(Protocol):
    """Storage for what autograd saves."""

    def pack(self, tensor: Tensor) -> Any:
        """What is kept in place of a tensor, or itself."""

    def unpack(self, packed: Any) -> Any:
        """Return the saved tensor."""


class _OfUnit(NamedTuple):
    """What was saved of a unit."""

    unit: int
    tensor: Tensor


class UnitVisits:
    """Hooks on `model`, from construction to `close`; they tell `listener` while `watching`."""

    def __init__(self, model: nn.Module, memories: Sequence[UnitMemory], listener: UnitListener) -> None:
        self._listener = listener
        self._watching = False
        self._others: SavedTensors | None = None
        self._by_storage = {storage: one.unit.number for one in memories for storage in one.storages}
        self._hooks: list[Any] = []
        self._plain: list[tuple[nn.Module, dict[str, Any]]] = []
        units = [memory.unit for memory in memories]
        unit_of = {parameter: unit.number for unit in units for parameter in unit.parameters}
        for unit in units:
            if unit.module is not None:
                self._follow(unit.module, unit)
        for module in model.modules():
            own = {
                name: unit_of[parameter]
                for name, parameter in module._parameters.items()
                if parameter is not None
            }
            if own:
                self._guard(module, own)

    @contextmanager
    def watching(self, others: SavedTensors | None = None) -> Iterator[None]:
        """While the model is computed with, forward and backward; `others` takes what autograd saves besides units."""
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
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        for module, plain in self._plain:
            module._parameters = plain
        self._hooks, self._plain = [], []

    def _follow(self, module: nn.Module, unit: Unit) -> None:
        def enter(_module: nn.Module, _arguments: Any) -> None:
            if self._watching:
                self._listener.enter(unit.number)

        def leave(_module: nn.Module, _arguments: Any, _result: Any) -> None:
            if self._watching:
                self._listener.leave(unit.number)

        self._hooks.append(module.register_forward_pre_hook(enter))
        self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def _guard(self, module: nn.Module, own: Mapping[str, int]) -> None:
        """Have every way to the parameters of one module pass here."""
        numbers = sorted(set(own.values()))

        def touch_all(*_arguments: Any) -> None:
            for number in numbers:
                self._touch(number)

        self._hooks.append(module.register_forward_pre_hook(touch_all))
        self._plain.append((module, module._parameters))
        module._parameters = _Guarded(module._parameters, own, self._touch, touch_all)

    def _touch(self, number: int) -> None:
        if self._watching:
            self._listener.touch(number)

    def _pack(self, tensor: Tensor) -> Any:
        """What autograd saves of a unit is remembered by the unit, whose memory may go in between."""
        number = self._by_storage.get(_storage_of(tensor))
        if number is not None:
            return _OfUnit(number, tensor.detach())
        return tensor if self._others is None else self._others.pack(tensor)

    def _unpack(self, packed: Any) -> Any:
        if isinstance(packed, _OfUnit):
            self._listener.touch(packed.unit)
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


def _storage_of(tensor: Tensor) -> int:
    """The identity of the memory that a tensor lies in; 0 of one that has none."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0
