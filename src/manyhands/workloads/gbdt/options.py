"""What gradient boosting learns with: the objective, the shape of its trees, and when it stops."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.workloads.task_options import CheckedOptions, memory_option, option

OBJECTIVES = {
    "auto": "binary for two integers or names, multiclass for up to 32 integers or any names; else regression",
    "binary": "log loss of two labels",
    "multiclass": "log loss of several labels: one tree for each in every round (softmax)",
    "regression": "squared error",
}
PARALLEL = {
    "data": "the histograms of all features are summed over workers; the trees are those of one worker",
    "voting": "workers vote for features, and the histograms of those elected are summed (Meng et al., 2016)",
}


@dataclass(frozen=True, kw_only=True)
class GbdtOptions(CheckedOptions):
    """One training."""

    objective: str = option(
        "auto", "binary, multiclass or regression; auto: chosen by the labels", choices=OBJECTIVES
    )
    trees: int = option(100, "maximum number of trees; of several classes, for each", at_least=1)
    rate: float = option(0.1, "learning rate: factor of each new tree", above=0)
    num_leaves: int = option(31, "maximum leaves per tree", at_least=2)
    max_depth: int = option(0, "maximum depth of a tree; 0: no limit", at_least=0)
    min_data_in_leaf: int = option(20, "minimum rows per leaf", at_least=1)
    min_sum_hessian: float = option(1e-3, "minimum sum of hessians per leaf", at_least=0, hidden=True)
    lambda_l2: float = option(0.0, "L2 penalty on leaf values", at_least=0)
    min_gain: float = option(0.0, "minimum gain of a split", at_least=0, hidden=True)
    max_bin: int = option(255, "maximum bins per feature, up to 255", at_least=2, at_most=255)
    """A bin is one byte; that of missing values is included."""
    min_data_in_bin: int = option(3, "minimum rows per bin", at_least=1, hidden=True)
    max_cat_to_onehot: int = option(4, "maximum bins for one-against-the-rest", at_least=1, hidden=True)
    cat_smooth: float = option(10.0, "added to a category's hessian when sorting", at_least=0, hidden=True)
    """A category with fewer rows is left out."""
    cat_l2: float = option(10.0, "added to lambda_l2 for sorted categories", at_least=0, hidden=True)
    max_cat_threshold: int = option(32, "maximum categories on the left of a split", at_least=1, hidden=True)
    min_data_per_group: int = option(100, "minimum rows per categorical split", at_least=1, hidden=True)
    parallel: str = option(
        "data", "exchange histograms of all features (data) or of elected ones (voting)", choices=PARALLEL
    )
    top_k: int = option(20, "with voting: features each worker votes for", at_least=1)
    """Twice as many are elected."""
    early_stopping: int = option(
        0, "stop after this many trees without improvement on held-out rows; 0: never", at_least=0
    )
    seed: int = option(0, "fixes which rows are held out and which rows define the bins", at_least=0)
    memory_bytes: int = memory_option(
        "memory for rows; bins beyond it go to temporary files", flag="--memory"
    )
    """Besides the interpreter and its libraries, and for one worker."""
    allow_overload: bool = option(False, "start even if this host seems too small for the workers")
