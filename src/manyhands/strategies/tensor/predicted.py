"""What the workers of `tensor` send in a step: the sliced layers compute on tensors without memory, and are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from torch import nn

from manyhands.data.batches import cut, split
from manyhands.data.randomness import preserved
from manyhands.engine.exchange import Traffic
from manyhands.facts import TracedModel, WorkerTraffic, silent
from manyhands.strategies.common.grid.grid_group import (
    PlayedGroup,
    traffic_of_agreement,
    traffic_of_gradients,
    traffic_of_sum,
)
from manyhands.strategies.tensor.sliced_layers import SlicedModule
from manyhands.strategies.tensor.slicing import slice_modules
from manyhands.strategies.tensor.slicing_plan import Plan, SliceKind
from manyhands.strategies.tensor.strategy import Tensor

__all__ = ["PlayedSlice", "are_alike", "each_slice", "sent_in_step"]


class Played(Protocol):
    """One slice of a model after a forward and a backward."""

    @property
    def sent(self) -> Traffic:
        """What it sent to the other slices."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What it holds of each parameter, in the order of the model, with gradients."""

    @property
    def alike(self) -> bool:
        """Whether all slices have the same sizes and send the same."""


P = TypeVar("P", bound=Played)


class PlayedSlice(NamedTuple):
    """See `Played`."""

    sent: Traffic
    parameters: list[nn.Parameter]
    alike: bool


def sent_in_step(strategy: Tensor, traced: TracedModel, workers: int) -> list[WorkerTraffic]:
    if workers == 1:
        return silent(1)
    grid, task, total = strategy.grid(workers), traced.task, traffic_of_agreement(workers)
    slices: list[PlayedSlice] = []
    for replica in range(grid.data):
        for piece in cut(len(split(task.batch_size, replica, grid.data)), task.microbatches):
            slices = _played(traced, grid.slices, len(piece))
            total = sum((one.sent for one in slices), total)
        if task.clip_norm is not None:
            total += traffic_of_sum(8, grid.slices)
    for one in slices:
        total += traffic_of_gradients(grid.data, one.parameters)
    return [WorkerTraffic.of_all("worker", workers, total.bytes_sent, total.messages_sent)]


def _played(traced: TracedModel, slices: int, samples: int) -> list[PlayedSlice]:
    key = ("tensor", slices, samples)
    if key not in traced.played:
        with preserved():
            traced.played[key] = each_slice(
                slices, lambda index: _played_slice(traced, index, slices, samples)
            )
    found: list[PlayedSlice] = traced.played[key]
    return found


def each_slice(slices: int, play: Callable[[int], P]) -> list[P]:
    """Every slice, played; only the first one where all are alike."""
    first = play(0)
    return [first] * slices if first.alike else [first, *map(play, range(1, slices))]


def _played_slice(traced: TracedModel, index: int, slices: int, samples: int) -> PlayedSlice:
    model = traced.copy()
    group, wholes = PlayedGroup(index, slices), list(model.parameters())
    sliced = slice_modules(model, group)
    traced.task.loss(model, traced.batch(samples)).backward()
    cut_ones = sliced.cut
    return PlayedSlice(
        sent=group.traffic(),
        parameters=[cut_ones[id(one)].local if id(one) in cut_ones else one for one in wholes],
        alike=are_alike(model, sliced.plan),
    )


def are_alike(model: nn.Module, plan: Plan) -> bool:
    """Whether all slices of a sliced model have the same sizes; those of an image's rows differ in their neighbours."""
    by_rows = any(how.kind is SliceKind.SPATIAL for how in plan.values())
    cuts = [
        cuts for one in model.modules() if isinstance(one, SlicedModule) for cuts in one.sliced.cuts.values()
    ]
    return not by_rows and all(len({cut.end - cut.begin for cut in found}) == 1 for found in cuts)
