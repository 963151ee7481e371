"""Optimizers whose parameters several owners step: which way fits one, and what it keeps."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from manyhands.data.randomness import preserved, seed_all
from manyhands.errors import UserError
from manyhands.facts import Stepping


def stepping_for(optimizer: Optimizer, ways: Sequence[Stepping], who: str) -> Stepping:
    """The first of `ways`, those of the strategy or setting `who`, in which the optimizer steps as it does together.

    UserError says why there is none.
    """
    why = ""
    for way in ways:
        why = cannot_step(optimizer, way)
        if not why:
            return way
    raise UserError(
        f"optimizer {type(optimizer).__name__} would train a different model under {who} than in one process: {why}; "
        "use strategy=mirrored or allreduce, or another optimizer, such as AdamW"
    )


def positions(optimizer: Optimizer) -> dict[int, int]:
    """By the identity of a parameter: its number in the optimizer's `state_dict()`."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {id(parameter): position for position, parameter in enumerate(parameters)}


# The trial of an optimizer. Copies of it step small stand-ins of the parameters: one copy all of them together, the
# others as a strategy would. An optimizer whose steps differ looks across what was cut, such as one that clips by the
# norm of all parameters (it needs them together) or one that orthogonalises a matrix (it needs whole tensors).
#
# Stand-ins have the number of dimensions and the settings of the real parameters, a few items each, and float64 values,
# so that rounding hides nothing. Their gradients keep their signs, or an optimizer that estimates its step size from
# how far it came would never change it; and their sizes vary widely, or a clip that begins at some norm would not be
# seen.

_ALIKE: Final = 2  # stand-ins of each kind: one that looks across parameters needs another to look at
_LONGEST: Final = (5, 4, 3)  # of the first dimensions; all others have 2
_SIZES: Final = (1.0, 1.0, 1.0, 1.0, 1e5, 1e-5, 1.0, 1.0, 1.0)  # of the gradients, by step
_CLOSE: Final = 1e-7  # of a step's length: rounding is far below, and what looks across is far above
_ROUNDING: Final = 1e-14  # of the values, which rounding may cost at every step
_SMALLEST_RATE: Final = 1e-6  # one of 0 would show nothing
_RATE: Final = 1e-3
_OWN: Final = {"param_groups", "state", "step"}  # a scheduler puts a `step` of its own around the optimizer's


class _StandIn(NamedTuple):
    real: Tensor
    group: int
    values: Tensor


def cannot_step(optimizer: Optimizer, way: Stepping) -> str:
    """A sentence on why `optimizer` does not step in this way as it does together; empty where it does.

    The optimizer itself, its parameters and the caller's generators are left alone. The answer is the same in every
    process that has the same parameters and settings.
    """
    if way is Stepping.TOGETHER:
        return ""
    chosen = _stand_ins(optimizer)
    if not chosen:
        return ""
    try:
        with preserved(), torch.no_grad():
            course, _ = _tried(optimizer, chosen, Stepping.TOGETHER)
    except Exception as error:  # whatever the user's class raises
        first = str(error).strip().partition("\n")[0]
        return f"a trial on small parameters with dense gradients raised {type(error).__name__} ({first})"
    try:
        with preserved(), torch.no_grad():
            apart, keeps_shapes = _tried(optimizer, chosen, way)
    except Exception:  # as above: what only a part of the parameters brings about
        return _LOOKS[way]
    if way is Stepping.IN_PIECES and not keeps_shapes:
        return "its state does not have the shape of its parameter and cannot be split with it"
    steps = course.diff(dim=0)
    allowed = _CLOSE * steps.abs() + _ROUNDING * torch.maximum(course[1:].abs(), course[:-1].abs())
    return "" if bool(((apart.diff(dim=0) - steps).abs() <= allowed).all()) else _LOOKS[way]


_LOOKS: Final = {
    Stepping.APART: "it combines parameters (in a trial, separate tensors gave other results than all together)",
    Stepping.IN_TURN: "it combines parameters or counts its calls (in a trial, one tensor after another gave other "
    "results than all together)",
    Stepping.IN_PIECES: "it combines the items of a tensor (in a trial, pieces gave other results than the tensor)",
}


def double_of(
    optimizer: Optimizer, groups: Mapping[int, Sequence[nn.Parameter]], shown: Mapping[Tensor, Tensor]
) -> Optimizer:
    """A copy of `optimizer` without state or hooks, of those parameter groups alone, by number.

    Wherever else it holds one of the real parameters, the copy holds what is `shown` for it, or the same.
    """
    double = object.__new__(type(optimizer))
    memo: dict[int, Any] = {
        id(one): shown.get(one, one) for group in optimizer.param_groups for one in group["params"]
    }

    def copied(value: Any) -> Any:
        with suppress(Exception):  # what cannot be copied, as a lock or a process group, stays what it is
            return copy.deepcopy(value, memo)
        return value

    double.param_groups = []
    for number, parameters in groups.items():
        group = optimizer.param_groups[number]
        settings = {name: copied(value) for name, value in group.items() if name != "params"}
        double.param_groups.append({"params": list(parameters), **settings})
    double.state = defaultdict(dict)
    memo[id(optimizer.param_groups)], memo[id(optimizer.state)] = double.param_groups, double.state
    for name, value in vars(optimizer).items():
        if name in _OWN:
            continue
        hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
        setattr(double, name, OrderedDict() if hooks else copied(value))
    return double


def step_plainly(optimizer: Optimizer) -> None:
    """One step without torch's wrapper, which profiles it and imports torch's compiler; call it without gradients."""
    step: Any = type(optimizer).step
    while getattr(step, "__wrapped__", None) and step.__code__.co_filename == torch_optimizer.__file__:
        step = step.__wrapped__
    step(optimizer)


def _stand_ins(optimizer: Optimizer) -> list[_StandIn]:
    generator = torch.Generator().manual_seed(1)
    counts: dict[Any, int] = {}
    chosen = []
    for number, group in enumerate(optimizer.param_groups):
        settings = tuple((name, _kind(value)) for name, value in group.items() if name != "params")
        for parameter in group["params"]:
            kind = (settings, parameter.dim(), parameter.dtype.is_complex)
            if not parameter.requires_grad or not parameter.numel() or counts.get(kind, 0) == _ALIKE:
                continue
            counts[kind] = counts.get(kind, 0) + 1
            longest = (*_LONGEST, *[2] * parameter.dim())
            shape = [min(pair) for pair in zip(parameter.shape, longest, strict=False)]
            dtype = torch.complex128 if parameter.dtype.is_complex else torch.float64
            values = torch.randn(shape, dtype=dtype, generator=generator)
            device = "cpu" if parameter.is_meta else parameter.device
            chosen.append(_StandIn(parameter, number, values.to(device)))
    return chosen


def _kind(value: Any) -> Any:
    """What of a setting may choose another branch of the code: a switch, a word, or whether a number is 0."""
    if value is None or isinstance(value, bool | str):
        return value
    return bool(value) if isinstance(value, int | float) else type(value)


def _tried(optimizer: Optimizer, chosen: Sequence[_StandIn], way: Stepping) -> tuple[Tensor, bool]:
    """The values of all stand-ins after each step, and whether the state kept the shapes of what was stepped."""
    seed_all(0)
    generator = torch.Generator().manual_seed(2)
    values = [one.values.clone() for one in chosen]

    def drawn() -> list[Tensor]:
        return [torch.randn(one.shape, dtype=one.dtype, generator=generator).to(one.device) for one in values]

    def now() -> Tensor:
        reals = (torch.view_as_real(one) if one.is_complex() else one for one in values)
        return torch.cat([one.reshape(-1).cpu() for one in reals])  # they may be on several devices

    slopes, parts = drawn(), []
    for number, value in enumerate(values):
        pieces = [slice(None)]
        if way is Stepping.IN_PIECES and value.numel() > 1:
            middle = (value.numel() + 2) // 3
            pieces = [slice(0, middle), slice(middle, None)]
        for piece in pieces:
            stepped = value.view(-1)[piece] if way is Stepping.IN_PIECES else value
            parts.append(_Part(number, piece, nn.Parameter(stepped)))
    owners = [parts] if way in (Stepping.TOGETHER, Stepping.IN_TURN) else [parts[0::2], parts[1::2]]
    doubles = [_double(optimizer, chosen, owned, together=way is Stepping.TOGETHER) for owned in owners]
    course = [now()]
    for size in _SIZES:
        gradients = [slope * size * one.abs() for slope, one in zip(slopes, drawn(), strict=True)]
        for part in parts:
            gradient = gradients[part.number].reshape(-1)[part.piece]
            part.parameter.grad = gradient.clone().view_as(part.parameter)
        for double in doubles:
            (_step_in_order if way is Stepping.IN_TURN else step_plainly)(double)
        course.append(now())
    keeps_shapes = all(
        not isinstance(value, Tensor) or value.shape in (parameter.shape, torch.Size())
        for double in doubles
        for parameter, state in double.state.items()
        if isinstance(parameter, Tensor)
        for value in state.values()
    )
    return torch.stack(course), keeps_shapes


class _Part(NamedTuple):
    """What is stepped of stand-in `number`: all items or a `piece`, in the memory of its values."""

    number: int
    piece: slice
    parameter: nn.Parameter


def _double(
    optimizer: Optimizer, chosen: Sequence[_StandIn], owned: Sequence[_Part], *, together: bool
) -> Optimizer:
    """The optimizer of these parts. Groups of which it has none are there and empty, as they are for an owner."""
    groups: dict[int, list[nn.Parameter]] = {one.group: [] for one in chosen}
    for part in owned:
        groups[chosen[part.number].group].append(part.parameter)
    shown = {chosen[part.number].real: part.parameter for part in owned} if together else {}
    double = double_of(optimizer, groups, shown)
    for part in owned:
        real = chosen[part.number].real
        begun = _begun(optimizer.state.get(real, {}), real, part.parameter)
        if begun:
            double.state[part.parameter] = begun
    for group in double.param_groups:
        rate = group.get("initial_lr", group.get("lr", _RATE))  # a schedule may begin with next to nothing
        rate = float(rate) if float(rate) >= _SMALLEST_RATE else _RATE
        if "lr" in group:
            group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate
    return double


def _begun(state: Mapping[str, Any], real: Tensor, stand_in: Tensor) -> dict[str, Any]:
    """The state that a constructor made for `real` (as Adagrad's does, of one value), in the shape of its stand-in.

    Empty where it has another shape: the optimizer makes it anew, or the trial fails and says so.
    """
    begun: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            begun[name] = copy.copy(value)
        elif value.shape == real.shape:
            first = 0.0 if value.is_meta or not value.numel() else value.reshape(-1)[0].item()
            begun[name] = torch.full_like(stand_in, first)
        elif value.dim() == 0:
            begun[name] = value.clone()
        else:
            return {}
    return begun


def _step_in_order(double: Optimizer) -> None:
    owned = [group["params"] for group in double.param_groups]
    for number, parameters in enumerate(owned):
        for one in parameters:
            for group in double.param_groups:
                group["params"] = []
            double.param_groups[number]["params"] = [one]
            step_plainly(double)
    for group, parameters in zip(double.param_groups, owned, strict=True):
        group["params"] = parameters


_DIMENSIONS = (3, 2, 4, 5)  # of the first dimensions of a stand-in; all others have 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """One tensor of the state of a parameter; `dtype` None for a value that is always None."""

    name: str
    shape: torch.Size
    dtype: torch.dtype | None

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize if self.dtype is not None else 0


def kept_by(optimizer: Optimizer) -> dict[nn.Parameter, list[KeptState]]:
    """By trainable parameter of `optimizer`: the state that it will have after its first step, to share it.

    Torch's optimizers make their state in the first step that reaches a parameter. To lay it out beforehand, one step
    is taken on stand-ins of a few items and as many dimensions: an optimizer that can be shared keeps tensors of the
    parameter's shape or of no dimension, so these have the names, types and shapes of the real ones. What it has
    already, from the constructor or from a checkpoint, counts as it is. The optimizer itself is left alone.
    """
    stand_ins: dict[
        tuple[int, torch.dtype, int], nn.Parameter
    ] = {}  # by group, type and number of dimensions
    stand_in_of: dict[nn.Parameter, nn.Parameter] = {}
    groups: dict[int, list[nn.Parameter]] = {}
    begun: dict[nn.Parameter, dict[str, Any]] = {}  # Adagrad's constructor makes its state, in torch 2.11
    for number, group in enumerate(optimizer.param_groups):
        groups[number] = []
        for parameter in (one for one in group["params"] if one.requires_grad):
            key = number, parameter.dtype, parameter.dim()
            if key not in stand_ins:
                shape = (*_DIMENSIONS, *[1] * parameter.dim())[: parameter.dim()]
                stand_in = stand_ins[key] = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype))
                stand_in.grad = torch.ones_like(stand_in)
                groups[number].append(stand_in)
                begun[stand_in] = _begun(optimizer.state.get(parameter, {}), parameter, stand_in)
            stand_in_of[parameter] = stand_ins[key]
    double = double_of(optimizer, groups, {})
    double.state.update({stand_in: state for stand_in, state in begun.items() if state})
    try:
        with torch.no_grad():
            step_plainly(double)
    except Exception as error:  # whatever the user's class raises
        raise UserError(
            f"optimizer {type(optimizer).__name__} failed in a trial step ({error}); use one whose step() needs no "
            "closure and accepts dense gradients, such as SGD or Adam"
        ) from error
    kept: dict[nn.Parameter, list[KeptState]] = {}
    for parameter, stand_in in stand_in_of.items():
        found = {
            name: _kept(optimizer, name, value, like.shape, parameter.shape)
            for state, like in ((double.state, stand_in), (optimizer.state, parameter))
            for name, value in state.get(like, {}).items()
        }
        kept[parameter] = list(found.values())
    return kept


def _kept(optimizer: Optimizer, name: str, value: Any, like: torch.Size, shape: torch.Size) -> KeptState:
    if value is None:
        return KeptState(name=name, shape=torch.Size(), dtype=None)
    kind = type(optimizer).__name__
    if not isinstance(value, Tensor):
        raise UserError(
            f"optimizer {kind} keeps its state {name!r} as a {type(value).__name__}, which cannot be shared; use a "
            "tensor, as in torch.zeros(())"
        )
    if value.shape not in (like, torch.Size()):
        raise UserError(
            f"optimizer {kind} keeps a state {name!r} of shape {tuple(value.shape)}, which cannot be shared; it must "
            "have the shape of its parameter, or be a scalar"
        )
    return KeptState(name=name, shape=shape if value.shape == like else torch.Size(), dtype=value.dtype)
