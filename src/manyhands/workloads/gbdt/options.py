"""What gradient boosting learns with: the objective, the shape of its trees, and when it stops."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.workloads.task_options import CheckedOptions, option

__all__ = ["OBJECTIVES", "PARALLEL", "GbdtOptions"]

OBJECTIVES = {
    "auto": "binary where the labels are two of -1 and 1, 0 and 1, or 1 and 2; else regression",
    "binary": "log loss of two labels",
    "regression": "squared error",
}
PARALLEL = {
    "data": "the histograms of all features are summed over workers; the trees are those of one worker",
    "voting": "workers vote for features, and the histograms of those elected are summed (Meng et al., 2016)",
}


@dataclass(frozen=True, kw_only=True)
class GbdtOptions(CheckedOptions):
    """One training."""

    objective: str = option("auto", "binary, regression, or auto: as the labels look", choices=OBJECTIVES)
    trees: int = option(100, "trees at most", at_least=1)
    rate: float = option(0.1, "learning rate: what a new tree is multiplied by", above=0)
    num_leaves: int = option(31, "leaves of a tree at most", at_least=2)
    max_depth: int = option(0, "splits from root to leaf at most; 0: any number", at_least=0)
    min_data_in_leaf: int = option(20, "rows of a leaf at least", at_least=1)
    min_sum_hessian: float = option(1e-3, "hessian of a leaf at least", at_least=0, hidden=True)
    lambda_l2: float = option(0.0, "L2 penalty on the values of leaves", at_least=0)
    min_gain: float = option(0.0, "a split that gains no more is not made", at_least=0, hidden=True)
    max_bin: int = option(255, "bins of a feature at most, up to 255", at_least=2, at_most=255)
    """A bin is one byte; that of missing values is included."""
    max_cat_to_onehot: int = option(4, "bins to split one against the rest", at_least=1, hidden=True)
    cat_smooth: float = option(10.0, "added to a category's hessian in sorting", at_least=0, hidden=True)
    """A category with fewer rows is left out."""
    cat_l2: float = option(10.0, "added to lambda_l2 where categories are sorted", at_least=0, hidden=True)
    max_cat_threshold: int = option(32, "categories on the left of a split at most", at_least=1, hidden=True)
    min_data_per_group: int = option(100, "rows a categorical split moves at least", at_least=1, hidden=True)
    parallel: str = option(
        "data", "data: histograms of all features; voting: of those elected", choices=PARALLEL
    )
    top_k: int = option(20, "with voting, features that each worker votes for", at_least=1)
    """Twice as many are elected."""
    early_stopping: int = option(
        0, "end after so many trees no better on rows held out; 0: never", at_least=0
    )
    seed: int = option(0, "fixes which rows are held out, and which the bins are made of", at_least=0)
    allow_overload: bool = option(False, "start even if the workers do not seem to fit on this host")
