"""A trained logistic regression in fewer bits, with what that costs on a file of examples."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from manyhands.exporting import Export
from manyhands.regression.model import MODEL_FILE, LogregModel
from manyhands.store.exported import check_precision

__all__ = ["export_logreg", "is_logreg"]


def is_logreg(run: Path) -> bool:
    """Whether a run's directory is that of `train logreg`."""
    return (run / MODEL_FILE).is_file()


def export_logreg(run: Path, out: Path | None, precision: str, test: Path | None) -> Export:
    """Write the model of a run in that precision; where a `test` file is given, predict it before and after."""
    check_precision(precision)
    model = LogregModel.load(run)
    file = out if out is not None else run / f"model-{precision}.safetensors"
    before = asdict(model.evaluate(model.file(test))) if test is not None else {}
    after = asdict(model.narrowed(precision).evaluate(model.file(test))) if test is not None else {}
    model.save(file, precision)
    summary = run / "summary.json"
    steps = int(json.loads(summary.read_text()).get("steps", 0)) if summary.is_file() else 0
    return Export(
        path=file,
        precision=precision,
        steps=steps,
        num_bytes=file.stat().st_size,
        full_bytes=model.table.nbytes,
        before=before,
        after=after,
    )
