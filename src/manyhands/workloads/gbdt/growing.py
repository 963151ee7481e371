"""One tree, grown leaf by leaf: always the leaf whose best split gains most (leaf-wise, best first); and its memory.

All workers grow the same tree, each with its own rows; see `searching` for what they tell each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from manyhands.workloads.gbdt import histogram_kernels
from manyhands.workloads.gbdt import split_kernels as fields
from manyhands.workloads.gbdt.binning import ByteLayout, FeatureBins
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.searching import LocalRows, SplitSearch

Words = NDArray[np.int64]


class GrownTree:
    """Node i asks whether a row's bin of feature `feature[i]` is at most `threshold[i]`, or among `categories[i]`.

    Features are numbered among those that can be split. A child that is a leaf has the number -1 - leaf.
    """

    def __init__(self, most_leaves: int) -> None:
        nodes = most_leaves - 1
        self.num_leaves = 1
        self.feature, self.threshold, self.flags = (np.zeros(nodes, np.int64) for _ in range(3))
        self.left, self.right, self.node_count = (np.zeros(nodes, np.int64) for _ in range(3))
        self.categories = np.zeros((nodes, 4), np.int64)
        self.gain, self.node_value, self.node_weight = (np.zeros(nodes) for _ in range(3))
        self.leaf_value, self.leaf_weight = np.zeros(most_leaves), np.zeros(most_leaves)
        self.leaf_count = np.zeros(most_leaves, np.int64)


class TreeMemory(nn.Module):
    """All trees of a run, one row of each buffer a tree; `valid_loss` is infinite where nothing was held out.

    A round grows a tree, or one for each of several classes, side by side. Buffers, not parameters: a run that is
    resumed with more trees has more rows.
    """

    def __init__(self, rounds: int, most_leaves: int, classes: int = 1) -> None:
        super().__init__()
        for name, array in vars(GrownTree(most_leaves)).items():
            one = np.asarray(array)
            self.register_buffer(name, torch.from_numpy(np.zeros((rounds * classes, *one.shape), one.dtype)))
        self.register_buffer("valid_loss", torch.full((rounds,), torch.inf, dtype=torch.float64))

    def put(self, number: int, trees: Sequence[GrownTree], valid_loss: float) -> None:
        """Those of round `number`, from 0."""
        for place, tree in enumerate(trees, number * len(trees)):
            for name, array in vars(tree).items():
                self.get_buffer(name).numpy()[place] = array
        self.get_buffer("valid_loss")[number] = valid_loss

    def take(self, state: Mapping[str, Tensor]) -> None:
        """The trees of a checkpoint, as far as there is room for them."""
        for name, values in state.items():
            own = self.get_buffer(name)
            kept = min(len(own), len(values))
            own[:kept] = values[:kept]


def tree_of(state: Mapping[str, Tensor], number: int) -> GrownTree:
    tree = GrownTree(state["leaf_value"].shape[1])
    for name in vars(tree):
        value = state[name][number].numpy()
        setattr(tree, name, int(value) if value.ndim == 0 else value.copy())
    return tree


class DividedRows:
    """Rows of a table by leaf: the numbers of each leaf's rows lie side by side."""

    def __init__(self, tiles: NDArray[np.uint8], layout: ByteLayout, rows: range, most_leaves: int) -> None:
        self.tiles, self._layout = tiles, layout
        self._all = np.arange(rows.start, rows.stop, dtype=np.int32)
        self._rows, self._spare = self._all.copy(), np.empty_like(self._all)
        self._spans = [(0, 0)] * most_leaves

    def begin(self) -> None:
        self._rows[:] = self._all
        self._spans[0] = (0, len(self._rows))

    def of(self, leaf: int) -> NDArray[np.int32]:
        return self._rows[slice(*self._spans[leaf])]

    def divide(self, leaf: int, new: int, feature: int, to_left: NDArray[np.uint8]) -> None:
        begin, end = self._spans[leaf]
        column, goes = int(self._layout.columns[feature]), self._layout.directions(feature, to_left)
        middle = begin + histogram_kernels.divide(self.tiles, self.of(leaf), column, goes, self._spare)
        self._spans[leaf], self._spans[new] = (begin, middle), (middle, end)


class _Leaf:
    """A leaf as plain numbers: arrays of a few words cost more than what is done with them."""

    __slots__ = ("depth", "gain", "is_left", "l2", "node", "split", "totals")

    def __init__(
        self, totals: list[int], split: Words, l2: float, *, depth: int, node: int, is_left: bool
    ) -> None:
        """`node` is the one that it hangs on, on the left or not."""
        self.totals, self.l2, self.depth, self.node, self.is_left = totals, l2, depth, node, is_left
        self.split: list[int] = split.tolist()
        self.gain = float(split.view(np.float64)[fields.GAIN])


def grow(
    search: SplitSearch,
    local: LocalRows,
    features: Sequence[FeatureBins],
    options: GbdtOptions,
    divided: Sequence[DividedRows],
) -> GrownTree:
    """Collective: a tree; `divided` are this worker's rows, and then others that are to be in the same leaves."""
    for rows in divided:
        rows.begin()
    tree, rule = GrownTree(options.num_leaves), local.rule.tolist()
    totals, split = search.root(local, divided[0].of(0))
    leaves = [_Leaf(totals.tolist(), split, options.lambda_l2, depth=0, node=-1, is_left=True)]
    while len(leaves) < options.num_leaves:
        allowed = [leaf for leaf in leaves if not (options.max_depth and leaf.depth >= options.max_depth)]
        best = max(allowed, key=lambda leaf: leaf.gain, default=None)  # of equal ones the first
        if best is None or not best.gain > 0:
            break
        chosen, new, record = leaves.index(best), len(leaves), best.split
        node = new - 1
        if best.node >= 0:
            (tree.left if best.is_left else tree.right)[best.node] = node
        tree.left[node], tree.right[node] = ~chosen, ~new
        tree.feature[node], tree.threshold[node] = record[fields.FEATURE], record[fields.THRESHOLD]
        tree.flags[node] = record[fields.FLAGS] & (fields.CATEGORICAL | fields.DEFAULT_LEFT)
        tree.categories[node], tree.gain[node] = record[fields.BITS : fields.BITS + 4], best.gain
        value, weight, count = _value(best, rule, options.rate)
        tree.node_value[node], tree.node_weight[node], tree.node_count[node] = value, weight, count
        to_left = node_directions(tree, node, features[record[fields.FEATURE]])
        for rows in divided:
            rows.divide(chosen, new, record[fields.FEATURE], to_left)
        left = record[fields.LEFT : fields.LEFT + 2]
        right = [best.totals[0] - left[0], best.totals[1] - left[1]]
        l2 = options.lambda_l2 + (options.cat_l2 if record[fields.FLAGS] & fields.SORTED else 0.0)
        left_is_smaller = _count(left, rule) <= _count(right, rule)
        smaller = divided[0].of(chosen if left_is_smaller else new)
        order = np.array([left, right] if left_is_smaller else [right, left], np.int64)
        splits = search.children(local, chosen, new, smaller, order)
        if left_is_smaller:  # its histogram was kept as that of the new leaf, which is the right one
            search.swap(chosen, new)
        of_left, of_right = splits if left_is_smaller else splits[::-1]
        depth = best.depth + 1
        leaves[chosen] = _Leaf(left, of_left, l2, depth=depth, node=node, is_left=True)
        leaves.append(_Leaf(right, of_right, l2, depth=depth, node=node, is_left=False))
    tree.num_leaves = len(leaves)
    for number, leaf in enumerate(leaves):
        value, weight, count = _value(leaf, rule, options.rate)
        tree.leaf_value[number], tree.leaf_weight[number], tree.leaf_count[number] = value, weight, count
    return tree


def node_directions(tree: GrownTree, node: int, feature: FeatureBins) -> NDArray[np.uint8]:
    """For every bin of the feature that a node asks for, whether it goes to the left."""
    if tree.flags[node] & fields.CATEGORICAL:
        return np.unpackbits(tree.categories[node].view(np.uint8), bitorder="little")
    to_left = np.zeros(256, np.uint8)
    to_left[: tree.threshold[node] + 1] = 1
    if feature.missing:
        to_left[feature.count - 1] = bool(tree.flags[node] & fields.DEFAULT_LEFT)
    return to_left


def _count(totals: Sequence[int], rule: Sequence[float]) -> int:
    return totals[1] & ((1 << int(rule[0])) - 1)


def _value(leaf: _Leaf, rule: Sequence[float], rate: float) -> tuple[float, float, int]:
    """What a leaf adds to a score, its hessian, and its rows."""
    gradient, hessian = leaf.totals[0] / rule[4], (leaf.totals[1] >> int(rule[0])) / rule[5]
    value = -gradient / (hessian + leaf.l2) * rate if hessian + leaf.l2 > 0 else 0.0
    return value, hessian, _count(leaf.totals, rule)
