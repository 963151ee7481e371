"""Slices of a model that compute on tensors without memory: what each sends, holds and takes is counted."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from manyhands.data.batches import cut
from manyhands.data.randomness import preserved
from manyhands.engine.exchange import Traffic
from manyhands.facts import TracedModel
from manyhands.strategies.common.grid.grid_group import PlayedGroup
from manyhands.strategies.common.grid.held import Cut
from manyhands.strategies.common.peak_memory import StepPeaks, peaks_of_step
from manyhands.strategies.common.sharding.layer_units import units_of
from manyhands.strategies.tensor.sliced_layers import SlicedModule
from manyhands.strategies.tensor.slicing import slice_modules
from manyhands.strategies.tensor.slicing_plan import Plan, SliceKind


class Played(Protocol):
    """One slice of a model after a forward and a backward."""

    @property
    def group(self) -> PlayedGroup:
        """Its end of the group of slices, which knows what they sent."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What it holds of each parameter, in the order of the model, with gradients."""

    @property
    def like(self) -> Sequence[int]:
        """For each slice the first one that stands for it."""


P = TypeVar("P", bound=Played)


class PlayedSlice(NamedTuple):
    """See `Played`."""

    group: PlayedGroup
    parameters: list[nn.Parameter]
    cuts: dict[int, tuple[Cut, ...]]  # by the identity of a parameter that is cut: the part of every slice
    like: list[int]
    shares: tuple[float, ...]  # of each unit of the model, how much this slice computes
    peaks: StepPeaks

    @property
    def held(self) -> int:
        """Bytes of its parameters."""
        return sum(one.nbytes for one in self.parameters)

    @property
    def gradients(self) -> int:
        return sum(one.nbytes for one in self.parameters if one.requires_grad)

    def parameters_of(self, index: int) -> list[nn.Parameter]:
        """Those of a slice that this one stands for, whose parts may be smaller."""
        return [self._part_of(one, index) for one in self.parameters]

    def _part_of(self, parameter: nn.Parameter, index: int) -> nn.Parameter:
        if id(parameter) not in self.cuts or index == self.group.index:
            return parameter
        cut, shape = self.cuts[id(parameter)][index], list(parameter.shape)
        assert cut.dim is not None, "layers are cut along a dimension"
        shape[cut.dim] = cut.blocks * (cut.end - cut.begin)
        part = nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)
        part.grad = None if parameter.grad is None else torch.empty_like(part)
        return part


def held_shares(traced: TracedModel, slices: int, samples: int) -> tuple[float, ...]:
    """Of each unit of the model, the share that the slice with most of it computes."""
    each = played(traced, slices, piece_of(traced, samples))
    return tuple(map(max, zip(*(one.shares for one in each), strict=True)))


def held_in_slices(traced: TracedModel, slices: int, samples: int) -> PlayedSlice:
    """The slice that holds most, for so many samples."""
    return max(
        played(traced, slices, piece_of(traced, samples)), key=lambda one: one.held + one.peaks.together
    )


def moved_in_pieces(traced: TracedModel, slices: int, samples: int) -> Traffic:
    """What all slices of a replica send for so many samples, in forward and backward."""
    pieces = cut(samples, traced.task.microbatches)
    return sum((sent_by_all(played(traced, slices, len(piece))) for piece in pieces), Traffic())


def piece_of(traced: TracedModel, samples: int) -> int:
    """Samples of the largest piece that a share of so many is computed in."""
    return len(cut(samples, traced.task.microbatches)[0])


def played(traced: TracedModel, slices: int, samples: int) -> list[PlayedSlice]:
    """Every slice of a model, after a forward and a backward of so many samples."""
    key = ("tensor", slices, samples)
    if key not in traced.played:
        with preserved():
            traced.played[key] = each_slice(lambda index: _played_slice(traced, index, slices, samples))
    found: list[PlayedSlice] = traced.played[key]
    return found


def sent_by_all(slices: Sequence[Played]) -> Traffic:
    """What slices send to each other; one that stands for another knows also what that one sends."""
    return sum((one.group.traffic_of(index) for index, one in enumerate(slices)), Traffic())


def each_slice(play: Callable[[int], P]) -> list[P]:
    """Every slice, or the one that stands for it; only these are played."""
    found = {0: play(0)}
    like = found[0].like
    for index in sorted(set(like) - {0}):
        found[index] = play(index)
    return [found[one] for one in like]


def _played_slice(traced: TracedModel, index: int, slices: int, samples: int) -> PlayedSlice:
    model = traced.copy()
    group, wholes, units = PlayedGroup(index, slices), list(model.parameters()), units_of(model)
    named = dict(model.named_modules())
    sliced = slice_modules(model, group)
    rows = [named[name] for name, how in sliced.plan.items() if how.kind is SliceKind.SPATIAL]
    by_rows = {id(one) for module in rows for one in module.parameters()}
    batch = traced.batch(samples)
    peaks = peaks_of_step(model, batch, lambda: traced.task.loss(model, batch))
    cut_ones = sliced.cut

    def held(one: nn.Parameter) -> float:
        """Of its items; a slice of an image's rows computes with all of them, on fewer rows."""
        mine = cut_ones.get(id(one))
        return mine.local.numel() if mine else one.numel() / (slices if id(one) in by_rows else 1)

    return PlayedSlice(
        group=group,
        parameters=[cut_ones[id(one)].local if id(one) in cut_ones else one for one in wholes],
        cuts={
            id(module._parameters[name]): cuts
            for module, name, cuts in _cuts(model)
            if name in module._parameters
        },
        like=like_slices(model, sliced.plan, slices, smaller=True),
        shares=tuple(
            sum(map(held, unit.parameters)) / sum(map(nn.Parameter.numel, unit.parameters)) for unit in units
        ),
        peaks=peaks,
    )


def like_slices(model: nn.Module, plan: Plan, slices: int, *, smaller: bool = False) -> list[int]:
    """For each slice of a model the first one with the same sizes, or with none that is `smaller` than its own.

    That one holds and takes as much, or more. Slices of an image's rows differ in their neighbours.
    """
    if any(how.kind is SliceKind.SPATIAL for how in plan.values()):
        return list(range(slices))
    sizes = [
        [found[index].end - found[index].begin for _, _, found in _cuts(model)] for index in range(slices)
    ]
    if not smaller:
        return [sizes.index(one) for one in sizes]
    return [
        next(first for first, most in enumerate(sizes) if all(map(operator.ge, most, one))) for one in sizes
    ]


def _cuts(model: nn.Module) -> Iterator[tuple[SlicedModule, str, tuple[Cut, ...]]]:
    for module in model.modules():
        if isinstance(module, SlicedModule):
            for name, cuts in module.sliced.cuts.items():
                yield module, name, cuts
