"""Whether an optimizer takes the same steps where its parameters are stepped apart: found by trying it.

Copies of the optimizer step small stand-ins of the parameters: one copy all of them together, the others as a strategy
would. An optimizer whose steps differ looks across what was cut, such as one that clips by the norm of all parameters
(it needs them together) or one that orthogonalises a matrix (it needs whole tensors).

Stand-ins have the number of dimensions and the settings of the real parameters, a few items each, and float64 values,
so that rounding hides nothing. Their gradients keep their signs, or an optimizer that estimates its step size from
how far it came would never change it; and their sizes vary widely, or a clip that begins at some norm would not be
seen.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from manyhands.data.randomness import preserved, seed_all
from manyhands.facts import Stepping

__all__ = ["cannot_step", "double_of", "step_plainly"]

_ALIKE: Final = 2  # stand-ins of each kind: one that looks across parameters needs another to look at
_LONGEST: Final = (5, 4, 3)  # of the first dimensions; all others have 2
_SIZES: Final = (1.0, 1.0, 1.0, 1.0, 1e5, 1e-5, 1.0, 1.0, 1.0)  # of the gradients, by step
_CLOSE: Final = 1e-7  # of a step's length: rounding is far below, and what looks across is far above
_ROUNDING: Final = 1e-14  # of the values, which rounding may cost at every step
_SMALLEST_RATE: Final = 1e-6  # one of 0 would show nothing
_RATE: Final = 1e-3
_OWN: Final = {"param_groups", "state", "step"}  # a scheduler puts a `step` of its own around the optimizer's


@dataclass(frozen=True, slots=True, eq=False)
class _StandIn:
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
            together, _ = _tried(optimizer, chosen, Stepping.TOGETHER)
    except Exception as error:  # whatever the user's class raises
        told = str(error).strip().partition("\n")[0]
        return f"a trial on small parameters with dense gradients raised {type(error).__name__} ({told})"
    try:
        with preserved(), torch.no_grad():
            apart, keeps_shapes = _tried(optimizer, chosen, way)
    except Exception:  # as above: what only a part of the parameters brings about
        return _LOOKS[way]
    if way is Stepping.IN_PIECES and not keeps_shapes:
        return "it keeps state that has not the shape of its parameter, and so cannot be cut with it"
    return "" if _are_close(together, apart) else _LOOKS[way]


_LOOKS: Final = {
    Stepping.APART: "it looks across parameters (in a trial, tensors apart were not stepped as all together are)",
    Stepping.IN_TURN: "it looks across parameters or counts its calls (in a trial, one tensor after another was not "
    "stepped as all together are)",
    Stepping.IN_PIECES: "it looks across the items of a tensor (in a trial, pieces were not stepped as the whole is)",
}


def double_of(
    optimizer: Optimizer,
    groups: Mapping[int, Sequence[nn.Parameter]],
    shown: Mapping[Tensor, Tensor],
) -> Optimizer:
    """A copy of `optimizer` without state or hooks, of those parameter groups alone, by number.

    Wherever else it holds one of the real parameters, the copy holds what is `shown` for it, or the same.
    """
    double = object.__new__(type(optimizer))
    memo: dict[int, Any] = {
        id(one): shown.get(one, one) for group in optimizer.param_groups for one in group["params"]
    }
    double.param_groups = []
    for number, parameters in groups.items():
        group = optimizer.param_groups[number]
        settings = {name: _copied(value, memo) for name, value in group.items() if name != "params"}
        double.param_groups.append({"params": list(parameters), **settings})
    double.state = defaultdict(dict)
    memo[id(optimizer.param_groups)], memo[id(optimizer.state)] = double.param_groups, double.state
    for name, value in vars(optimizer).items():
        if name in _OWN:
            continue
        hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
        setattr(double, name, OrderedDict() if hooks else _copied(value, memo))
    return double


def step_plainly(optimizer: Optimizer) -> None:
    """One step without torch's wrapper, which profiles it and imports torch's compiler; call it without gradients."""
    step: Any = type(optimizer).step
    while getattr(step, "__wrapped__", None) and step.__code__.co_filename == torch_optimizer.__file__:
        step = step.__wrapped__
    step(optimizer)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    with suppress(Exception):  # what cannot be copied, such as a lock or a process group, stays what it is
        return copy.deepcopy(value, memo)
    return value


def _stand_ins(optimizer: Optimizer) -> list[_StandIn]:
    """Of parameters that differ in their number of dimensions or in the settings of their group."""
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


def _tried(optimizer: Optimizer, chosen: Sequence[_StandIn], way: Stepping) -> tuple[list[Tensor], bool]:
    """The values of all stand-ins after each step, and whether the state kept the shapes of what was stepped."""
    seed_all(0)
    generator = torch.Generator().manual_seed(2)
    values = [one.values.clone() for one in chosen]
    slopes = [_random(value, generator) for value in values]
    parts = [
        _Part(number, piece, nn.Parameter(value.view(-1)[piece] if way is Stepping.IN_PIECES else value))
        for number, value in enumerate(values)
        for piece in (_halves(value) if way is Stepping.IN_PIECES else [slice(None)])
    ]
    owners = [parts] if way in (Stepping.TOGETHER, Stepping.IN_TURN) else [parts[0::2], parts[1::2]]
    doubles = [_double(optimizer, chosen, owned, together=way is Stepping.TOGETHER) for owned in owners]
    course = [torch.cat([_real(value) for value in values]).cpu()]
    for size in _SIZES:
        gradients = [slope * size * _random(slope, generator).abs() for slope in slopes]
        for part in parts:
            gradient = gradients[part.number].reshape(-1)[part.piece]
            part.parameter.grad = gradient.clone().view_as(part.parameter)
        for double in doubles:
            _step(double, in_turn=way is Stepping.IN_TURN)
        course.append(torch.cat([_real(value) for value in values]).cpu())
    keeps_shapes = all(
        not isinstance(value, Tensor) or value.shape in (parameter.shape, torch.Size())
        for double in doubles
        for parameter, state in double.state.items()
        if isinstance(parameter, Tensor)
        for value in state.values()
    )
    return course, keeps_shapes


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
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
        begun = _begun(
            optimizer.state.get(chosen[part.number].real, {}), chosen[part.number].real, part.parameter
        )
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


def _step(double: Optimizer, *, in_turn: bool) -> None:
    if not in_turn:
        step_plainly(double)
        return
    owned = [group["params"] for group in double.param_groups]
    for number, parameters in enumerate(owned):
        for one in parameters:
            for group in double.param_groups:
                group["params"] = []
            double.param_groups[number]["params"] = [one]
            step_plainly(double)
    for group, parameters in zip(double.param_groups, owned, strict=True):
        group["params"] = parameters


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, generator=generator).to(like.device)


def _halves(value: Tensor) -> list[slice]:
    """Uneven ones; one piece of a single item."""
    middle = (value.numel() + 2) // 3
    return [slice(0, middle), slice(middle, None)] if value.numel() > 1 else [slice(None)]


def _real(value: Tensor) -> Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).reshape(-1).clone()


def _are_close(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two courses from the same values take the same steps, but for rounding."""
    for before, after, others_before, others_after in zip(one, one[1:], other, other[1:], strict=False):
        step = after - before
        allowed = _CLOSE * step.abs() + _ROUNDING * torch.maximum(after.abs(), before.abs())
        if not bool(((others_after - others_before - step).abs() <= allowed).all()):
            return False
    return True
