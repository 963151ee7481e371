"""Slices the modules of a network in place, following a plan, by a table of the classes for each module type."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from manyhands.errors import UserError
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.strategies.common.grid.held import Cut
from manyhands.strategies.tensor.moves import LayerTraffic, Port, SliceState
from manyhands.strategies.tensor.sliced_images import KINDS, why_not
from manyhands.strategies.tensor.sliced_layers import LayerSlice, SlicedModule
from manyhands.strategies.tensor.slicing_plan import Plan, SliceKind, Slicing, find_plan


def sliced_class(name: str, module: nn.Module, how: Slicing) -> type[SlicedModule]:
    """The class that slices `module` as `how` says; UserError where its type or its settings rule that out."""
    known = KINDS.get(type(module), {})
    if how.kind not in known:
        ways = ", ".join(kind.value for kind in known)
        raise UserError(
            f"tensor_plan: module {name!r} is a {type(module).__name__}, which cannot be {how.kind.value}; "
            f"{f'it can be {ways}' if ways else 'leave it whole'}"
        )
    if how.kind is SliceKind.SPATIAL and (reason := why_not(module)):
        instead = "use 'whole' or channels_out"
        raise UserError(f"tensor_plan: module {name!r} cannot be spatial: {reason}; {instead}")
    return known[how.kind]


class CutParameter(NamedTuple):
    """A parameter of which this slice has a part."""

    whole: nn.Parameter
    local: nn.Parameter
    cut: Cut


class Sliced:
    """The sliced modules of a model; a parameter that several of them share is cut once."""

    def __init__(self, plan: Plan, group: LinkGroup) -> None:
        self.plan, self._group = plan, group
        self.cut: dict[int, CutParameter] = {}
        """Cut parameters, by the identity of the whole one; parameters not listed are whole on every slice."""
        self.buffers: dict[str, Cut] = {}  # of the buffers of which this slice has a part, by name
        self.traffic: dict[str, LayerTraffic] = {}  # what each layer has sent so far, by its name
        self.state = SliceState()
        self._before: list[tuple[nn.Module, type[nn.Module], dict[str, Any], dict[str, Any]]] = []

    def undo(self) -> None:
        """The modules are what they were; the values of parameters that were cut are not theirs any more."""
        for module, kind, parameters, buffers in reversed(self._before):
            module.__class__ = kind
            del module.sliced
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        self._before = []

    def slice(self, name: str, module: nn.Module, how: Slicing) -> None:
        kind = sliced_class(name, module, how)
        cuts = _cuts(name, module, how, self._group.world)
        traffic = self.traffic[name] = LayerTraffic(how=str(how))
        sliced = LayerSlice(
            port=Port(self._group, name, traffic, self.state),
            how=how,
            shapes={key: value.shape for key, value in module.named_parameters(recurse=False)},
            cuts=cuts,
        )
        kept = {key: module._buffers[key] for key in cuts if key in module._buffers}
        self._before.append((module, type(module), dict(module._parameters), kept))
        for key, found in cuts.items():
            whole, mine = module._parameters.get(key), found[self._group.index]
            buffer = module._buffers.get(key)
            if whole is not None:
                module._parameters[key] = self._local(name, whole, mine)
            elif buffer is not None:
                module._buffers[key] = mine.of(buffer)
                self.buffers[f"{name}.{key}" if name else key] = mine
        for below, (submodule, its_how) in kind.beside(module, how).items():
            self.slice(f"{name}.{below}" if name else below, submodule, its_how)
        # Changing the class in place, as torch's parametrizations do, keeps all references to the module valid.
        module.__class__ = kind
        module.sliced = sliced  # type: ignore[assignment]

    def _local(self, name: str, whole: nn.Parameter, cut: Cut) -> nn.Parameter:
        known = self.cut.get(id(whole))
        if known is None:
            local = nn.Parameter(cut.of(whole.detach()), requires_grad=whole.requires_grad)
            known = self.cut[id(whole)] = CutParameter(whole, local, cut)
        elif known.cut != cut:
            raise UserError(
                f"tensor_plan: module {name!r} shares a parameter that another module slices differently; slice "
                "both by vocabulary, or use 'whole' for both"
            )
        return known.local


def slice_modules(
    model: nn.Module, group: LinkGroup, plan: Plan | None = None, *, part: Sequence[nn.Module] | None = None
) -> Sliced:
    """Slice the modules of `model` in place over the members of `group`; find a plan where none is given.

    With `part` (some modules of the model's chain, as in a pipeline stage), only these modules and their submodules
    are sliced. All members must call this with the same model. References to the model or its modules stay valid and
    see the slice. References to a parameter in `cut` (an optimizer's, say) must be replaced by its `local`.
    """
    plan = find_plan(model, group.world, part) if plan is None else plan
    sliced = Sliced(plan, group)
    named = dict(model.named_modules())
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}  # by parameter: who has it, and its name there
    inside = (one.named_modules() for one in ([model] if part is None else part))
    for path, module in chain.from_iterable(inside):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((path, module, name))
    for name, how in plan.items():
        if how.kind is not SliceKind.WHOLE and group.world > 1:
            sliced.slice(name, named[name], how)
    for cut in sliced.cut.values():
        for path, module, name in owners[id(cut.whole)]:
            if module._parameters[name] is cut.whole:
                raise UserError(
                    f"tensor_plan: module {path or 'the model itself'!r} shares a parameter that another module "
                    "slices; slice it too, or use 'whole' for both"
                )
    return sliced


def check_plan(model: nn.Module, slices: int) -> None:
    if slices == 1:
        return  # nothing is sliced
    modules = dict(model.named_modules())
    for name, how in find_plan(model, slices).items():
        if how.kind is not SliceKind.WHOLE:
            _cuts(name, modules[name], how, slices)


def _cuts(name: str, module: nn.Module, how: Slicing, slices: int) -> dict[str, tuple[Cut, ...]]:
    cuts = sliced_class(name, module, how).cuts(module, how, slices)
    for key in cuts:
        if key not in module._parameters and key not in module._buffers:
            raise UserError(f"tensor_plan: module {name!r} computes its {key} from others; use 'whole'")
    if any(cut.begin == cut.end for found in cuts.values() for cut in found):
        raise UserError(
            f"tensor_plan: module {name!r} is {how}, which is too small for {slices} slices; use fewer slices, or "
            "use 'whole'"
        )
    return {key: tuple(found) for key, found in cuts.items()}
