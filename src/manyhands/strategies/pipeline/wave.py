"""A stage of a recurrent pipeline: micro-batches are slices of a sequence in time.

Each recurrent layer keeps its state between slices, so layer l can be at slice t while the layer below is at t + 1.
In the backward pass slices come in reverse order, and the gradient of a layer's state goes from each slice to the one
before. Every slice has a separate autograd graph whose leaves are its inputs and states. The last stage concatenates
the outputs of all slices and calls the loss once, on the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from manyhands.data.batches import split
from manyhands.engine.chain import OverTime, State
from manyhands.errors import UserError
from manyhands.strategies.pipeline.ends import TrainingEnds
from manyhands.strategies.pipeline.schedules import Pass, StageWork
from manyhands.strategies.pipeline.stage_messages import StageBorders

__all__ = ["WaveStage", "check_over_time"]

_POINTWISE: Final = (
    *(nn.Embedding, nn.Linear, nn.Identity, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus),
)
"""Layers that treat each time step independently."""


def check_over_time(chain: Sequence[nn.Module]) -> None:
    """Raise UserError for a layer that cannot be applied to one slice of time after another."""
    for place, module in enumerate(chain):
        of_features = isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1
        if isinstance(module, (OverTime, *_POINTWISE)) or of_features:
            continue
        raise UserError(
            f"schedule=wavefront: layer {place}, a {type(module).__name__}, is not known to take a sequence slice by "
            "slice; give it a method over_time(x, state), as RecurrentLayer has, or use another schedule"
        )


@dataclass(slots=True)
class _Slice:
    """What the forward pass of one time slice keeps for its backward pass."""

    input: Tensor
    output: Tensor
    before: list[State | None] = field(default_factory=list)
    """The state that each recurrent layer began with, as leaves of the graph."""
    after: list[State] = field(default_factory=list)  # the state that each recurrent layer ended with
    leaf: Tensor | None = None  # on the last stage: the output, detached, as the loss sees it


class WaveStage:
    """One worker's layers over time; `run` treats every piece of a share as a separate batch of sequences."""

    def __init__(self, borders: StageBorders) -> None:
        self._borders = borders
        (self._part,) = borders.parts.values()
        self._items = borders.schedule.of_stage(borders.stage)
        self._slices = borders.schedule.microbatches
        self._kept: dict[int, _Slice] = {}
        self._state_gradients: list[list[Tensor | None]] = []  # from the following slice, by recurrent layer
        self._whole: Tensor | None = None
        self.most_kept = 0  # peak number of slices that were kept at once in the last pass

    def run(self, ends: TrainingEnds, count: int, mark: Callable[[int], None]) -> None:
        """Run forward and backward of `count` pieces, one after the other; gradients accumulate in the parameters.

        `mark` is called before each work item with the number of its slice.
        """
        self.most_kept = 0
        for piece in range(count):
            self._borders.post.begin(checked=False)
            self._state_gradients = []
            for item in self._items:
                mark(item.microbatch)
                if item.work is Pass.FORWARD:
                    self._forward(item, piece, ends)
                else:
                    self._backward(item, piece, ends)
                self.most_kept = max(self.most_kept, len(self._kept))
            self._borders.post.flush()
            self._whole = None

    def _forward(self, item: StageWork, piece: int, ends: TrainingEnds) -> None:
        part, number, borders = self._part, item.microbatch, self._borders
        x = borders.input(part, number) if part.number else self._own_input(number, piece, ends)
        if borders.is_last(part):
            ends.prepare(piece)
        with borders.timed(item):
            with ends.computing():
                kept = self._kept[number] = self._apply(x, number, piece, ends)
            if borders.is_last(part):
                kept.leaf = kept.output.detach().requires_grad_()
            else:
                borders.send_output(part, number, kept.output)

    def _backward(self, item: StageWork, piece: int, ends: TrainingEnds) -> None:
        part, number, borders = self._part, item.microbatch, self._borders
        is_last = borders.is_last(part)
        arrived = None if is_last else borders.gradient(part, number, self._kept[number].output.shape)
        with borders.timed(item):
            if (
                is_last and number == self._slices - 1
            ):  # the loss over the whole gives each slice's leaf a gradient
                leaves = [kept.leaf for _, kept in sorted(self._kept.items())]
                whole = torch.cat([leaf for leaf in leaves if leaf is not None], dim=1)
                torch.autograd.backward(ends.loss(piece, whole))
            kept = self._kept.pop(number)
            gradient = arrived if kept.leaf is None else kept.leaf.grad
            roots = [(kept.output, gradient)]
            for after, gradients in zip(kept.after, self._state_gradients, strict=False):
                roots += zip(_tensors(after), gradients, strict=True)
            reached = [(root, one) for root, one in roots if one is not None and root.requires_grad]
            if reached:
                torch.autograd.backward([root for root, _ in reached], [one for _, one in reached])
            self._state_gradients = [[one.grad for one in _tensors(state)] for state in kept.before]
            borders.send_gradient(part, number, kept.input)

    def _apply(self, x: Tensor, number: int, piece: int, ends: TrainingEnds) -> _Slice:
        before: list[State | None] = []
        after: list[State] = []
        given = x
        with self._part.changeable(given) as x:
            for place, module in enumerate(self._part.modules, self._part.first):
                ends.begin(piece * self._slices + number, place)
                if isinstance(module, OverTime):
                    last = self._kept[number - 1].after[len(after)] if number else None
                    state = tree_map(partial(_leaf, module), last)
                    x, reached = module.over_time(x, state)
                    before.append(state)
                    after.append(reached)
                else:
                    x = module(x)
        return _Slice(input=given, output=x, before=before, after=after)

    def _own_input(self, number: int, piece: int, ends: TrainingEnds) -> Tensor:
        if self._whole is None:
            whole = ends.input(piece)
            if not isinstance(whole, Tensor) or whole.dim() < 2 or whole.shape[1] < self._slices:
                is_tensor = isinstance(whole, Tensor)
                what = f"a tensor of shape {tuple(whole.shape)}" if is_tensor else type(whole).__name__
                raise UserError(
                    f"microbatches={self._slices}: schedule=wavefront cuts dimension 1 of the input, time, into "
                    f"so many slices, and the input is {what}; use fewer"
                )
            self._whole = whole
        places = split(self._whole.shape[1], number, self._slices)
        return self._whole[:, places.start : places.stop]


def _tensors(state: State | None) -> list[Tensor]:
    return [one for one in tree_leaves(state) if isinstance(one, Tensor)]


def _leaf(module: nn.Module, one: object) -> object:
    """One item of a state, detached from the graph of the slice that produced it."""
    if isinstance(one, Tensor):
        return one.detach().requires_grad_(one.is_floating_point() or one.is_complex())
    if one is None or isinstance(one, (bool, int, float, str)):
        return one
    raise UserError(  # it may hold a tensor, whose gradient would be lost
        f"schedule=wavefront: the state that {type(module).__name__}.over_time gives holds a {type(one).__name__}; a "
        "state is a tensor, or tensors and numbers in tuples, lists and dicts"
    )
