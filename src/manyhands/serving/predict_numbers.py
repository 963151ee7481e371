"""Regression: the predictor for models of `line`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.errors import UserError
from manyhands.workloads.exporting import load
from manyhands.workloads.predictor import ModulePredictor, Predictor, ReadAs

__all__ = ["NumberPredictor", "open_numbers"]

Numbers = NDArray[np.float64]


class NumberPredictor(ModulePredictor[Numbers]):
    """Predicts y for each x."""

    takes: ClassVar[str] = "a finite number"

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[Numbers]:
        """Yield all numbers of a text file, one per line."""
        self.check_read_as(read_as)
        try:
            lines = Path(source).read_text("utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UserError(
                f"{source} cannot be read: {why}; give a file with a number on each line"
            ) from error
        try:
            yield self.inputs([float(line) for line in lines])
        except ValueError as error:
            raise UserError(f"{source}: {error}; give a file with a number on each line") from error

    def inputs(self, values: Sequence[Any]) -> Numbers:
        """Parse JSON values, one x each."""
        for number, value in enumerate(values):
            if not _is_finite(value):
                raise UserError(f"input {number} is {str(value)[:40]!r}; it must be {self.takes}")
        return np.asarray(values, np.float64)

    def together(self, parts: Sequence[Numbers]) -> Numbers:
        """Concatenate inputs."""
        return np.concatenate(parts)

    def answers(self, inputs: Numbers) -> list[Any]:
        """Return one number per input."""
        with torch.inference_mode():
            found: Tensor = self.model(torch.from_numpy(inputs).unsqueeze(1))
        return list(found.squeeze(1).tolist())

    def check_precision(self, precision: str) -> None:
        """Accept fp32 only: a model of two numbers has nothing to quantise."""
        Predictor.check_precision(self, precision)

    @property
    def example(self) -> Any:
        """Return an x within the training range."""
        return 0.5

    def example_batch(self, count: int, seed: int = 0) -> Tensor:
        """Return points from -1 to 1, as in training."""
        drawn = torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return drawn * 2 - 1

    @property
    def dynamic_shapes(self) -> tuple[dict[int, Any]]:
        """Mark the number of inputs as dynamic."""
        from torch.export import Dim  # a slow import that only exporting needs

        return ({0: Dim("batch")},)


def _is_finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer beyond double precision
        return False


def open_numbers(path: Path) -> NumberPredictor:
    """Open the predictor of a run, or of a file of `manyhands export`."""
    return NumberPredictor(load(path))
