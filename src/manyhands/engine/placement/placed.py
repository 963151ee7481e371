"""`place`: modules of a model on several devices, with copies between them and a log of what ran where.

    module's pre-hook      its tensors are copied to where it is placed
    function mode          operands of one operation are brought together; what has no kernel runs on the CPU

Both work above autograd: a copy is an operation like any other, and gradients go back through it.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from manyhands.engine.device import moved
from manyhands.errors import UserError, format_bytes

AUTO = "auto"
_CPU = torch.device("cpu")
_SHOWN = 8  # names of modules in an error
_COPIES = {"to", "cpu", "cuda", "copy_"}
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device}  # what most arguments are


def place(
    model: nn.Module, where: Mapping[str, str | None] | str | None = None, *, soft: bool = True
) -> Placed:
    """Place the modules of a model on devices, by patterns of their names; gives the same model, placed.

        mh.place(model, {"tokens": "cpu", "blocks.*": "cuda:0"})

    `where` is a device for the whole model, or one for each pattern, which means the modules that it matches and all
    that is in them; the pattern with the most letters wins. `"auto"`, or None, is the GPU if there is one, and the CPU
    otherwise. A module that no pattern reaches stays where it is.

    Inputs are copied to where a module is, and the model's output to where its input came from; gradients follow. With
    `soft`, a device that is not there and an operation that has no kernel on its device are replaced by the CPU, and
    `model.log` says so; otherwise they are errors. `model.to(device)` changes dtypes, but moves nothing from its place.
    """
    if isinstance(model, Placed):  # undo it: restore the class, and leave every module where it is now
        for handle in model._placement.handles:
            handle.remove()
        del model._placement
        model.__class__ = _own_class(model)  # type: ignore[assignment]
    if hasattr(model, "log"):
        raise UserError(
            f"{type(model).__name__} already has an attribute `log`, which a placed model needs for its placement "
            "log; rename it, or place the modules inside"
        )
    course = ForwardPass(soft=soft)
    named = dict(model.named_modules())
    if isinstance(where, Mapping):
        found = {pattern: _found(device, repr(pattern), course) for pattern, device in where.items()}
        patterns = assigned([name for name in named if name], {pattern: pattern for pattern in where})
        asked = {name: found[pattern] for name, pattern in patterns.items()}
    else:
        asked = dict.fromkeys(named, _found(where, "the model", course))
    devices = _agreed(named, asked, course)
    _move(named, devices)
    for name, module in named.items():
        course.handles += [
            module.register_forward_pre_hook(partial(course.enter, name, devices[name]), with_kwargs=True),
            module.register_forward_hook(course.leave, always_call=True),
        ]
    model.__class__ = _placed_class(type(model))
    assert isinstance(model, Placed)
    model._placement = course
    return model


_CLASSES: dict[type[nn.Module], type[Placed]] = {}


class Placed(nn.Module):
    """A model whose modules are placed: its own class with a log, made by `place`."""

    _placement: ForwardPass

    @property
    def log(self) -> PlacementLog:
        """Where each operation of the last forward pass ran, and what was copied."""
        return self._placement.log

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; the output is moved to the device of the first input tensor."""
        course = self._placement
        course.log.rows.clear()
        course.running.clear()
        given = tensors_in((args, kwargs))
        with _Placing(course):
            output = super().__call__(*args, **kwargs)
            return brought(output, given[0].device) if given else output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Placed:
        """Apply `to`, `cuda`, `double` and the like, without moving anything between devices."""

        def in_its_place(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            if changed.device == tensor.device:
                return changed
            self.log.note(f"to({changed.device}) moved nothing: the model is placed")
            return tensor.to(changed.dtype)

        super()._apply(in_its_place, recurse)  # type: ignore[no-untyped-call]
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (_own_class(self),), self.__dict__


def _placed_class(kind: type[nn.Module]) -> type[Placed]:
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"Placed{kind.__name__}", (Placed, kind), {})
    return _CLASSES[kind]


def _own_class(model: Placed) -> type[nn.Module]:
    found: type[nn.Module] = type(model).__bases__[1]
    return found


def _blank(kind: type[nn.Module]) -> Placed:
    """An empty object for `pickle` or `copy` to fill: placed classes are made on demand, in no module."""
    placed = _placed_class(kind)
    return placed.__new__(placed)


def _found(name: str | torch.device | None, what: str, course: ForwardPass) -> torch.device:
    if name is None or name == AUTO:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU
    device = known_device(name, what)
    if device.type != "cuda" or torch.cuda.is_available():  # else torch would warn about it
        with suppress(RuntimeError, AssertionError, ImportError):  # as many as there are kinds of devices
            return torch.empty(0, device=device).device  # as tensors on it report it: `cuda:0` for `cuda`
    if not course.soft:
        raise UserError(
            f"placement of {what} on {device}: this machine has no such device; place it on 'cpu' or 'auto', or "
            "use soft=True"
        )
    course.log.note(f"{what} is on cpu because this machine has no {device}")
    return _CPU


def known_device(name: str | torch.device, what: str) -> torch.device:
    """The device of this name, which need not be there; UserError where no machine has one. `what` is to be on it."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"placement of {what} on {name!r}: torch has no such device; allowed: auto, cpu, cuda, cuda:0, ..."
        ) from error


def _agreed(
    named: Mapping[str, nn.Module], asked: Mapping[str, torch.device], course: ForwardPass
) -> dict[str, torch.device | None]:
    """The device of each module: as requested, but parameters that several modules share are in one place.

    A module that no pattern reaches is where its parameters are; None where it has none and runs where its tensors
    are.
    """
    places: dict[int, tuple[str, torch.device]] = {}
    agreed: dict[str, torch.device | None] = {}
    for name in sorted(named, key=lambda name: name not in asked):  # those that were spoken of first
        own = [*named[name].parameters(recurse=False), *named[name].buffers(recurse=False)]
        device = asked.get(name, own[0].device if own else None)
        for first, its in (places[id(one)] for one in own if id(one) in places):
            if device != its and name in asked:
                sharing = f"{name} and {first} share a parameter"
                if not course.soft:
                    raise UserError(
                        f"placement of {name!r} on {device} and {first!r} on {its}: {sharing}; place both on one "
                        "device, or use soft=True"
                    )
                course.log.note(f"{name} is on {its} because {sharing}")
            device = its
        agreed[name] = device
        if device is not None:
            places.update((id(one), (name, device)) for one in own if id(one) not in places)
    return agreed


def _move(named: Mapping[str, nn.Module], devices: Mapping[str, torch.device | None]) -> None:
    new: dict[int, nn.Parameter] = {}
    for name, module in named.items():
        device = devices[name]
        if device is None:
            continue
        before = dict(module.named_parameters(recurse=False))
        for key, parameter in before.items():
            if id(parameter) in new:
                setattr(module, key, new[id(parameter)])
        module._apply(partial(Tensor.to, device=device), recurse=False)  # type: ignore[no-untyped-call]
        for key, parameter in module.named_parameters(recurse=False):
            new[id(before[key])] = parameter


def assigned(names: Sequence[str], where: Mapping[str, str]) -> dict[str, str]:
    """For each name of a module the device that `where` gives it; a name that no pattern reaches is left out.

    A pattern (as of file names: `*`, `?`, `[0-3]`) means the modules it matches and all that is in them. Where several
    reach a module, the one with the most letters that are no wildcards wins: `blocks.0` over `blocks.*` over `*`; of
    equals, the last.
    """
    for pattern in where:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern.replace("*", "").strip("."), names, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            there = f"{', '.join(names[:_SHOWN])}{', …' * (len(names) > _SHOWN)}"
            raise UserError(f"placement of {pattern!r}: no module has this name; there are {there}{hint}")
    found = {}
    # A stable sort: of equals the last stays last.
    for pattern in sorted(where, key=lambda pattern: len(re.sub(r"\[[^]]*\]|[*?]", "", pattern))):
        for name in names:
            parts = name.split(".")
            if any(fnmatchcase(".".join(parts[:depth]), pattern) for depth in range(1, len(parts) + 1)):
                found[name] = where[pattern]
    return found


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

    def enter(
        self,
        name: str,
        device: torch.device | None,
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.running.append((name, device))
        return (args, kwargs) if device is None else (brought(args, device), brought(kwargs, device))

    def leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self.running:
            self.running.pop()


class _Placing(TorchFunctionMode):
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
