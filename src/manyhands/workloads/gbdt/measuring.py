"""How good a model is on rows with labels."""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.errors import DataError
from manyhands.workloads.gbdt.model import GbdtModel
from manyhands.workloads.gbdt.row_sources import RowSource
from manyhands.workloads.logreg.labels import PAIRS
from manyhands.workloads.logreg.metrics import measure

__all__ = ["measure_model"]


def measure_model(model: GbdtModel, source: RowSource) -> dict[str, Any]:
    """Accuracy, AUC and log loss of two labels, or the root of the mean squared error and R² of a number."""
    source, scores, labels, weights = source.for_names(model.names), [], [], []
    for block in source.blocks():
        if block.labels is None:
            raise DataError(f"{source.name} has rows without labels; to predict them use `manyhands predict`")
        scores.append(model.scores(block))
        labels.append(block.labels)
        weights.append(block.weights if block.weights is not None else np.ones(len(block)))
    score, label, weight = (np.concatenate(parts) for parts in (scores, labels, weights))
    if model.link.is_binary:
        pair = next((pair for pair in PAIRS if np.isin(label, pair).all()), None)
        if pair is None:
            raise DataError(f"{source.name} has labels that are no two of -1 and 1, 0 and 1, or 1 and 2")
        found = measure(score, (label == pair[1]).astype(np.float32), weight.astype(np.float32)).as_dict()
        return {**found, "test_rows": len(label)}
    predicted = model.link(score)
    error = float(np.average((predicted - label) ** 2, weights=weight))
    spread = float(np.average((label - np.average(label, weights=weight)) ** 2, weights=weight))
    return {"rmse": error**0.5, "r2": 1 - error / spread if spread else None, "test_rows": len(label)}
