"""A trained logistic regression: its weights, how its features are found, and its file.

The file is safetensors: `weight`, one number for each feature (of several classes a row for each), and `bias`, in
single precision or, exported, in fewer bits; the header says how a file of examples must be read for it (bits, hash)
and what its labels are. It holds no code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.data.row_files import FORMATS, Reading, RowFile, Rows, RowText
from manyhands.data.store.atomic import write_atomically
from manyhands.data.store.tensorfile import check_precision, encode_tensors, narrow, widen
from manyhands.data.table_encoding import TableEncoding
from manyhands.data.table_files import TableReading
from manyhands.errors import DataError, UserError
from manyhands.workloads.exporting import Export, ExportAsked, read_model_file
from manyhands.workloads.logreg import logreg_kernels
from manyhands.workloads.logreg.example_tables import ExampleTable, open_examples
from manyhands.workloads.logreg.labels import Labels, Metrics, measure, softmax
from manyhands.workloads.predictor import Predictor, ReadAs, encoded_inputs, table_of

MODEL_FILE = "model.safetensors"
_FORMAT = "manyhands.logreg.1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogregModel:
    """`table` is the bias and then the weight of every feature; of several classes, a row for each."""

    table: NDArray[np.float32]
    labels: Labels
    bits: int | None = None
    hash: str = "numbers"
    encoding: TableEncoding | None = None  # of a table: how its columns become features

    @property
    def weight(self) -> NDArray[np.float32]:
        return self.table[..., 1:]

    @property
    def bias(self) -> Any:
        """A number, or one for each of several classes."""
        return self.table[..., 0]

    def margins(self, rows: Rows) -> NDArray[np.float64]:
        """Of each row one number, or one for each of several classes."""
        tables, given = np.atleast_2d(self.table), (rows.starts, rows.indices, rows.values, rows.weights)
        out = np.empty((len(tables), len(rows)))
        for table, own in zip(tables, out, strict=True):
            logreg_kernels.margins(table, given, own)
        return out[0] if self.table.ndim == 1 else np.ascontiguousarray(out.T)

    def probabilities(self, rows: Rows) -> NDArray[np.float64]:
        """The chance that a row's label is yes (the larger of the two labels); of several, that of each in a column."""
        margins = self.margins(rows)
        return softmax(margins) if margins.ndim == 2 else np.exp(-np.logaddexp(0.0, -margins))

    def file(self, data: Any, reading: Reading | None = None, *, labelled: bool = True) -> RowFile:
        """Examples for this model: those of a file, or of a DataFrame where it was trained on a table."""
        reading = replace(reading or Reading(), bits=self.bits, hash=self.hash)
        label = self.encoding.label if self.encoding is not None and labelled else None
        table = TableReading(label=label, labelled=labelled, labels=tuple(self.labels) if labelled else ())
        return open_examples(data, reading, table, self.encoding)

    def evaluate(self, file: RowFile, on_examples: Callable[[int], None] | None = None) -> Metrics:
        """Predict every example of a file and compare with its label; what is kept is a few numbers for each."""
        found: list[tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.float32]]] = []
        first = 0
        for rows in file.blocks():
            targets = self.labels.targets(rows.labels, file.name, first=first, names=file.label_names)
            found.append((self.margins(rows), targets, rows.weights))
            first += len(rows)
            if on_examples is not None:
                on_examples(len(rows))
        margins, targets, weights = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return measure(margins, targets, weights)

    def save(self, path: Path, precision: str = "fp32") -> None:
        """Write the file, whole or not at all; in fewer bits where wanted, see `data.store.tensorfile`."""
        header = {"labels": str(self.labels), "bits": str(self.bits or ""), "hash": self.hash}
        if self.encoding is not None:
            header["columns"] = replace(self.encoding, classes=()).to_json()
        tensors = narrow(self._tensors, precision)
        write_atomically(path, encode_tensors(tensors, {"format": _FORMAT, **header}))

    def narrowed(self, precision: str) -> LogregModel:
        read = widen(narrow(self._tensors, precision))
        return replace(self, table=_joined(read["weight"].numpy(), read["bias"].numpy()))

    @property
    def _tensors(self) -> dict[str, Tensor]:
        parts = {"weight": self.weight, "bias": np.atleast_1d(self.bias)}
        return {name: torch.from_numpy(part.copy()) for name, part in parts.items()}

    @staticmethod
    def load(path: Path | str) -> LogregModel:
        """Read what `save` wrote, from the file or from the directory that holds it; UserError says what is wrong."""
        kind = _FORMAT, "logistic regression of `manyhands train logreg`"
        return read_model_file(path, MODEL_FILE, kind, _from_parts)


def _from_parts(header: dict[str, str], written: dict[str, Tensor]) -> LogregModel:
    tensors = widen(written)
    weight, bias = tensors["weight"].numpy(), tensors["bias"].numpy()
    labels = Labels.parse(header["labels"])
    classes = (labels.outputs,) if labels.outputs > 1 else ()
    is_shaped = weight.ndim == len(classes) + 1 and weight.shape[:-1] == classes
    if (
        not is_shaped
        or bias.shape != (labels.outputs,)
        or {weight.dtype, bias.dtype} != {np.dtype(np.float32)}
    ):
        raise ValueError("its weights are not a float32 vector")
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise ValueError("its weights are not all finite")
    reading = Reading(bits=int(header["bits"]) if header["bits"] else None, hash=header["hash"])
    if reading.bits is not None and weight.shape[-1] != 1 << reading.bits:
        raise ValueError(f"it has {weight.shape[-1]} weights for {reading.bits} bits")
    table = _joined(weight, bias)
    encoding = TableEncoding.from_json(header["columns"]) if "columns" in header else None
    if encoding is not None and encoding.firsts[-1] < weight.shape[-1]:
        raise ValueError(f"it has {weight.shape[-1]} weights for {encoding.firsts[-1]} features")
    return LogregModel(table=table, labels=labels, bits=reading.bits, hash=reading.hash, encoding=encoding)


def _joined(weight: NDArray[np.float32], bias: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate([bias if weight.ndim == 1 else bias[:, None], weight], axis=-1)


class LogregPredictor(Predictor[Rows]):
    """The probability of the larger label; of several, or of names, the label and the probability of each."""

    takes: ClassVar[str] = "a line in the format of the training examples, LIBSVM or Vowpal Wabbit"
    formats: ClassVar[tuple[str, ...]] = FORMATS

    model: LogregModel

    def blocks(self, source: Any, read_as: ReadAs) -> Iterator[Rows]:
        reading = Reading(format=read_as.format, skip_bad=read_as.skip_bad, threads=read_as.threads)
        file = self.model.file(source, reading, labelled=False)
        yield from file.blocks()
        self.left_out = file.bad_lines
        self.new_texts = file.new_texts if isinstance(file, ExampleTable) else 0

    def inputs(self, values: Sequence[Any]) -> Rows:
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
            raise UserError(f"{len(values)} inputs hold {len(rows)} examples; give each as its own input")
        return rows

    def together(self, parts: Sequence[Rows]) -> Rows:
        return Rows.join(parts)

    def answers(self, inputs: Rows) -> list[Any]:
        labels, chances = self.model.labels, self.model.probabilities(inputs)
        if labels.are_named:
            return list(labels.answers(chances))
        return [
            {"label": labels.yes if chance >= 0.5 else labels.no, "probability": chance}
            for chance in chances.tolist()
        ]

    def lines(self, inputs: Rows) -> Iterator[str]:
        labels, chances = self.model.labels, self.model.probabilities(inputs)
        if labels.are_named:
            return labels.lines(chances, 6)
        return (f"{chance:.6g}" for chance in chances.tolist())

    @property
    def example(self) -> Any:
        return "0 1:1 3:0.5"


class TableRowPredictor(LogregPredictor):
    """The same of a model that was trained on a table: JSON inputs are rows, not lines."""

    takes: ClassVar[str] = "an array of numbers or texts, one for each column; null where one is missing"

    def inputs(self, values: Sequence[Any]) -> Rows:
        encoding = self.model.encoding
        assert encoding is not None, "it was trained on a table"
        table = table_of(encoded_inputs(encoding, values), len(encoding.names), self.takes, missing=True)
        return encoding.sparse(table, None)

    @property
    def example(self) -> Any:
        assert self.model.encoding is not None, "it was trained on a table"
        return self.model.encoding.example


def open_logreg(path: Path) -> LogregPredictor:
    model = LogregModel.load(path)
    return LogregPredictor(model) if model.encoding is None else TableRowPredictor(model)


def export_logreg(asked: ExportAsked) -> Export:
    """Write the model of a run in that precision; where a `test` file is given, predict it before and after."""
    run, precision, test = asked.run, asked.precision, asked.test
    check_precision(precision)
    model = LogregModel.load(run)
    file = asked.target(f"model-{precision}.safetensors")
    models = (model, model.narrowed(precision)) if test is not None else ()
    before, after = [one.evaluate(one.file(test)).figures for one in models if test] or ({}, {})
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
