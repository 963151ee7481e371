"""A small table to grow trees on, and the shortest ways to do it."""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.workloads.gbdt.model import GbdtModel
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.row_sources import ArraySource, RowBlock
from manyhands.workloads.gbdt.training import GbdtResult, TableChoice, train_gbdt


def drawn_table(rows: int = 700, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Numbers, some of them missing, a categorical column (4), and labels that depend on all of it."""
    drawn = np.random.default_rng(seed)
    values = drawn.normal(size=(rows, 6)).round(3)
    values[:, 4] = drawn.integers(0, 12, rows)
    logit = values[:, 0] * 2 - values[:, 1] ** 2 + (values[:, 4] % 3 == 1) * 2
    values[drawn.random((rows, 6)) < 0.1] = np.nan
    logit += np.isnan(values[:, 2]) * 2
    return values, (logit + drawn.logistic(size=rows) > 0).astype(float)


def choice(values: np.ndarray, labels: np.ndarray, **more: Any) -> TableChoice:
    return TableChoice(train=ArraySource(values, labels), **more)


def trained(table: TableChoice, **options: Any) -> GbdtResult:
    return train_gbdt(table, GbdtOptions(**options))


def predictions(model: GbdtModel, values: np.ndarray) -> np.ndarray:
    return model.predict(RowBlock(labels=None, dense=values))
