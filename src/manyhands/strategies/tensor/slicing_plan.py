"""How each layer of a network is sliced, as data: {name of a module: how}.

    {"blocks.0.project": "heads=4 fused=3", "blocks.0.mix": "row heads=4", "head": "vocabulary"}

The input and the output of a layer are each whole (the same on every slice) or sliced (each slice has different
features). A layer that leaves its output sliced must be followed by one that takes it.

| how | of | in | out |
|---|---|---|---|
| `column` | Linear | whole | sliced by features; whole with `gather` |
| `row` | Linear | sliced by features | whole |
| `heads=H` | Linear, MultiheadAttention | whole | sliced by heads; of MultiheadAttention, whole |
| `vocabulary` | Embedding, Linear | whole | whole; of Linear, gathered when it is used |
| `channels_out` | convolution | whole | sliced by channels; whole with `gather` |
| `channels_in` | convolution | sliced by channels | whole |
| `inside` | GroupNorm, BatchNorm, Dropout | sliced | sliced |
| `spatial` | Conv2d, pooling, GroupNorm | rows of the image; whole with `scatter` | rows; whole with `gather` |
| `whole` | anything | whole | whole: every slice computes all of it |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum, unique
from fnmatch import fnmatchcase
from math import gcd
from typing import Any, TypeGuard

from torch import nn
from torch.nn.modules.conv import _ConvNd

from manyhands.data.batches import split
from manyhands.engine.chain import SaysChain
from manyhands.errors import UserError, nearest


@unique
class SliceKind(Enum):
    """A way to slice a layer."""

    COLUMN = "column"
    ROW = "row"
    HEADS = "heads"
    VOCABULARY = "vocabulary"
    CHANNELS_OUT = "channels_out"
    CHANNELS_IN = "channels_in"
    INSIDE = "inside"
    SPATIAL = "spatial"
    WHOLE = "whole"


_WORDS = tuple(kind.value for kind in SliceKind)
_NUMBERS = ("heads", "units", "fused")
_FLAGS = ("scatter", "gather", "channels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """How one layer is sliced; `Slicing.parse` reads the text of it."""

    kind: SliceKind
    units: int = 0
    """Number of units that are never cut, such as the heads of an attention; 0: single features."""
    fused: int = 1
    """How many outputs of equal size are concatenated in the layer's output, such as query, key and value."""
    scatter: bool = False  # for a layer sliced by rows: whether its input is the whole image
    gather: bool = False  # whether the output is gathered right away
    channels: bool = False
    """For a layer inside sliced work: whether its input is sliced by channels rather than by features."""

    @staticmethod
    def parse(text: str | Slicing) -> Slicing:
        """Read `column gather`, `row heads=4`, `heads=4 fused=3`; UserError names the word that is wrong."""
        if isinstance(text, Slicing):
            return text
        if not isinstance(text, str) or not text.split():
            raise UserError(f"tensor_plan: {text!r} is not a way to slice; {nearest('', _WORDS)}")
        first, *rest = text.split()
        word = first.partition("=")[0]
        if word not in _WORDS:
            raise UserError(f"tensor_plan: {text!r} is not a way to slice; {nearest(word, _WORDS)}")
        numbers: dict[str, int] = {}
        flags = dict.fromkeys(_FLAGS, False)
        for setting in ([first] if "=" in first else []) + rest:
            name, equals, value = setting.partition("=")
            if setting in flags:
                flags[setting] = True
            elif name in _NUMBERS and equals and value.isdigit() and int(value):
                numbers["fused" if name == "fused" else "units"] = int(value)
            else:
                raise UserError(
                    f"tensor_plan: {setting!r} in {text!r} is invalid; allowed: heads=4, units=4, fused=3, "
                    "scatter, gather, channels"
                )
        kind = SliceKind(word)
        if kind is SliceKind.HEADS and "units" not in numbers:
            raise UserError(f"tensor_plan: {text!r} has no number of heads; write heads=4")
        return Slicing(kind=kind, units=numbers.get("units", 0), fused=numbers.get("fused", 1), **flags)

    def __str__(self) -> str:
        word = f"heads={self.units}" if self.kind is SliceKind.HEADS else self.kind.value
        units = f" units={self.units}" if self.units and self.kind is not SliceKind.HEADS else ""
        fused = f" fused={self.fused}" if self.fused > 1 else ""
        return f"{word}{units}{fused}{''.join(f' {flag}' for flag in _FLAGS if getattr(self, flag))}"

    @property
    def leaves_sliced(self) -> bool:
        return self.kind in (SliceKind.COLUMN, SliceKind.HEADS, SliceKind.CHANNELS_OUT) and not self.gather


Plan = Mapping[str, Slicing]
"""How each module is sliced, by its name in the model; modules that are not named stay whole."""


def parts_of(count: int, units: int, slices: int) -> list[range]:
    """Which of `count` items each slice has: whole units of them, sizes that differ by at most one unit."""
    size = count // units if units else 1
    parts = [split(units or count, index, slices) for index in range(slices)]
    return [range(part.start * size, part.stop * size) for part in parts]


# Finds the plan by which a network is sliced: what its modules declare, and what chains of known layers allow.
#
# A module declares its plan with a method or an attribute `tensor_plan` that maps names of its submodules (patterns
# such as `blocks.*.mix` are allowed) to how. What it does not name stays whole, except that submodules with a
# `tensor_plan` add what is not declared already. For everything else a plan is found:
#
# - in an `nn.Sequential`, or in what a model's `chain()` returns, a layer that slices its output and the next one that
#   takes it form a pair: column then row, channels_out then channels_in; the layers between must work on slices;
# - an embedding and the linear layers that share its weight are sliced by vocabulary;
# - any other Linear or convolution is sliced by its outputs, which are gathered again;
# - what is not known, or is smaller than the number of slices, stays whole.

Named = tuple[str, nn.Module]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softsign, nn.LogSigmoid),
    nn.Identity,
)
_PER_CHANNEL = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ANY_ROWS = (*_ELEMENTWISE, nn.Dropout)
_FEED_FORWARD = {"linear1": "column", "dropout": "inside", "linear2": "row"}
_KNOWN: dict[type[nn.Module], Mapping[str, str]] = {
    nn.TransformerEncoderLayer: {"self_attn": "heads", **_FEED_FORWARD},
    nn.TransformerDecoderLayer: {"self_attn": "heads", "multihead_attn": "heads", **_FEED_FORWARD},
}
"""Plans of torch modules that are not chains."""


def find_plan(model: nn.Module, slices: int, part: Sequence[nn.Module] | None = None) -> Plan:
    """Return how each module is sliced, in the order of the model's modules; the model is not changed.

    With a `part` of the model's chain, only those modules are planned, and pairs are found inside it only.
    """
    plan: dict[str, Slicing] = {}
    finder = _Finder(model, slices)
    if part is None:
        finder.visit("", model, plan)
    else:
        finder.visit_part(part, plan)
    _join_rows(model, part, plan)
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(plan.items(), key=lambda entry: order[entry[0]]))


def declared_plan(module: nn.Module, prefix: str = "") -> dict[str, Slicing] | None:
    """The plan that a module declares with `tensor_plan`, by full names; None where it declares none."""
    declared: Any = getattr(module, "tensor_plan", None)
    if declared is None:
        return None
    declared = declared() if callable(declared) else declared
    if not isinstance(declared, Mapping):
        raise UserError(
            f"{type(module).__name__}.tensor_plan is a {type(declared).__name__}; it must be a dict of module "
            "names and slicings: {'fc1': 'column', 'fc2': 'row'}"
        )
    names = [name for name, _ in module.named_modules() if name]
    layers = [name for name, one in module.named_modules() if name and not _inside(one)]
    plan: dict[str, Slicing] = {}
    for pattern, how in declared.items():
        matching = [pattern] if pattern in names else [one for one in layers if fnmatchcase(one, pattern)]
        if not matching:
            (close,) = get_close_matches(str(pattern), names, n=1, cutoff=0) or ("none",)
            kind = type(module).__name__
            raise UserError(f"tensor_plan: {kind} has no module {pattern!r}; the nearest is {close!r}")
        plan |= dict.fromkeys(matching, Slicing.parse(how))
    return {_joined(prefix, name): how for name, how in plan.items()}


class _Finder:
    """Finds the plan in one traversal of a model."""

    def __init__(self, model: nn.Module, slices: int) -> None:
        self._model, self._slices = model, slices
        self._tied = _tied(model)
        self._names = {id(module): name for name, module in model.named_modules()}

    def visit(self, path: str, module: nn.Module, plan: dict[str, Slicing]) -> None:
        if path in plan:
            return
        declared = declared_plan(module, path)
        if declared is not None:
            plan |= {name: how for name, how in declared.items() if name not in plan}  # outer plan wins
            for name, child in module.named_modules(prefix=path):
                if child is not module and getattr(child, "tensor_plan", None) is not None:
                    self.visit(name, child, plan)
            return
        if type(module) in _KNOWN:
            self._visit_known(path, module, plan)
        elif _is_plain(module) or isinstance(module, SaysChain):
            self._visit_chain(_chain(module), plan)
        else:
            how = self._alone(module)
            if how is not None:
                plan[path] = how
            elif not isinstance(module, nn.MultiheadAttention):
                self._visit_children(module, plan)

    def visit_part(self, part: Sequence[nn.Module], plan: dict[str, Slicing]) -> None:
        if getattr(self._model, "tensor_plan", None) is None:
            flat = [one for module in part for one in _flat(module)]
            self._visit_chain(flat, plan, _chain(self._model))
            return
        whole: dict[str, Slicing] = {}
        self.visit("", self._model, whole)
        here = {self._names.get(id(one)) for module in part for one in module.modules()}
        plan |= {name: how for name, how in whole.items() if name in here}

    def _visit_known(self, path: str, module: nn.Module, plan: dict[str, Slicing]) -> None:
        """Plan one of torch's own modules; it stays whole where it has fewer heads or features than slices."""
        children = dict(module.named_children())
        attentions = [child for child in children.values() if isinstance(child, nn.MultiheadAttention)]
        first = children["linear1"]
        wide = first.out_features if type(first) is nn.Linear else 0
        if wide < self._slices or any(self._alone(one) is None for one in attentions):
            return
        for name, word in _KNOWN[type(module)].items():
            child = children[name]
            if isinstance(child, nn.MultiheadAttention):
                word = f"heads={child.num_heads}"
            elif isinstance(child, nn.Dropout):
                word = f"inside units={wide}"
            plan[_joined(path, name)] = Slicing.parse(word)

    def _visit_chain(
        self, modules: Sequence[nn.Module], plan: dict[str, Slicing], whole: Sequence[nn.Module] = ()
    ) -> None:
        chain = [(self._names.get(id(one), ""), one) for one in modules]
        often = Counter(self._names.get(id(inner), "") for one in whole or modules for inner in one.modules())
        at = 0
        while at < len(chain):
            found, length = pair_up(chain[at:], self._slices)
            if length and all(self._may_pair(one, often) for one in chain[at : at + length]):
                plan |= found
                at += length
                continue
            name, module = chain[at]
            if name:
                self.visit(name, module, plan)
            else:  # it is not registered in the model, and only stands for its children
                self._visit_children(module, plan)
            at += 1

    def _visit_children(self, module: nn.Module, plan: dict[str, Slicing]) -> None:
        for child in module.children():
            if id(child) in self._names:
                self.visit(self._names[id(child)], child, plan)

    def _may_pair(self, one: Named, often: Mapping[str, int]) -> bool:
        """Whether a layer is used once, by this chain alone; one without parameters may be used anywhere."""
        name, module = one
        if any(id(parameter) in self._tied for parameter in module.parameters()):
            return False
        is_free = type(module) in (*_ELEMENTWISE, *_PER_CHANNEL, nn.Flatten)
        return is_free or (bool(name) and often[name] == 1)

    def _alone(self, module: nn.Module) -> Slicing | None:
        tied = [id(one) for one in module.parameters(recurse=False) if id(one) in self._tied]
        by_vocabulary = all(self._tied[one] for one in tied)
        if _is_plain_embedding(module):
            fits = module.num_embeddings >= self._slices and by_vocabulary
            return Slicing(kind=SliceKind.VOCABULARY) if fits else None
        if _is_plain_linear(module) and module.out_features >= self._slices and by_vocabulary:
            return Slicing(kind=SliceKind.VOCABULARY) if tied else Slicing(kind=SliceKind.COLUMN, gather=True)
        if tied:
            return None
        if _is_plain_convolution(module) and module.out_channels >= self._slices:
            return Slicing(kind=SliceKind.CHANNELS_OUT, gather=True)
        if type(module) is nn.MultiheadAttention and module.num_heads >= self._slices:
            plain = module.bias_k is None and not module.add_zero_attn and module._qkv_same_embed_dim
            return Slicing(kind=SliceKind.HEADS, units=module.num_heads) if plain else None
        return None


def _join_rows(model: nn.Module, part: Sequence[nn.Module] | None, plan: dict[str, Slicing]) -> None:
    """In each run of consecutive layers sliced by rows, let the first scatter the image and the last gather it."""
    named = dict(model.named_modules())
    for name in [name for name, how in plan.items() if how.kind is SliceKind.SPATIAL]:
        if type(named[name]) in _ANY_ROWS:
            del plan[name]
    names = {id(module): name for name, module in named.items()}
    by_rows = {name for name, how in plan.items() if how.kind is SliceKind.SPATIAL}
    runs: list[list[str]] = []
    seen: set[int] = set()
    chains = [_chain(module) for module in model.modules()]
    if part is not None:
        chains[0] = [one for module in part for one in _flat(module)]
    for chain in chains:
        if all(id(one) in seen for one in chain):
            continue  # part of a longer chain
        seen |= {id(one) for one in chain}
        runs.append([])
        for one in chain:
            if names.get(id(one)) in by_rows:
                runs[-1].append(names[id(one)])
            elif type(one) not in _ANY_ROWS:
                runs.append([])
    joined = {name for run in runs for name in run}
    for run in [*runs, *([name] for name in by_rows - joined)]:
        if run:
            plan[run[0]] = replace(plan[run[0]], scatter=True)
            plan[run[-1]] = replace(plan[run[-1]], gather=True)


def pair_up(chain: Sequence[Named], slices: int) -> tuple[Plan, int]:
    """The plan from a layer that leaves its output sliced to the one that takes it, and how many; 0: no pair."""
    name, first = chain[0]
    if _is_plain_linear(first):
        width, opens = first.out_features, SliceKind.COLUMN
    elif _is_plain_convolution(first):
        width, opens = first.out_channels, SliceKind.CHANNELS_OUT
    else:
        return {}, 0
    units, flat = width, opens is SliceKind.COLUMN
    inside: list[str] = []
    for number, (between, module) in enumerate(chain[1:], 1):
        closes = _closes(module, opens, width, flat=flat)
        if closes is not None and units >= slices:
            plan = {name: Slicing(kind=opens, units=units)}
            plan |= {
                one: Slicing(kind=SliceKind.INSIDE, units=units, channels=opens is not SliceKind.COLUMN)
                for one in inside
            }
            return plan | {between: Slicing(kind=closes, units=units)}, number + 1
        if not flat and type(module) is nn.GroupNorm:
            units = gcd(units, module.num_groups)
        if type(module) is nn.Dropout or (not flat and type(module) in (nn.GroupNorm, *_BATCH_NORMS)):
            inside.append(between)
        elif not flat and type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            flat = True
        elif not (type(module) in _ELEMENTWISE or (type(module) in _PER_CHANNEL and not flat)):
            break
    return {}, 0


def _closes(module: nn.Module, opens: SliceKind, width: int, *, flat: bool) -> SliceKind | None:
    """How this module takes `width` sliced features or channels; None where it cannot."""
    if _is_plain_linear(module) and flat:
        fits = module.in_features == width if opens is SliceKind.COLUMN else module.in_features % width == 0
        return SliceKind.ROW if fits else None
    if _is_plain_convolution(module) and not flat and module.in_channels == width:
        return SliceKind.CHANNELS_IN
    return None


def _tied(model: nn.Module) -> dict[int, bool]:
    """Parameters that several modules share, by identity: whether all of them can be sliced by vocabulary."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    return {
        one: all(_is_plain_embedding(module) or _is_plain_linear(module) for module in found)
        and any(_is_plain_embedding(module) for module in found)
        for one, found in owners.items()
        if len(found) > 1
    }


def _is_plain_convolution(module: nn.Module) -> TypeGuard[_ConvNd]:
    """Whether every output channel depends on all input channels."""
    if not isinstance(module, _ConvNd) or type(module) not in CONVOLUTIONS:
        return False
    return module.groups == 1 and _has_weight(module)


def _is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and _has_weight(module)


def _is_plain_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    if type(module) is not nn.Embedding or not _has_weight(module):
        return False
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def _has_weight(module: nn.Module) -> bool:
    """Whether the weight is a parameter, and not computed from others as under `weight_norm`."""
    return module._parameters.get("weight") is not None


def _chain(module: nn.Module) -> list[nn.Module]:
    """The modules that are applied one after another; empty where nothing declares an order."""
    declared = module.chain() if isinstance(module, SaysChain) else _inside(module)
    return [part for one in declared for part in _flat(one)]


def _inside(module: nn.Module) -> list[nn.Module]:
    """The modules of a plain sequence, with repetitions; empty for any other module."""
    return [one for one in module._modules.values() if one is not None] if _is_plain(module) else []


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    inside = _inside(module) if getattr(module, "tensor_plan", None) is None else []
    if not inside:
        yield module
    for one in inside:
        yield from _flat(one)


def _is_plain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
