"""Predictors of the built-in PyTorch tasks: images (`digits`, `mnist`), numbers, and masked text."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from manyhands.data.file_reader import IMAGE_FORMATS, ImageShape, read_images
from manyhands.data.store.atomic import write_atomically
from manyhands.errors import ManyhandsError, UserError, first_line, num_of, printable
from manyhands.serving.opening import open_predictor
from manyhands.serving.text_coding import MASKED_BYTES, MaskedCoding
from manyhands.workloads.exporting import Export, ExportAsked, load, trained_steps
from manyhands.workloads.language.bert import BERT
from manyhands.workloads.predictor import ModulePredictor, Predictor, ReadAs
from manyhands.workloads.tasks.digits import ImageClassifier
from manyhands.workloads.text.json_text import utf8

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
            raise UserError(f"input {number} holds {len(image)} images; give each as a separate input")
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

    def example_batch(self, count: int, seed: int = 0) -> tuple[Tensor]:
        side = self.shape.side
        drawn = torch.rand(count, 1, side, side, generator=torch.Generator().manual_seed(seed))
        return (drawn * self.shape.white,)


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
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise UserError(
                f"{source} cannot be read: {why}; give a file with a number on each line"
            ) from error
        try:
            yield self.inputs([float(line) for line in lines])
        except ValueError as error:
            raise UserError(f"{source}: {error}; give a file with a number on each line") from error

    def inputs(self, values: Sequence[Any]) -> Numbers:
        for number, value in enumerate(values):
            try:
                finite = type(value) in (int, float) and math.isfinite(value)
            except OverflowError:  # an integer beyond double precision
                finite = False
            if not finite:
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

    def example_batch(self, count: int, seed: int = 0) -> tuple[Tensor]:
        drawn = torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return (drawn * 2 - 1,)


def open_numbers(path: Path) -> NumberPredictor:
    return NumberPredictor(load(path))


class MaskFiller(ModulePredictor[list[str]]):
    """Fills in the tokens of a text that are masked, for models of `bert`."""

    takes: ClassVar[str] = "text with [MASK] for each byte, or token, to fill in"

    def __init__(self, model: BERT, coding: MaskedCoding = MASKED_BYTES) -> None:
        super().__init__(model)
        self.coding = coding
        self.context, self.vocabulary = model.sizes.context, model.sizes.vocabulary

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[list[str]]:
        """Take the text itself, instead of a file."""
        self.check_read_as(read_as)
        yield self.inputs([source])

    def inputs(self, values: Sequence[Any]) -> list[str]:
        for number, text in enumerate(values):
            if not isinstance(text, str) or "[MASK]" not in text:
                raise UserError(f"input {number} is {printable(repr(text), 60)}; it must be {self.takes}")
            utf8(text, f"input {number}")
            if (count := len(self.coding.row(text))) > self.context:
                has = num_of(count - 2, self.coding.unit)
                raise UserError(
                    f"input {number} has {has}; the model takes at most {self.context - 2} at once"
                )
        return list(values)

    def together(self, parts: Sequence[list[str]]) -> list[str]:
        return [text for part in parts for text in part]

    def answers(self, inputs: list[str]) -> list[Any]:
        return [{"text": self._filled(text)} for text in inputs]

    def _filled(self, text: str) -> str:
        tokens = torch.tensor(self.coding.row(text))
        with torch.inference_mode():
            scores: Tensor = self.model(tokens[None])[0, :, : self.coding.vocabulary]
            scores[:, self.coding.never] = -math.inf
        found = torch.where(tokens == self.coding.mask, scores.argmax(-1), tokens)[1:-1]
        return self.coding.decode(found.tolist())

    @property
    def example(self) -> Any:
        return "import num[MASK]y as np"

    def example_batch(self, count: int, seed: int = 0) -> tuple[Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        return (torch.randint(0, self.vocabulary, (count, self.context), generator=drawn),)


# Export as a `torch.export` program, which runs without manyhands and the model's source. The written file is read back
# and compared with the module on the same inputs; a mismatch is an error, and leaves no file.

PROGRAM_FILE = "model.pt2"
_BATCHES = (1, 2, 5)  # batch sizes that are compared; none is 3, with which the program is traced
_MADE_FROM = 3
_EQUAL_TO = 1e-5


def export_program(asked: ExportAsked) -> Export:
    """Write the program of a run's module, for any batch size, to `out` or RUN/model.pt2."""
    if asked.precision != "fp32" or asked.test is not None:
        raise UserError(
            "--format torch-export writes the module as it is: leave --precision and --test out, or write safetensors"
        )
    predictor = open_predictor(asked.run, asked.task)
    if not isinstance(predictor, ModulePredictor):
        raise UserError(
            f"{asked.run} belongs to task {predictor.task!r}, whose model is not a PyTorch module; leave --format out"
        )
    file = asked.target(PROGRAM_FILE)
    content, difference = _program(predictor), 0.0
    program = torch.export.load(io.BytesIO(content)).module()
    with torch.inference_mode():
        for count in _BATCHES:
            batch = predictor.example_batch(count, seed=count)
            pairs = zip(tree_leaves(program(*batch)), tree_leaves(predictor.model(*batch)), strict=True)
            for one, other in pairs:
                largest = (one - other).abs().max().item()
                difference = max(difference, math.inf if math.isnan(largest) else largest)
    if not difference <= _EQUAL_TO:
        raise ManyhandsError(
            f"the exported program differs from the module by {difference:.3g}, more than {_EQUAL_TO:g}; nothing was "
            "written; mh.load(RUN) gives the module"
        )
    write_atomically(file, [content])
    return Export(
        path=file,
        precision="fp32",
        steps=trained_steps(asked.run, asked.task),
        num_bytes=len(content),
        full_bytes=sum(value.nbytes for value in predictor.model.state_dict().values()),
        largest_difference=difference,
    )


def _program(predictor: ModulePredictor[Any]) -> bytes:
    example = predictor.example_batch(_MADE_FROM)
    sizes, stream = tuple({0: torch.export.Dim("batch")} for _ in example), io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about LSTM's list of weights, which export sets and restores
            torch.export.save(torch.export.export(predictor.model, example, dynamic_shapes=sizes), stream)
    except Exception as error:  # torch has many, about what a module computes
        raise UserError(
            f"torch.export cannot trace {type(predictor.model).__name__} for batches of any size: {first_line(error)}; "
            "leave --format out to write its weights"
        ) from error
    return stream.getvalue()
