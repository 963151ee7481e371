"""Backward in two steps: the gradient of a part's input at once, those of its parameters later.

The stage before waits only for the input's gradient. Computing it produces the gradients at every operation on the
path to the input; a parameter's gradient continues from the operation where its path leaves that one. So these are
kept: nothing is computed twice, and the gradients equal those of one backward (Qi et al., "Zero Bubble Pipeline
Parallelism", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

__all__ = ["PutOff"]


class PutOff:
    """One micro-batch's backward of one part, from `root` and its gradient (None: `root` is a scalar, gradient 1).

    Call `input_gradient` first, then `weight_gradients`, each once.
    """

    def __init__(
        self, root: Tensor, gradient: Tensor | None, x: Tensor | None, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._root = root
        self._gradient = gradient
        self._x = x
        self._parameters = [one for one in parameters if one.requires_grad]
        self._forks: list[_Fork] | None = None

    def input_gradient(self) -> None:
        """Compute the gradient of the input, into its `grad`."""
        if self._x is None:
            return
        forks = self._forks = _forks(self._root, self._x, self._parameters)
        handles = [fork.listen() for fork in forks or ()]
        torch.autograd.backward(self._root, self._gradient, retain_graph=True, inputs=[self._x])
        for handle in handles:
            handle.remove()

    def weight_gradients(self) -> None:
        """Compute the gradients of the parameters, added to their `grad`."""
        if self._forks is None:
            if self._parameters:
                torch.autograd.backward(self._root, self._gradient, inputs=self._parameters)
        else:
            for fork in self._forks:
                fork.go_on()
        self._forks = None
        del self._root, self._gradient


class _Fork:
    """An operation on the path to the input from which some parameters are reached by other paths."""

    def __init__(self, node: Node, parameters: list[nn.Parameter]) -> None:
        self._node = node
        self._parameters = parameters
        self._arrived: tuple[Tensor | None, ...] = ()

    def listen(self) -> Any:
        """Register a hook that keeps the gradients that arrive at this operation; return its handle."""
        return self._node.register_prehook(partial(_Fork._arrive, self))

    def _arrive(self, gradients: tuple[Tensor | None, ...]) -> None:
        self._arrived = gradients

    def go_on(self) -> None:
        """Continue backward from this operation to its parameters alone."""
        edges = [
            GradientEdge(self._node, number) for number, one in enumerate(self._arrived) if one is not None
        ]
        arrived = [one for one in self._arrived if one is not None]
        if edges:
            torch.autograd.backward(edges, arrived, inputs=self._parameters, retain_graph=True)


def _forks(root: Tensor, x: Tensor, parameters: Sequence[nn.Parameter]) -> list[_Fork] | None:
    """The operations where paths to parameters leave the paths to `x`.

    None where a parameter is reached from two of them: the contributions cannot then be told apart, and the whole
    backward has to be run for the parameters.
    """
    end, start = _accumulator(x), root.grad_fn
    if start is None or end is None:
        return None
    known: dict[Node, nn.Parameter] = {}
    for one in parameters:
        accumulator = _accumulator(one)
        if accumulator is not None:
            known[accumulator] = one
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
    if start not in leads or sum(len(own) for _, own in forks) != len(
        set().union(*(own for _, own in forks))
    ):
        return None
    return [_Fork(node, sorted(own, key=id)) for node, own in forks]


def _accumulator(leaf: Tensor) -> Node | None:
    """The node that accumulates into a leaf's `grad`."""
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
            stack += [
                (after, False) for after, _ in node.next_functions if after is not None and after not in seen
            ]
    return order
