"""How good predictions are: accuracy, the area under the ROC curve, and log loss."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Metrics", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Means over `examples`, each counted with its weight; `auc` is None where all have one label."""

    examples: int
    accuracy: float
    auc: float | None
    log_loss: float

    def as_dict(self) -> dict[str, int | float | None]:
        """For a summary."""
        return asdict(self)


def measure(
    margins: NDArray[np.float64],
    targets: NDArray[np.float32],
    weights: NDArray[np.float32] | None = None,
) -> Metrics:
    """Compare margins (probability 1 / (1 + exp(-margin))) with targets of 0 and 1, at least one."""
    counted = np.ones(len(margins)) if weights is None else weights.astype(np.float64)
    is_yes = targets > 0
    away = np.where(is_yes, -margins, margins)
    return Metrics(
        examples=len(margins),
        accuracy=float(np.average((margins > 0) == is_yes, weights=counted)),
        auc=_area(margins, is_yes, counted),
        log_loss=float(np.average(np.logaddexp(0.0, away), weights=counted)),
    )


def _area(
    margins: NDArray[np.float64], is_yes: NDArray[np.bool_], counted: NDArray[np.float64]
) -> float | None:
    """The chance that a yes has a larger margin than a no, a tie being half of one (Mann and Whitney)."""
    _, group = np.unique(margins, return_inverse=True)
    yes = np.bincount(group, counted * is_yes)
    no = np.bincount(group, counted * ~is_yes)
    if not (yes.sum() and no.sum()):
        return None
    below = np.cumsum(no) - no
    return float((yes * (below + no / 2)).sum() / (yes.sum() * no.sum()))
