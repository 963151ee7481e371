"""Image classification: the predictor for models of `digits` and `mnist`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.data.image_files import IMAGE_FORMATS, ImageShape, read_images
from manyhands.errors import UserError
from manyhands.workloads.exporting import load
from manyhands.workloads.predictor import ModulePredictor, Predictor, ReadAs
from manyhands.workloads.tasks.digits import ImageClassifier

__all__ = ["ImagePredictor", "NumberPredictor", "open_images", "open_numbers"]


_AT_ONCE = 1024
_DIGITS = 6  # digits of a probability


class ImagePredictor(ModulePredictor[NDArray[np.float32]]):
    """Predicts the class of each image and its probability."""

    takes: ClassVar[str] = "an array of rows of pixels"
    formats: ClassVar[tuple[str, ...]] = IMAGE_FORMATS

    def __init__(self, model: ImageClassifier) -> None:
        super().__init__(model)
        self.shape = ImageShape(model.side, model.white)

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[NDArray[np.float32]]:
        self.check_read_as(read_as)
        images = read_images(source, self.shape, read_as.format)
        for begin in range(0, len(images), _AT_ONCE):
            yield images[begin : begin + _AT_ONCE]

    def inputs(self, values: Sequence[Any]) -> NDArray[np.float32]:
        try:
            images = self.shape.images(values)
        except ValueError:
            images = np.empty(0, np.float32)
        if len(images) == len(values) > 0:
            return images
        return np.concatenate([self._one(number, value) for number, value in enumerate(values)])

    def _one(self, number: int, value: Any) -> NDArray[np.float32]:
        """Parse one image; used to name the invalid one where parsing all at once failed."""
        try:
            image = self.shape.images(value)
        except ValueError as error:
            raise UserError(f"input {number}: {error}") from error
        if len(image) != 1:
            raise UserError(f"input {number} holds {len(image)} images; give each as an input of its own")
        return image

    def together(self, parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        return np.concatenate(parts)

    def answers(self, inputs: NDArray[np.float32]) -> list[Any]:
        with torch.inference_mode():
            scores = self.model(torch.from_numpy(inputs).unsqueeze(1))
            chances, classes = scores.double().softmax(dim=1).max(dim=1)
        return [
            {"label": label, "probability": round(chance, _DIGITS)}
            for label, chance in zip(classes.tolist(), chances.tolist(), strict=True)
        ]

    def lines(self, inputs: NDArray[np.float32]) -> Iterator[str]:
        return (f"{one['label']} {one['probability']:.6f}" for one in self.answers(inputs))

    @property
    def example(self) -> Any:
        """Return a white cross, roughly a 1 or a 4."""
        middle, side, white = self.shape.side // 2, self.shape.side, self.shape.white
        return [
            [white if column == middle or row == middle else 0 for column in range(side)]
            for row in range(side)
        ]

    def example_batch(self, count: int, seed: int = 0) -> Tensor:
        side = self.shape.side
        drawn = torch.rand(count, 1, side, side, generator=torch.Generator().manual_seed(seed))
        return drawn * self.shape.white


def open_images(path: Path) -> ImagePredictor:
    model = load(path)
    assert isinstance(model, ImageClassifier), "the tasks of this predictor have such models"
    return ImagePredictor(model)


Numbers = NDArray[np.float64]


class NumberPredictor(ModulePredictor[Numbers]):
    """Predicts y for each x."""

    takes: ClassVar[str] = "a finite number"

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[Numbers]:
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
        for number, value in enumerate(values):
            if not _is_finite(value):
                raise UserError(f"input {number} is {str(value)[:40]!r}; it must be {self.takes}")
        return np.asarray(values, np.float64)

    def together(self, parts: Sequence[Numbers]) -> Numbers:
        return np.concatenate(parts)

    def answers(self, inputs: Numbers) -> list[Any]:
        with torch.inference_mode():
            found: Tensor = self.model(torch.from_numpy(inputs).unsqueeze(1))
        return list(found.squeeze(1).tolist())

    def check_precision(self, precision: str) -> None:
        """Accept fp32 only: a model of two numbers has nothing to quantise."""
        Predictor.check_precision(self, precision)

    @property
    def example(self) -> Any:
        return 0.5

    def example_batch(self, count: int, seed: int = 0) -> Tensor:
        """Return points from -1 to 1, as in training."""
        drawn = torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return drawn * 2 - 1


def _is_finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer beyond double precision
        return False


def open_numbers(path: Path) -> NumberPredictor:
    return NumberPredictor(load(path))
