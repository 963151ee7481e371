"""One tree, grown leaf by leaf: always the leaf whose best split gains most (leaf-wise, best first).

All workers grow the same tree, each with its own rows; see `searching` for what they tell each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from manyhands.boosting import histogram_kernels
from manyhands.boosting.binning import FeatureBins
from manyhands.boosting.options import GbdtOptions
from manyhands.boosting.searching import LocalRows, SplitSearch
from manyhands.boosting.split_kernels import (
    BITS,
    CATEGORICAL,
    DEFAULT_LEFT,
    FEATURE,
    FLAGS,
    GAIN,
    LEFT,
    SORTED,
    THRESHOLD,
)
from manyhands.boosting.trees import GrownTree

__all__ = ["DividedRows", "grow", "node_directions"]

Words = NDArray[np.int64]


class DividedRows:
    """Rows of a table by leaf: the numbers of each leaf's rows lie side by side."""

    def __init__(self, tiles: NDArray[np.uint8], rows: range, most_leaves: int) -> None:
        self.tiles = tiles
        self._all = np.arange(rows.start, rows.stop, dtype=np.int32)
        self._rows = self._all.copy()
        self._spare = np.empty_like(self._all)
        self._spans = [(0, 0)] * most_leaves

    def begin(self) -> None:
        """All are in leaf 0."""
        self._rows[:] = self._all
        self._spans[0] = (0, len(self._rows))

    def of(self, leaf: int) -> NDArray[np.int32]:
        """A leaf's rows, ascending."""
        begin, end = self._spans[leaf]
        found: NDArray[np.int32] = self._rows[begin:end]
        return found

    def divide(self, leaf: int, new: int, feature: int, to_left: NDArray[np.uint8]) -> None:
        """Leave the rows whose bin goes to the left in `leaf`, and give the others to `new`."""
        begin, end = self._spans[leaf]
        middle = begin + histogram_kernels.divide(self.tiles, self.of(leaf), feature, to_left, self._spare)
        self._spans[leaf], self._spans[new] = (begin, middle), (middle, end)


@dataclass(slots=True)
class _Leaf:
    totals: Words
    split: Words
    depth: int = 0
    l2: float = 0.0
    node: int = -1
    """The node that it hangs on, and on which side."""
    is_left: bool = True
    gain: float = field(init=False)

    def __post_init__(self) -> None:
        self.gain = float(self.split.view(np.float64)[GAIN])


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
    tree = GrownTree(options.num_leaves)
    totals, split = search.root(local, divided[0].of(0))
    leaves = [_Leaf(totals, split, l2=options.lambda_l2)]
    while len(leaves) < options.num_leaves:
        chosen = _best_leaf(leaves, options.max_depth)
        if chosen is None:
            break
        parent, new = leaves[chosen], len(leaves)
        record = parent.split
        _write_node(tree, leaves, chosen, local.rule, options)
        to_left = node_directions(tree, new - 1, features[record[FEATURE]])
        for rows in divided:
            rows.divide(chosen, new, int(record[FEATURE]), to_left)
        left_totals = record[LEFT : LEFT + 2].copy()
        sums = left_totals, parent.totals - left_totals
        bits = np.int64(local.rule[0])
        counts = [int(one[1] & ((np.int64(1) << bits) - 1)) for one in sums]
        l2 = options.lambda_l2 + (options.cat_l2 if record[FLAGS] & SORTED else 0.0)
        left_is_smaller = counts[0] <= counts[1]
        smaller = divided[0].of(chosen if left_is_smaller else new)
        order = sums if left_is_smaller else (sums[1], sums[0])
        first, second = search.children(local, chosen, new, smaller, order)
        if left_is_smaller:  # its histogram was kept as that of the new leaf, which is the right one
            search.swap(chosen, new)
            splits = first, second
        else:
            splits = second, first
        node = len(leaves) - 1
        leaves[chosen] = _Leaf(sums[0], splits[0], parent.depth + 1, l2, node, True)
        leaves.append(_Leaf(sums[1], splits[1], parent.depth + 1, l2, node, False))
    _write_leaves(tree, leaves, local.rule, options)
    return tree


def _best_leaf(leaves: Sequence[_Leaf], max_depth: int) -> int | None:
    """The leaf to split next, of equal ones the first; None where no split gains anything."""
    best, chosen = 0.0, None
    for number, leaf in enumerate(leaves):
        if leaf.gain > best and not (max_depth and leaf.depth >= max_depth):
            best, chosen = leaf.gain, number
    return chosen


def node_directions(tree: GrownTree, node: int, feature: FeatureBins) -> NDArray[np.uint8]:
    """For every bin of the feature that a node asks for, whether it goes to the left."""
    if tree.flags[node] & CATEGORICAL:
        return np.unpackbits(tree.categories[node].view(np.uint8), bitorder="little")
    to_left = np.zeros(256, np.uint8)
    to_left[: tree.threshold[node] + 1] = 1
    if feature.missing:
        to_left[feature.count - 1] = bool(tree.flags[node] & DEFAULT_LEFT)
    return to_left


def _sums(totals: Words, rule: NDArray[np.float64]) -> tuple[float, float, int]:
    """Gradient, hessian and number of rows."""
    bits = int(rule[0])
    return (
        float(totals[0] / rule[4]),
        float((totals[1] >> bits) / rule[5]),
        int(totals[1]) & ((1 << bits) - 1),
    )


def _value(leaf: _Leaf, rule: NDArray[np.float64], rate: float) -> tuple[float, float, int]:
    """What a leaf adds to a score, its hessian, and its rows."""
    gradient, hessian, count = _sums(leaf.totals, rule)
    return (-gradient / (hessian + leaf.l2) * rate if hessian + leaf.l2 > 0 else 0.0), hessian, count


def _write_node(
    tree: GrownTree, leaves: Sequence[_Leaf], chosen: int, rule: NDArray[np.float64], options: GbdtOptions
) -> None:
    """Make a node of a leaf; its children are that leaf and a new one."""
    leaf, node = leaves[chosen], len(leaves) - 1
    record = leaf.split
    if leaf.node >= 0:
        (tree.left if leaf.is_left else tree.right)[leaf.node] = node
    tree.left[node], tree.right[node] = ~chosen, ~len(leaves)
    tree.feature[node], tree.threshold[node] = record[FEATURE], record[THRESHOLD]
    tree.flags[node] = record[FLAGS] & (CATEGORICAL | DEFAULT_LEFT)
    tree.categories[node] = record[BITS : BITS + 4]
    tree.gain[node] = leaf.gain
    tree.node_value[node], tree.node_weight[node], tree.node_count[node] = _value(leaf, rule, options.rate)


def _write_leaves(
    tree: GrownTree, leaves: Sequence[_Leaf], rule: NDArray[np.float64], options: GbdtOptions
) -> None:
    tree.num_leaves = len(leaves)
    for number, leaf in enumerate(leaves):
        value, weight, count = _value(leaf, rule, options.rate)
        tree.leaf_value[number], tree.leaf_weight[number], tree.leaf_count[number] = value, weight, count
