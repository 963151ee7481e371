"""Trees as they are grown, in bins, and the memory that holds all trees of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["GrownTree", "TreeMemory"]


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

    def arrays(self) -> dict[str, Any]:
        return vars(self)


class TreeMemory(nn.Module):
    """All trees of a run, one row of each buffer a tree; `valid_loss` is infinite where nothing was held out.

    Buffers, not parameters: a run that is resumed with more trees has more rows.
    """

    def __init__(self, trees: int, most_leaves: int) -> None:
        super().__init__()
        for name, array in GrownTree(most_leaves).arrays().items():
            one = np.asarray(array)
            self.register_buffer(name, torch.from_numpy(np.zeros((trees, *one.shape), one.dtype)))
        self.register_buffer("valid_loss", torch.full((trees,), torch.inf, dtype=torch.float64))
        self._most_leaves = most_leaves

    def __len__(self) -> int:
        return len(self.get_buffer("num_leaves"))

    def put(self, number: int, tree: GrownTree, valid_loss: float) -> None:
        for name, array in tree.arrays().items():
            self.get_buffer(name).numpy()[number] = array
        self.get_buffer("valid_loss")[number] = valid_loss

    def tree(self, number: int) -> GrownTree:
        return tree_of(dict(self.named_buffers()), number)

    def take(self, state: Mapping[str, Tensor]) -> None:
        """The trees of a checkpoint, as far as there is room for them."""
        for name, values in state.items():
            own = self.get_buffer(name)
            kept = min(len(own), len(values))
            own[:kept] = values[:kept]

    def valid_losses(self) -> NDArray[np.float64]:
        """Of every tree that was kept, after it."""
        found: NDArray[np.float64] = self.get_buffer("valid_loss").numpy()
        return found


def tree_of(state: Mapping[str, Tensor], number: int) -> GrownTree:
    leaves = state["leaf_value"].shape[1]
    tree = GrownTree(leaves)
    for name in tree.arrays():
        value = state[name][number].numpy()
        setattr(tree, name, int(value) if value.ndim == 0 else value.copy())
    return tree
