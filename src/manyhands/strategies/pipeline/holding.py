"""Which stage holds which parameters and buffers of a model that is cut, and which are shared. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from manyhands.errors import UserError
from manyhands.strategies.pipeline.borders import ChainPart
from manyhands.strategies.pipeline.split import parts_of

__all__ = ["Holding", "holding_of", "require_own_statistics"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holding:
    """What one stage holds of the model."""

    parts: tuple[ChainPart, ...]
    """The stage's parts of the chain, in order."""

    parameters: tuple[nn.Parameter, ...]
    """The parameters it computes with, each once; including those that belong to no layer, which any may use."""

    first: frozenset[int]
    """Identities of the parameters that no earlier stage holds: this stage reports them."""

    tied: tuple[tuple[tuple[int, ...], tuple[nn.Parameter, ...]], ...]
    """Parameters shared with other stages, grouped by the stages that hold them, in the same order on all stages."""

    own: tuple[Tensor, ...]
    """Parameters and buffers that belong to the model itself and to no layer."""

    buffers: tuple[str, ...]
    """Names of the buffers that this stage reports."""


def holding_of(
    model: nn.Module, chain: Sequence[nn.Module], cuts: Sequence[int], stages: int, stage: int
) -> Holding:
    """What `stage` holds of a model with these cuts; part k is on stage k mod `stages`."""
    places = parts_of(cuts, len(chain))
    holders: dict[int, set[int]] = {}  # stages by parameter or buffer, of those that layers have
    for number, within in enumerate(places):
        for module in chain[within.start : within.stop]:
            for one in (*module.parameters(), *module.buffers()):
                holders.setdefault(id(one), set()).add(number % stages)
    parameters, buffers = list(model.parameters()), dict(model.named_buffers())
    own = [one for one in (*parameters, *buffers.values()) if id(one) not in holders]
    of_model = [one for one in own if isinstance(one, nn.Parameter)]
    parts = [
        ChainPart(number, within.start, chain[within.start : within.stop], of_model)
        for number, within in enumerate(places)
    ]
    mine, first = [], set()
    tied: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        having = tuple(sorted(holders.get(id(parameter), range(stages))))
        if stage in having:
            mine.append(parameter)
            if having[0] == stage:
                first.add(id(parameter))
            if len(having) > 1:
                tied.setdefault(having, []).append(parameter)
    return Holding(
        parts=tuple(part for part in parts if part.number % stages == stage),
        parameters=tuple(mine),
        first=frozenset(first),
        tied=tuple((having, tuple(tied[having])) for having in sorted(tied)),
        own=tuple(own),
        buffers=tuple(name for name, buffer in buffers.items() if min(holders.get(id(buffer), {0})) == stage),
    )


def require_own_statistics(
    model: nn.Module, chain: Sequence[nn.Module], cuts: Sequence[int], stages: int
) -> None:
    """Raise UserError for a layer with running statistics that is on several stages: the copies would diverge."""
    having: dict[int, set[int]] = {}
    for number, within in enumerate(parts_of(cuts, len(chain))):
        for layer in chain[within.start : within.stop]:
            for module in layer.modules():
                having.setdefault(id(module), set()).add(number % stages)
    for name, module in model.named_modules():
        found = sorted(having.get(id(module), ()))
        keeps = isinstance(module, _NormBase) and module.running_mean is not None
        if keeps and len(found) > 1 and module.train().training:  # some stay in evaluation mode
            raise UserError(
                f"layer {name!r} ({type(module).__name__}) is in stages {' and '.join(map(str, found))}, and each "
                "would keep running statistics of its own; use a layer for each place, or cuts= that keep both in one "
                "stage"
            )
