"""Sparse examples to probabilities: what a trained logistic regression answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from manyhands.data.matrix import Rows
from manyhands.data.row_files import FORMATS, Reading, RowText
from manyhands.data.store.tensorfile import check_precision
from manyhands.errors import DataError, UserError
from manyhands.workloads.exporting import Export, ExportAsked
from manyhands.workloads.logreg.model import LogregModel
from manyhands.workloads.predictor import Predictor, ReadAs

__all__ = ["LogregPredictor", "export_logreg", "open_logreg"]


class LogregPredictor(Predictor[Rows]):
    """The probability of the larger label."""

    takes: ClassVar[str] = "a line as the model was trained on, LIBSVM's or Vowpal Wabbit's"
    formats: ClassVar[tuple[str, ...]] = FORMATS

    def __init__(self, model: LogregModel) -> None:
        self.model = model

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[Rows]:
        """All examples of the file; `-` is stdin."""
        reading = Reading(format=read_as.format, skip_bad=read_as.skip_bad, threads=read_as.threads)
        file = self.model.file(source, reading)
        yield from file.blocks()
        self.left_out = file.bad_lines

    def inputs(self, values: Sequence[Any]) -> Rows:
        """Each value is one line of text."""
        for number, value in enumerate(values):
            if not isinstance(value, str) or not value.strip() or "\n" in value:
                raise UserError(f"input {number} is {str(value)[:40]!r}; it must be {self.takes}")
        reading = Reading(bits=self.model.bits, hash=self.model.hash, threads=1)
        text = "".join(f"{value}\n" for value in values).encode("utf-8", errors="replace")
        try:
            rows = Rows.join(list(RowText(text, reading).blocks()))
        except DataError as error:
            raise UserError(f"{error}; line n is input n - 1") from error
        if len(rows) != len(values):
            raise UserError(
                f"{len(values)} inputs hold {len(rows)} examples; give each as an input of its own"
            )
        return rows

    def together(self, parts: Sequence[Rows]) -> Rows:
        return Rows.join(parts)

    def answers(self, inputs: Rows) -> list[Any]:
        """The probability of the larger label, and which label that makes."""
        labels = self.model.labels
        return [
            {"label": labels.yes if chance >= 0.5 else labels.no, "probability": chance}
            for chance in self.model.probabilities(inputs).tolist()
        ]

    def lines(self, inputs: Rows) -> Iterator[str]:
        return (f"{chance:.6g}" for chance in self.model.probabilities(inputs).tolist())

    @property
    def example(self) -> Any:
        return "0 1:1 3:0.5"


def open_logreg(path: Path) -> LogregPredictor:
    """That of a run of `train logreg`, or of a file of its model."""
    return LogregPredictor(LogregModel.load(path))


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
