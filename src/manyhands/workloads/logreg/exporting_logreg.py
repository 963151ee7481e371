"""A trained logistic regression in fewer bits, with what that costs on a file of examples."""

from __future__ import annotations

import json
from dataclasses import asdict

from manyhands.data.store.exported import check_precision
from manyhands.workloads.exporting import Export, ExportAsked
from manyhands.workloads.logreg.model import LogregModel

__all__ = ["export_logreg"]


def export_logreg(asked: ExportAsked) -> Export:
    """Write the model of a run in that precision; where a `test` file is given, predict it before and after."""
    run, precision, test = asked.run, asked.precision, asked.test
    check_precision(precision)
    model = LogregModel.load(run)
    file = asked.target(f"model-{precision}.safetensors")
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
