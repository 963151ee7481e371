"""What can be done with a trained model, by the name of its task: a plain dict, one line for each.

A workload that trains something new adds its line here, and `manyhands predict`, `generate`, `export` and `serve` know
it: none of them asks for a name. What a line names is imported when it is first used.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = ["PREDICTORS", "Use", "found_at"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """Where a workload's functions are: each `module:name`, the module under `manyhands`."""

    predictor: str
    """(path: Path) -> Predictor, of a run's directory or a file of its model; see `workloads.predictor`."""

    exporter: str = "workloads.exporting:export_weights"
    """(ExportAsked) -> Export: the model as one file, in as few bits as wanted."""

    begins: bytes = b""
    """What a file of its model begins with, where that tells it from all others; safetensors files name their task."""


PREDICTORS: dict[str, Use] = {
    "digits": Use(predictor="serving.predict_arrays:open_images"),
    "mnist": Use(predictor="serving.predict_arrays:open_images"),
    "line": Use(predictor="serving.predict_arrays:open_numbers"),
    "language": Use(predictor="serving.predict_text:open_text"),
    "recurrent": Use(predictor="serving.predict_text:open_text"),
    "logreg": Use(
        predictor="workloads.logreg.predicting:open_logreg",
        exporter="workloads.logreg.exporting_logreg:export_logreg",
    ),
    "svd": Use(predictor="workloads.svd.predicting:open_svd", exporter="workloads.svd.predicting:export_svd"),
    "gbdt": Use(
        predictor="workloads.gbdt.predicting:open_gbdt",
        exporter="workloads.gbdt.predicting:export_gbdt",
        begins=b"tree\nversion=",
    ),
    "glove": Use(
        predictor="workloads.glove.predicting:open_vectors",
        exporter="workloads.glove.predicting:export_vectors",
    ),
}


def found_at(home: str) -> Any:
    """What a line names."""
    module, _, name = home.partition(":")
    return getattr(import_module(f"manyhands.{module}"), name)
