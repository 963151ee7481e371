"""A model's chain that computes on tensors without memory: what its layers hand on, and what slices of them send."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from manyhands.data.randomness import preserved
from manyhands.engine.chain import applied, chain_of
from manyhands.errors import UserError
from manyhands.facts import TracedModel
from manyhands.strategies.common.grid.grid_group import PlayedGroup
from manyhands.strategies.common.sharding.layer_units import units_of
from manyhands.strategies.pipeline.cuts import parts_of
from manyhands.strategies.pipeline.ends import StandIn, call_of
from manyhands.strategies.tensor.lazy_tensor import as_whole
from manyhands.strategies.tensor.played_slices import each_slice, like_slices
from manyhands.strategies.tensor.slicing import slice_modules
from manyhands.strategies.tensor.slicing_plan import Slicing, find_plan

Cuts = tuple[int, ...]
_SAMPLES = 8  # by which sizes for each sample are found


class _Output(NamedTuple):
    """What a layer hands on."""

    num_bytes: int
    shape: tuple[int, ...]
    has_gradient: bool  # which comes back

    @staticmethod
    def of(x: Tensor) -> _Output:
        return _Output(x.nbytes, tuple(x.shape), x.is_floating_point())


class PlayedChain(NamedTuple):
    """One slice of all stages after a forward and a backward of some samples; see `Played`."""

    group: PlayedGroup
    parameters: list[nn.Parameter]
    like: list[int]
    model: nn.Module
    outputs: tuple[_Output | None, ...]  # by layer; None for no tensor, and inside the stages of slices


def is_chain(model: nn.Module) -> bool:
    try:
        return bool(chain_of(model))
    except UserError:
        return False


def places_of_units(traced: TracedModel) -> list[int]:
    """Where in the chain each unit of the model is used first; the chain's modules without parameters have none."""
    key = "places of units"
    if key not in traced.played:
        first = places_of_parameters(traced)
        traced.played[key] = [
            min(first.get(id(one), 0) for one in unit.parameters) for unit in units_of(traced.model)
        ]
    found: list[int] = traced.played[key]
    return found


def places_of_parameters(traced: TracedModel) -> dict[int, int]:
    """Where in the chain each parameter, by its identity, is used first."""
    first: dict[int, int] = {}
    for place, module in enumerate(chain_of(traced.model)):
        for parameter in module.parameters():
            first.setdefault(id(parameter), place)
    return first


def output_bytes(traced: TracedModel) -> tuple[float, ...]:
    """What each module of the chain hands on, for each sample."""
    samples = max(1, min(traced.task.batch_size, _SAMPLES))
    [played] = play_chain(traced, 1, samples, None)
    return tuple(output.num_bytes / samples if output else 0.0 for output in played.outputs)


def play_chain(traced: TracedModel, slices: int, samples: int, cuts: Cuts | None) -> list[PlayedChain]:
    """Each slice of a model's chain, cut so where it is sliced, after a forward and a backward of so many samples."""
    key = ("pipeline", slices, samples, cuts)
    if key not in traced.played:
        with preserved():
            traced.played[key] = each_slice(
                lambda index: _played_slice(traced, index, slices, samples, cuts or ())
            )
    found: list[PlayedChain] = traced.played[key]
    return found


def _played_slice(traced: TracedModel, index: int, slices: int, samples: int, cuts: Cuts) -> PlayedChain:
    model = traced.copy()
    group, chain = PlayedGroup(index, slices), chain_of(model)
    plan: dict[str, Slicing] = {}
    if slices > 1:
        for within in parts_of(cuts, len(chain)):
            plan |= find_plan(model, slices, chain[within.start : within.stop])
        slice_modules(model, group, plan, part=chain)
    batch, outputs = traced.batch(samples), list[_Output | None]()
    x, named = call_of(traced.task.loss, batch)
    for place, module in enumerate(chain, 1):
        x = applied(module, x, named)
        if slices == 1 or place in cuts:  # elsewhere, what is sliced stays so
            x = as_whole(x)
            outputs.append(_Output.of(x) if isinstance(x, Tensor) else None)
        else:
            outputs.append(None)
    traced.task.loss(StandIn(output=x), batch).backward()
    return PlayedChain(
        group,
        list(model.parameters()),
        like_slices(model, plan, group.world),
        model,
        tuple(outputs),
    )
