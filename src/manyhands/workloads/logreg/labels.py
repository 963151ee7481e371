"""Which two labels a file has, and which of them means yes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import DataError

__all__ = ["PAIRS", "Labels", "Metrics", "labels_of", "measure"]

PAIRS = ((-1.0, 1.0), (0.0, 1.0), (1.0, 2.0))
"""No and yes, in the ways that files write them."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The label of no and the label of yes."""

    no: float
    yes: float

    def __str__(self) -> str:
        return f"{self.no:g} {self.yes:g}"

    def targets(self, labels: NDArray[np.float32], where: str) -> NDArray[np.float32]:
        """0 for no and 1 for yes; DataError says what else there is in `where`."""
        is_yes = labels == self.yes
        wrong = labels[~(is_yes | (labels == self.no))]
        if len(wrong):
            shown = "none" if np.isnan(wrong[0]) else f"{wrong[0]:g}"
            raise DataError(
                f"{where} has an example with label {shown} besides {self.no:g} and {self.yes:g}; a logistic "
                "regression needs exactly two labels"
            )
        found: NDArray[np.float32] = is_yes.astype(np.float32)
        return found


def labels_of(seen: Iterable[float], where: str) -> Labels | None:
    """The pair of the labels seen so far; None while 1 alone may be yes or no. DataError names labels of no pair."""
    values = np.unique(np.array(list(seen), float)).tolist()  # one NaN at most, as the last
    fitting = [pair for pair in PAIRS if set(values) <= set(pair)]
    if not fitting:
        shown = ", ".join("none" if np.isnan(value) else f"{value:g}" for value in values[:5])
        raise DataError(
            f"{where} has labels {shown}{', ...' if len(values) > 5 else ''}; a logistic regression needs two: "
            "-1 and 1, 0 and 1, or 1 and 2"
        )
    return Labels(*fitting[0]) if len(fitting) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Means over `examples`, each counted with its weight; `auc` is None where all have one label."""

    examples: int
    accuracy: float
    auc: float | None
    log_loss: float
    confusion: tuple[tuple[int, int], tuple[int, int]]
    """How many examples of each label, no before yes, were predicted to be a no and a yes; weights do not count."""

    @property
    def figures(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, "auc": self.auc, "log_loss": self.log_loss}

    def quality(self, measured_on: str, labels: Sequence[object]) -> dict[str, Any]:
        """What the page of a run shows of a model that was measured on this."""
        scores = dict(zip(("accuracy", "AUC", "log loss"), self.figures.values(), strict=True))
        return {
            "measured_on": f"{self.examples:,} {measured_on}",
            "scores": {name: one for name, one in scores.items() if one is not None},
            "labels": [f"{one:g}" if isinstance(one, float) else str(one) for one in labels],
            "confusion": self.confusion,
        }


def measure(
    margins: NDArray[np.float64], targets: NDArray[np.float32], weights: NDArray[np.float32] | None = None
) -> Metrics:
    """Compare margins (probability 1 / (1 + exp(-margin))) with targets of 0 and 1, at least one."""
    counted = np.ones(len(margins)) if weights is None else weights.astype(np.float64)
    is_yes = targets > 0
    wrong_by = np.where(is_yes, -margins, margins)
    # The chance that a yes has a larger margin than a no, a tie being half of one (Mann and Whitney).
    _, group = np.unique(margins, return_inverse=True)
    yes, no = np.bincount(group, counted * is_yes), np.bincount(group, counted * ~is_yes)
    pairs = yes.sum() * no.sum()
    said = margins > 0
    area = float((yes * (np.cumsum(no) - no / 2)).sum() / pairs) if pairs else None
    return Metrics(
        examples=len(margins),
        accuracy=float(np.average(said == is_yes, weights=counted)),
        auc=area,
        log_loss=float(np.average(np.logaddexp(0.0, wrong_by), weights=counted)),
        confusion=(
            (int((~said & ~is_yes).sum()), int((said & ~is_yes).sum())),
            (int((~said & is_yes).sum()), int((said & is_yes).sum())),
        ),
    )
