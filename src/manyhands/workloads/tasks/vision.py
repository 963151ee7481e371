"""A small convolutional classifier of square grey images, with its loss and accuracy.

It normalises by groups within a sample (group normalisation, Wu & He 2018) and never over the batch, so
splitting a batch over workers does not change what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.engine.chain import ChainFunction
from manyhands.errors import UserError

__all__ = ["LEAST_DEPTH", "ImageClassifier", "accuracy", "check_width", "classification_loss"]

ImageBatch: TypeAlias = Sequence[Tensor]
LEAST_DEPTH = 3
"""Convolutions of an `ImageClassifier` that is not told to be deeper."""

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
        """The first convolution, of scaled images, what follows it, and the head."""
        first, *others = self.features
        scaled_first = ChainFunction(partial(_convolved, white=self.white), convolution=first)
        return [scaled_first, *others, nn.Flatten(), self.head]

    def forward(self, images: Tensor) -> Tensor:
        """Class scores, (batch, classes)."""
        scaled = _scaled(images, next(self.parameters()), self.white)  # a quantised head has no such weight
        scores: Tensor = self.head(self.features(scaled).flatten(1))
        return scores


def _scaled(images: Tensor, weight: Tensor, white: float) -> Tensor:
    """Images from 0 to 1, in the dtype of the weights."""
    return images.to(weight.dtype) / white


def _convolved(images: Tensor, convolution: nn.Conv2d, white: float) -> Tensor:
    """The first convolution; as the first of a chain it needs nothing of the other modules."""
    convolved: Tensor = convolution(_scaled(images, convolution.weight, white))
    return convolved


def classification_loss(model: nn.Module, batch: ImageBatch) -> Tensor:
    """Mean cross entropy of a batch of (images, labels)."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: ImageBatch) -> Tensor:
    """The part of a batch of (images, labels) that is classified rightly."""
    images, labels = batch
    hits: Tensor = model(images).argmax(dim=1) == labels
    return hits.double().mean()


def check_width(width: int) -> None:
    """Refuse a width that the groups of the normalisation do not divide."""
    if width % _GROUPS:
        raise UserError(f"width is {width}; it must be a multiple of {_GROUPS}")


def _stage(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2),
        nn.GroupNorm(_GROUPS, outputs),
        nn.ReLU(),
    )
