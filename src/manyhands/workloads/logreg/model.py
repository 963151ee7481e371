"""A trained logistic regression: its weights, how its features are found, and its file.

The file is safetensors: `weight`, one number for each feature, and `bias`, in single precision or, exported, in fewer
bits; the header says how a file of examples must be read for it (bits, hash) and what its labels are. It holds no code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from manyhands.data.matrix import Rows
from manyhands.data.row_files import Reading, RowFile
from manyhands.data.store.atomic import write_atomically
from manyhands.data.store.tensorfile import encode_tensors, narrow, widen
from manyhands.errors import UserError
from manyhands.workloads.logreg import logreg_kernels
from manyhands.workloads.logreg.labels import PAIRS, Labels, Metrics, measure

__all__ = ["MODEL_FILE", "LogregModel"]

MODEL_FILE = "model.safetensors"
_FORMAT = "manyhands.logreg.1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogregModel:
    """`table` is the bias and then the weight of every feature."""

    table: NDArray[np.float32]
    labels: Labels
    bits: int | None = None
    hash: str = "numbers"

    @property
    def weight(self) -> NDArray[np.float32]:
        return self.table[1:]

    @property
    def bias(self) -> float:
        """The margin of an example without features."""
        return float(self.table[0])

    def margins(self, rows: Rows) -> NDArray[np.float64]:
        """The logarithm of the odds of every row."""
        out = np.empty(len(rows))
        logreg_kernels.margins(self.table, (rows.starts, rows.indices, rows.values, rows.weights), out)
        return out

    def probabilities(self, rows: Rows) -> NDArray[np.float64]:
        """The chance that a row's label is yes (the larger of the two labels)."""
        return np.exp(-np.logaddexp(0.0, -self.margins(rows)))

    def file(self, path: Path | str, reading: Reading | None = None) -> RowFile:
        """A file of examples, to be read as this model needs it."""
        return RowFile(path, replace(reading or Reading(), bits=self.bits, hash=self.hash))

    def evaluate(self, file: RowFile, on_examples: Callable[[int], None] | None = None) -> Metrics:
        """Predict every example of a file and compare with its label; what is kept is a few numbers for each."""
        found: list[tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.float32]]] = []
        for rows in file.blocks():
            found.append((self.margins(rows), self.labels.targets(rows.labels, file.name), rows.weights))
            if on_examples is not None:
                on_examples(len(rows))
        margins, targets, weights = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return measure(margins, targets, weights)

    def save(self, path: Path, precision: str = "fp32") -> None:
        """Write the file, whole or not at all; in fewer bits where wanted, see `data.store.tensorfile`."""
        header = {
            "format": _FORMAT,
            "labels": str(self.labels),
            "bits": str(self.bits or ""),
            "hash": self.hash,
        }
        tensors = {name: torch.from_numpy(part.copy()) for name, part in self._parts.items()}
        write_atomically(path, encode_tensors(narrow(tensors, precision), header))

    def narrowed(self, precision: str) -> LogregModel:
        """This model as it is read back from a file of that precision."""
        tensors = {name: torch.from_numpy(part.copy()) for name, part in self._parts.items()}
        read = widen(narrow(tensors, precision))
        return replace(self, table=np.concatenate([read["bias"].numpy(), read["weight"].numpy()]))

    @property
    def _parts(self) -> dict[str, NDArray[np.float32]]:
        return {"weight": self.weight, "bias": self.table[:1]}

    @staticmethod
    def load(path: Path | str) -> LogregModel:
        """Read what `save` wrote, from the file or from the directory that holds it; UserError says what is wrong."""
        file = Path(path) / MODEL_FILE if Path(path).is_dir() else Path(path)
        try:
            with safe_open(file, framework="pt") as opened:
                header: dict[str, str] = opened.metadata() or {}
                written = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except OSError as error:
            raise UserError(f"model {file} cannot be read: {error.strerror or error}") from error
        except (SafetensorError, ValueError) as error:  # of numpy: more dimensions than it knows
            raise UserError(f"model {file} is no safetensors file: {error}") from error
        try:
            return _from_parts(header, {name: part.numpy() for name, part in widen(written).items()})
        except (KeyError, ValueError) as error:
            raise UserError(
                f"model {file} is no logistic regression of `manyhands train logreg`: {error}"
            ) from error


def _from_parts(header: dict[str, str], tensors: dict[str, Any]) -> LogregModel:
    if header.get("format") != _FORMAT:
        raise ValueError(f"its format is {header.get('format', 'not named')!r}, not {_FORMAT!r}")
    weight, bias = tensors["weight"], tensors["bias"]
    if weight.ndim != 1 or bias.shape != (1,) or {weight.dtype, bias.dtype} != {np.dtype(np.float32)}:
        raise ValueError("its weights are no vector of float32")
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise ValueError("its weights are not all finite")
    no, yes = (float(label) for label in header["labels"].split())
    if (no, yes) not in PAIRS:
        raise ValueError(f"its labels are {no:g} and {yes:g}")
    reading = Reading(bits=int(header["bits"]) if header["bits"] else None, hash=header["hash"])
    if reading.bits is not None and weight.size != 1 << reading.bits:
        raise ValueError(f"it has {weight.size} weights for {reading.bits} bits")
    return LogregModel(
        table=np.concatenate([bias, weight]), labels=Labels(no, yes), bits=reading.bits, hash=reading.hash
    )
