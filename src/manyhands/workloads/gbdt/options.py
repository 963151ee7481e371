"""What gradient boosting learns with: the objective, the shape of its trees, and when it stops."""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyhands.errors import UserError, nearest

__all__ = ["OBJECTIVES", "PARALLEL", "GbdtOptions"]

OBJECTIVES = {
    "auto": "binary where the labels are two of -1 and 1, 0 and 1, or 1 and 2; else regression",
    "binary": "log loss of two labels",
    "regression": "squared error",
}
"""What is learned, by name."""

PARALLEL = {
    "data": "the histograms of all features are summed over workers; the trees are those of one worker",
    "voting": "workers vote for features, and the histograms of those elected are summed (Meng et al., 2016)",
}
"""What travels, by name."""

_MOST_BINS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class GbdtOptions:
    """One training, checked when made: a UserError names the field, its value and what is allowed."""

    objective: str = "auto"
    trees: int = 100
    rate: float = 0.1
    """What the values of a new tree are multiplied by (shrinkage)."""
    num_leaves: int = 31
    max_depth: int = 0
    """Splits between root and leaf at most; 0: any number."""
    min_data_in_leaf: int = 20
    min_sum_hessian: float = 1e-3
    """Of a leaf."""
    lambda_l2: float = 0.0
    min_gain: float = 0.0
    """A split that gains no more is not made."""
    max_bin: int = 255
    """Bins of a feature, that of missing values included."""
    max_cat_to_onehot: int = 4
    """A categorical feature with no more bins is split one category against the rest."""
    cat_smooth: float = 10.0
    """Added to a category's hessian where categories are sorted; one with fewer rows is left out."""
    cat_l2: float = 10.0
    """Added to lambda_l2 where categories are sorted."""
    max_cat_threshold: int = 32
    """Categories on the left of a split at most."""
    min_data_per_group: int = 100
    """Rows that a categorical split moves at a time at least."""
    parallel: str = "data"
    top_k: int = 20
    """Features that each worker votes for; twice as many are elected."""
    early_stopping: int = 0
    """Trees in a row that are no better on the rows held out, after which training ends; 0: it does not."""
    seed: int = 0
    """Which rows are held out, and which are looked at for the bounds of bins."""
    allow_overload: bool = False
    """Start even if the workers do not seem to fit into the memory and the limits of this host."""

    def __post_init__(self) -> None:
        for name, words in (("objective", OBJECTIVES), ("parallel", PARALLEL)):
            if getattr(self, name) not in words:
                raise UserError(
                    f"unknown {name} {getattr(self, name)!r}; {nearest(getattr(self, name), words)}"
                )
        least = {
            "trees": 1,
            "num_leaves": 2,
            "max_depth": 0,
            "min_data_in_leaf": 1,
            "max_bin": 2,
            "max_cat_to_onehot": 1,
            "max_cat_threshold": 1,
            "min_data_per_group": 1,
            "top_k": 1,
            "early_stopping": 0,
            "seed": 0,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < bound:
                raise UserError(f"{name}={value!r} must be a whole number of at least {bound}")
        if self.max_bin > _MOST_BINS:
            raise UserError(f"max_bin={self.max_bin} must be at most {_MOST_BINS}: a bin is one byte")
        if not 0 < self.rate < math.inf:
            raise UserError(f"rate={self.rate!r} must be a number above 0")
        for name in ("min_sum_hessian", "lambda_l2", "min_gain", "cat_smooth", "cat_l2"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise UserError(f"{name}={value!r} must be a number of at least 0")
