"""What happens while a placed model runs: tensors follow their modules, and every operation is logged.

    module's pre-hook      its tensors are copied to where it is placed
    function mode          operands of one operation are brought together; what has no kernel runs on the CPU

Both work above autograd: a copy is an operation like any other, and gradients go back through it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from manyhands.engine.device import moved
from manyhands.errors import UserError, format_bytes

__all__ = [
    "Entering",
    "ForwardPass",
    "Leaving",
    "PlacedOperation",
    "PlacementLog",
    "Placing",
    "brought",
    "num_bytes",
    "tensors_in",
]

_COPIES = {"to", "cpu", "cuda", "copy_"}
_CPU = torch.device("cpu")
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device}  # what most arguments are


@dataclass(slots=True)
class ForwardPass:
    """The state of a forward pass: the running modules, innermost last, and the log of what they did."""

    soft: bool
    log: PlacementLog = field(default_factory=lambda: PlacementLog())
    running: list[tuple[str, torch.device | None]] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)  # of the hooks that follow it

    @property
    def module(self) -> str:
        return self.running[-1][0] if self.running else ""

    @property
    def device(self) -> torch.device | None:
        return self.running[-1][1] if self.running else None


@dataclass(frozen=True, slots=True)
class Entering:
    """A forward pre-hook: pushes the module, and moves its inputs to its device."""

    course: ForwardPass
    name: str
    device: torch.device | None

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.course.running.append((self.name, self.device))
        if self.device is None:
            return args, kwargs
        return brought(args, self.device), brought(kwargs, self.device)


@dataclass(frozen=True, slots=True)
class Leaving:
    """A forward hook: pops the module."""

    course: ForwardPass

    def __call__(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self.course.running:
            self.course.running.pop()


class Placing(TorchFunctionMode):
    """Active while a placed model runs: brings the operands of each operation to one device, and logs it."""

    def __init__(self, course: ForwardPass) -> None:
        super().__init__()
        self._course = course

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name in {"__get__", "__set__", "__delete__"}:  # an attribute, as `x.shape`
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        if name in _COPIES:
            result = func(*args, **kwargs)
            if isinstance(result, Tensor):
                source = given[-1] if name == "copy_" else given[0]
                crossed = source.device != result.device
                if crossed or source.dtype != result.dtype:
                    self._note(name, result.device, [result], num_bytes([source]) if crossed else 0)
            return result
        devices = {one.device for one in given if one.dim()}  # a scalar on the CPU combines with any device
        target, copied = next(iter(devices), _CPU), 0
        if len(devices) > 1:
            # A tensor that is written in place stays where it is.
            own = self._course.device
            target = given[0].device if own is None or _writes(name) else own
            copied = num_bytes(one for one in given if one.device != target)
            args, kwargs = brought(args, target), brought(kwargs, target)
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:
            if target == _CPU:
                raise
            return self._on_the_cpu(func, name, args, kwargs, target, error)
        made = tensors_in(result)
        if made:
            self._note(name, made[0].device, made, copied)
        return result

    def _on_the_cpu(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: Any,
        device: torch.device,
        error: NotImplementedError,
    ) -> Any:
        """Run what has no kernel on `device` on the CPU, with its results back on the device."""
        module = self._course.module
        if not self._course.soft or _writes(name):
            fix = "write it without the underscore at its end" if _writes(name) else "or use soft=True"
            raise UserError(
                f"{module or 'the model'}: {name} has no kernel on {device}; place "
                f"{repr(module) if module else 'the model'} on 'cpu', {fix}"
            ) from error
        there = tensors_in((args, kwargs))
        result = func(*brought(args, _CPU), **brought(kwargs, _CPU))
        made = tensors_in(result)
        copied = num_bytes(one for one in there if one.device != _CPU) + num_bytes(made)
        self._note(name, _CPU, made, copied, f"no kernel on {device}")
        return brought(result, device)

    def _note(self, name: str, device: torch.device, made: list[Tensor], copied: int, note: str = "") -> None:
        self._course.log.rows.append(
            PlacedOperation(
                module=self._course.module,
                operation=name,
                device=str(device),
                shape=tuple(made[0].shape) if made else (),
                copied_bytes=copied,
                note=note,
            )
        )


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value if type(part) not in _PLAIN for tensor in tensors_in(part)]
    if type(value) not in _PLAIN and isinstance(value, Mapping):
        return tensors_in(list(value.values()))
    return []


def brought(value: Any, device: torch.device) -> Any:
    """`value` with all its tensors on `device`; unchanged where they are there. Mappings keep their class."""
    if all(tensor.device == device for tensor in tensors_in(value)):
        return value
    if isinstance(value, MutableMapping) and type(value) is not dict:  # as the outputs of some libraries are
        same = copy.copy(value)
        for name, part in value.items():
            same[name] = brought(part, device)
        return same
    return moved(value, device)


def _writes(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOperation:
    """One operation, as it was called in Python: `linear`, `matmul`, `to`."""

    module: str  # the module in whose `forward` it was called; empty for the model's own
    operation: str
    device: str  # where it ran; of a copy, where to
    shape: tuple[int, ...]  # of its result, of the first where there are several
    copied_bytes: int = 0  # what was copied from one device to another for it
    note: str = ""  # why it did not run where its module is placed; empty where it did


@dataclass(slots=True)
class PlacementLog:
    """The operations of the last forward pass, in order; `print` it, or iterate over its rows.

    Operations of backward run where those of forward did, and gradients pass every copy in reverse.
    """

    rows: list[PlacedOperation] = field(default_factory=list)  # of the last forward pass
    # What was placed elsewhere than it was asked for, and why; a sentence each
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[PlacedOperation]:
        return iter(self.rows)

    @property
    def copied_bytes(self) -> int:
        return sum(row.copied_bytes for row in self.rows)

    def note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    def __str__(self) -> str:
        table = [("module", "operation", "device", "shape", "copied", "")]
        for row in self.rows:
            copied = format_bytes(row.copied_bytes) if row.copied_bytes else ""
            shape = "×".join(map(str, row.shape)) or "scalar"
            table.append((row.module or "(model)", row.operation, row.device, shape, copied, row.note))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, cells, widths)) for cells in table]
        lines += [f"note: {sentence}" for sentence in self.notes]
        return "\n".join(line.rstrip() for line in lines)
