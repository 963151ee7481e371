"""The 1,797 handwritten digits of 8×8 pixels that come with scikit-learn: no download, seconds to train.

The small convolutional classifier normalises by groups within a sample (group normalisation, Wu & He 2018) and never
over the batch, so splitting a batch over workers does not change what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from manyhands.data.batches import permutation
from manyhands.data.file_reader import bundled_file
from manyhands.engine.chain import ChainFunction
from manyhands.errors import UserError
from manyhands.task import Task
from manyhands.workloads.builtin_task import BuiltinTask
from manyhands.workloads.task_options import check_options, option

LEAST_DEPTH = 3  # convolutions of an `ImageClassifier` unless it is to be deeper

_GROUPS = 4


class ImageClassifier(nn.Module):
    """`depth` convolutions, the second and the last followed by pooling that halves the image, and a linear head.

    Images are (batch, 1, side, side), of any dtype, with values from 0 to `white`; they are brought to the
    dtype of the weights. `stride` is that of the first convolution: 2 makes large images cheap. `width` is a
    multiple of 4, `depth` at least 3.
    """

    def __init__(
        self,
        *,
        side: int,
        white: float,
        width: int,
        stride: int = 1,
        classes: int = 10,
        depth: int = LEAST_DEPTH,
    ) -> None:
        super().__init__()
        self.side, self.white = side, white
        self.features = nn.Sequential(
            *_stage(1, width, kernel=2 * stride + 1, stride=stride),
            *_stage(width, 2 * width),
            nn.MaxPool2d(2),
            *(module for _ in range(depth - 2) for module in _stage(2 * width, 2 * width)),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(2 * width * (side // stride // 4) ** 2, classes)

    def chain(self) -> Sequence[nn.Module]:
        first, *others = self.features
        scaled_first = ChainFunction(partial(_convolved, white=self.white), convolution=first)
        return [scaled_first, *others, nn.Flatten(), self.head]

    def forward(self, images: Tensor) -> Tensor:
        scaled = images.to(next(self.parameters()).dtype) / self.white  # a quantised head has no such weight
        scores: Tensor = self.head(self.features(scaled).flatten(1))
        return scores


def _convolved(images: Tensor, convolution: nn.Conv2d, white: float) -> Tensor:
    """The first convolution; as the first of a chain it needs nothing of the other modules."""
    convolved: Tensor = convolution(images.to(convolution.weight.dtype) / white)
    return convolved


def classification_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    images, labels = batch
    hits: Tensor = model(images).argmax(dim=1) == labels
    return hits.double().mean()


def image_task(
    name: str,
    model: Callable[[], nn.Module],
    options: Any,
    data: tuple[Tensor, Tensor],
    evaluation: tuple[Tensor, Tensor],
) -> Task:
    """Classify images with `model`; `options` have a batch_size and a learning_rate."""
    return Task(
        name=name,
        model=model,
        loss=classification_loss,
        data=data,
        optimizer=partial(torch.optim.AdamW, lr=options.learning_rate),
        batch_size=options.batch_size,
        evaluation=evaluation,
        metrics={"accuracy": accuracy},
    )


def check_width(width: int) -> None:
    if width % _GROUPS:
        raise UserError(f"width is {width}; it must be a multiple of {_GROUPS}")


def _stage(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2),
        nn.GroupNorm(_GROUPS, outputs),
        nn.ReLU(),
    )


_SIDE, _WHITE = 8, 16
_NUM_TEST = 360  # a fifth


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitsOptions:
    """What may be chosen about the digits task."""

    batch_size: int = option(64, "samples in a global batch", at_least=1)
    learning_rate: float = option(4e-3, "learning rate of AdamW", above=0)
    width: int = option(16, "channels of the first convolution, a multiple of 4", at_least=4)
    split_seed: int = option(0, "fixes which samples form the test set", at_least=0)

    def __post_init__(self) -> None:
        check_options(self)
        check_width(self.width)


def digits(options: DigitsOptions | None = None) -> Task:
    """Classify scikit-learn's digits with a small CNN; 1,437 samples to train on and 360 to test with."""
    options = options or DigitsOptions()
    pixels, classes = map(torch.from_numpy, read_digits())
    images = pixels.view(-1, 1, _SIDE, _SIDE)
    order = torch.from_numpy(permutation(len(classes), options.split_seed, epoch=0))
    test, train = ((images[some], classes[some]) for some in (order[:_NUM_TEST], order[_NUM_TEST:]))
    return image_task("digits", partial(_model, options), options, train, test)


def _model(options: DigitsOptions) -> ImageClassifier:
    return ImageClassifier(side=_SIDE, white=_WHITE, width=options.width)


def read_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels, a row of 64 each, and classes; from the file inside scikit-learn, which takes seconds to import."""
    file = bundled_file("digits.csv.gz", "the digits")
    if file is None:  # another version keeps it elsewhere, and knows where
        from sklearn.datasets import load_digits

        pixels, classes = load_digits(return_X_y=True)
        return pixels.astype(np.uint8), classes.astype(np.int64)
    table = np.loadtxt(file, delimiter=",")
    return table[:, :-1].astype(np.uint8), table[:, -1].astype(np.int64)


DIGITS = BuiltinTask(
    name="digits",
    help="handwritten digits of 8×8 pixels from scikit-learn, a small CNN",
    options_type=DigitsOptions,
    make=digits,
    model=_model,
    epochs=12,
)
