"""Execution of one pipeline stage: runs its work items in order and waits for what they need.

    forward    input (from the stage before, or from the task) ─► the part's modules ─► output (to the stage after)
    backward   gradient of the output ─► gradients of the parameters, and of the input (to the stage before)

What a micro-batch's forward leaves is kept until its backward, or until its weight gradient where the schedule splits
that off: backward then computes the gradient of the input alone. With `recompute` only the input is kept, and forward
is run again before backward, with the same random numbers. The last part continues into the task's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import tree_leaves, tree_map

from manyhands.data.batches import split
from manyhands.engine.chain import OverTime, State
from manyhands.errors import UserError
from manyhands.strategies.pipeline.ends import ChainEnds
from manyhands.strategies.pipeline.schedules import Pass, StageWork
from manyhands.strategies.pipeline.stage_messages import ChainPart, StageBorders


class PutOff:
    """One micro-batch's backward of one part, from `root` and its gradient (None: `root` is a scalar, gradient 1).

    The stage before waits only for the input's gradient. Computing it produces the gradients at every operation on the
    path to the input; a parameter's gradient continues from the operation where its path leaves that one. So these are
    kept: nothing is computed twice, and the gradients equal those of one backward (Qi et al., "Zero Bubble Pipeline
    Parallelism", 2023). Call `input_gradient` first, then `weight_gradients`, each once.
    """

    def __init__(
        self, root: Tensor, gradient: Tensor | None, x: Tensor | None, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._root, self._gradient, self._x = root, gradient, x
        self._parameters = [one for one in parameters if one.requires_grad]
        self._forks: list[_Fork] | None = None

    def input_gradient(self) -> None:
        if self._x is None:
            return
        self._forks = _forks(self._root, self._x, self._parameters)
        handles = [fork.node.register_prehook(fork.arrive) for fork in self._forks or ()]
        torch.autograd.backward(self._root, self._gradient, retain_graph=True, inputs=[self._x])
        for handle in handles:
            handle.remove()

    def weight_gradients(self) -> None:
        if self._forks is None:
            if self._parameters:
                torch.autograd.backward(self._root, self._gradient, inputs=self._parameters)
        else:
            for fork in self._forks:  # continue backward from this operation to its parameters alone
                edges = [GradientEdge(fork.node, number) for number in fork.arrived]
                if edges:
                    came = list(fork.arrived.values())
                    torch.autograd.backward(edges, came, inputs=fork.parameters, retain_graph=True)
        self._forks = None
        del self._root, self._gradient


@dataclass(slots=True, eq=False)
class _Fork:
    """An operation on the path to the input from which some parameters are reached by other paths."""

    node: Node
    parameters: list[nn.Parameter]
    arrived: dict[int, Tensor] = field(default_factory=dict)

    def arrive(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.arrived = {number: one for number, one in enumerate(gradients) if one is not None}


def _forks(root: Tensor, x: Tensor, parameters: Sequence[nn.Parameter]) -> list[_Fork] | None:
    """The operations where paths to parameters leave the paths to `x`.

    None where a parameter is reached from two of them: the contributions cannot then be told apart, and the whole
    backward has to be run for the parameters.
    """
    end, start = _accumulator(x), root.grad_fn
    if start is None or end is None:
        return None
    known = {node: one for one in parameters if (node := _accumulator(one)) is not None}
    order = _in_order(start)
    leads: set[Node] = set()  # nodes on a path to the input
    reached: dict[Node, set[nn.Parameter]] = {}  # parameters reached from nodes that are not
    forks = []
    for node in order:  # successors come before a node
        following = [after for after, _ in node.next_functions if after is not None]
        if node is end or any(after in leads for after in following):
            leads.add(node)
            own = set().union(*(reached.get(after, set()) for after in following if after not in leads))
            if own:
                forks.append((node, own))
        else:
            reached[node] = set().union(*(reached.get(after, set()) for after in following))
            if node in known:
                reached[node].add(known[node])
    is_unique = sum(len(own) for _, own in forks) == len(set().union(*(own for _, own in forks)))
    if start not in leads or not is_unique:
        return None
    return [_Fork(node, sorted(own, key=id)) for node, own in forks]


def _accumulator(leaf: Tensor) -> Node | None:
    return torch.autograd.graph.get_gradient_edge(leaf).node if leaf.requires_grad else None


def _in_order(start: Node) -> list[Node]:
    """All nodes reachable from `start` in topological order, each after its successors."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(start, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(one, False) for one, _ in node.next_functions if one is not None and one not in seen]
    return order


@dataclass(slots=True)
class _Kept:
    """What the forward pass of one micro-batch keeps for its backward pass."""

    input: Any
    root: Tensor | None = None  # the part's output, or the loss; None where it will be recomputed
    shape: torch.Size | None = None
    """Shape of an output for which a gradient comes back; None where none does."""
    put_off: PutOff | None = None


class PipelineStage:
    """One worker's parts of a pipeline, and what it keeps of micro-batches in flight."""

    def __init__(self, borders: StageBorders, *, recompute: bool = False) -> None:
        self._borders = borders
        self._schedule = schedule = borders.schedule
        self._recompute = recompute
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._items = schedule.of_stage(borders.stage)
        self.most_kept = 0  # peak number of (part, micro-batch) pairs that were kept at once in the last pass

    def run(self, ends: ChainEnds, count: int, mark: Callable[[int], None]) -> None:
        """Run the first `count` micro-batches; gradients accumulate. `mark` gets each item's micro-batch before it."""
        self._borders.post.begin()
        self._kept, self.most_kept = {}, 0
        for item in self._items:
            if item.microbatch < count:
                mark(item.microbatch)
                if item.work is Pass.FORWARD:
                    self._forward(item, ends)
                elif item.work is Pass.BACKWARD:
                    self._backward(item, ends)
                else:
                    with self._borders.timed(item):
                        kept = self._kept.pop((self._schedule.part(item), item.microbatch))
                        if kept.put_off is not None:
                            kept.put_off.weight_gradients()
                self.most_kept = max(self.most_kept, len(self._kept))
        self._borders.post.flush()
        assert not self._kept, "every forward has its backward"

    def _forward(self, item: StageWork, ends: ChainEnds) -> None:
        part, microbatch, borders = self._part(item), item.microbatch, self._borders
        x = borders.input(part, microbatch) if part.number else ends.input(microbatch)
        kept = self._kept[part.number, microbatch] = _Kept(x)
        is_last = borders.is_last(part)
        if is_last:
            ends.prepare(microbatch)
        with borders.timed(item):
            if is_last and self._recompute:
                return  # its backward computes the forward as well
            with torch.no_grad() if self._recompute else nullcontext():
                output = self._compute(part, kept, microbatch, ends)
            if not is_last:
                borders.send_output(part, microbatch, output)
                kept.shape = output.shape if output.is_floating_point() else None
            if not self._recompute:
                kept.root = output

    def _backward(self, item: StageWork, ends: ChainEnds) -> None:
        part, microbatch, borders = self._part(item), item.microbatch, self._borders
        kept = self._kept[part.number, microbatch]
        gradient = borders.gradient(part, microbatch, kept.shape) if kept.shape is not None else None
        with borders.timed(item):
            root = kept.root
            if root is None:
                # Recomputing must not move buffers twice. The last part's forward was skipped, so there this is the
                # first run.
                with nullcontext() if borders.is_last(part) else _unmoved(part.buffers()):
                    root = self._compute(part, kept, microbatch, ends)
            if root.requires_grad and (gradient is not None or borders.is_last(part)):
                if self._schedule.splits_backward:
                    x = kept.input if isinstance(kept.input, Tensor) and kept.input.requires_grad else None
                    kept.put_off = PutOff(root, gradient, x, [*part.parameters(), *part.own])
                    kept.put_off.input_gradient()
                else:
                    torch.autograd.backward(root, gradient)
            borders.send_gradient(part, microbatch, kept.input)
            kept.root = None
        if not self._schedule.splits_backward:
            del self._kept[part.number, microbatch]

    def _compute(self, part: ChainPart, kept: _Kept, microbatch: int, ends: ChainEnds) -> Tensor:
        named = ends.named(microbatch) if part.takes_names else {}
        with ends.computing():
            output = part.forward(kept.input, lambda place: ends.begin(microbatch, place), named)
        if self._borders.is_last(part):
            return ends.loss(microbatch, output)
        return self._borders.tensor(output, part, microbatch)

    def _part(self, item: StageWork) -> ChainPart:
        return self._borders.parts[self._schedule.part(item)]


@contextmanager
def _unmoved(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Restore buffers after the block, so that running statistics are updated once although forward runs twice."""
    before = [buffer.clone() for buffer in buffers]
    yield
    for buffer, value in zip(buffers, before, strict=True):
        buffer.data.copy_(value)  # `data`: the graph may hold the buffer, but does not need its value


# A stage of a recurrent pipeline: micro-batches are slices of a sequence in time.
#
# Each recurrent layer keeps its state between slices, so layer l can be at slice t while the layer below is at t + 1.
# In the backward pass slices come in reverse order, and the gradient of a layer's state goes from each slice to the one
# before. Every slice has a separate autograd graph whose leaves are its inputs and states. The last stage concatenates
# the outputs of all slices and calls the loss once, on the whole sequence.

_POINTWISE: Final = (
    *(nn.Embedding, nn.Linear, nn.Identity, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus),
)
"""Layers that treat each time step independently."""


def check_over_time(chain: Sequence[nn.Module]) -> None:
    for place, module in enumerate(chain):
        of_features = isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1
        if isinstance(module, (OverTime, *_POINTWISE)) or of_features:
            continue
        raise UserError(
            f"schedule=wavefront: layer {place}, a {type(module).__name__}, may not support slices of a sequence; "
            "give it a method over_time(x, state), like RecurrentLayer, or use another schedule"
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

    def run(self, ends: ChainEnds, count: int, mark: Callable[[int], None]) -> None:
        """Run `count` pieces, one after the other; gradients accumulate. `mark` gets each item's slice before it."""
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

    def _forward(self, item: StageWork, piece: int, ends: ChainEnds) -> None:
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

    def _backward(self, item: StageWork, piece: int, ends: ChainEnds) -> None:
        part, number, borders = self._part, item.microbatch, self._borders
        is_last = borders.is_last(part)
        arrived = None if is_last else borders.gradient(part, number, self._kept[number].output.shape)
        with borders.timed(item):
            # The loss over the whole gives each slice's leaf a gradient.
            if is_last and number == self._slices - 1:
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

    def _apply(self, x: Tensor, number: int, piece: int, ends: ChainEnds) -> _Slice:
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

    def _own_input(self, number: int, piece: int, ends: ChainEnds) -> Tensor:
        if self._whole is None:
            whole = ends.input(piece)
            for name in ends.named(piece):
                raise UserError(
                    f"schedule=wavefront: the model is given {name!r} by name, which cannot be cut into slices of "
                    "time; use another schedule"
                )
            is_tensor = isinstance(whole, Tensor)
            if not is_tensor or whole.dim() < 2 or whole.shape[1] < self._slices:
                what = f"a tensor of shape {tuple(whole.shape)}" if is_tensor else type(whole).__name__
                raise UserError(
                    f"microbatches={self._slices}: schedule=wavefront cuts dimension 1 (time) of the input into "
                    f"this many slices, but the input is {what}; use fewer"
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
        f"schedule=wavefront: the state that {type(module).__name__}.over_time returns holds a {type(one).__name__}; "
        "allowed are tensors and numbers, also in tuples, lists and dicts"
    )
