"""Compiled predictions: every row through every tree."""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.native.decorators import njit

__all__ = ["add_trees", "warm"]

_ZERO = 1e-35  # what LightGBM's files count as zero, where zero is missing


@njit(cache=True, nogil=True, error_model="numpy")
def add_trees(
    values: Any,
    node_starts: Any,
    leaf_starts: Any,
    set_starts: Any,
    word_starts: Any,
    feature: Any,
    threshold: Any,
    decision: Any,
    left: Any,
    right: Any,
    leaf_value: Any,
    sets: Any,
    words: Any,
    out: Any,
) -> None:
    """Add the leaf of each row in each tree; all arrays are those of `DecisionTree`, one tree after the other."""
    for tree in range(node_starts.size - 1):
        first, leaf, own_sets = node_starts[tree], leaf_starts[tree], set_starts[tree]
        own_words = words[word_starts[tree] : word_starts[tree + 1]]
        if node_starts[tree + 1] == first:
            for row in range(out.size):
                out[row] += leaf_value[leaf]
            continue
        for row in range(out.size):
            node = 0
            while node >= 0:
                at = first + node
                value, kind = values[row, feature[at]], decision[at]
                if kind & 1:
                    goes_left = False
                    if 0 <= value < 2147483648.0:
                        category, number = np.int64(value), np.int64(threshold[at])
                        begin, end = sets[own_sets + number], sets[own_sets + number + 1]
                        if category // 32 < end - begin:
                            goes_left = (
                                own_words[begin + category // 32] >> np.uint32(category % 32)
                            ) & 1 == 1
                else:
                    missing = (kind >> 2) & 3
                    if np.isnan(value) and missing != 2:
                        value = 0.0
                    if (missing == 1 and abs(value) <= _ZERO) or (missing == 2 and np.isnan(value)):
                        goes_left = kind & 2 == 2
                    else:
                        goes_left = value <= threshold[at]
                node = left[at] if goes_left else right[at]
            out[row] += leaf_value[leaf - 1 - node]


def warm() -> None:
    """Compile by predicting no row."""
    starts, whole, real = np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0)
    sets = (starts, np.zeros(0, np.uint32))
    add_trees(
        np.zeros((0, 1)), starts, starts, starts, starts, whole, real, whole, whole, whole, real, *sets, real
    )
