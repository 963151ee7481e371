"""The 1,797 handwritten digits of 8×8 pixels that come with scikit-learn: no download, seconds to train."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from manyhands.data.batch_plan import permutation
from manyhands.data.file_reader import bundled_file
from manyhands.task import Task
from manyhands.workloads.task_options import check_options, option
from manyhands.workloads.tasks.builtin import BuiltinTask
from manyhands.workloads.tasks.vision import ImageClassifier, accuracy, check_width, classification_loss

__all__ = ["DIGITS", "DigitsOptions", "digits", "read_digits"]

_SIDE, _WHITE = 8, 16
_NUM_TEST = 360  # a fifth


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitsOptions:
    """What may be chosen about the digits task."""

    batch_size: int = option(64, "samples in a global batch", at_least=1)
    learning_rate: float = option(4e-3, "step size of AdamW", above=0)
    width: int = option(16, "channels of the first convolution, a multiple of 4", at_least=4)
    split_seed: int = option(0, "chooses which samples are the test set", at_least=0)

    def __post_init__(self) -> None:
        check_options(self)
        check_width(self.width)


def digits(options: DigitsOptions | None = None) -> Task:
    """Classify scikit-learn's digits with a small CNN; 1,437 samples to train on and 360 to test with."""
    options = options or DigitsOptions()
    pixels, classes = read_digits()
    images = torch.from_numpy(pixels).view(-1, 1, _SIDE, _SIDE)
    labels = torch.from_numpy(classes)
    order = torch.from_numpy(permutation(len(labels), options.split_seed, epoch=0))
    test, train = order[:_NUM_TEST], order[_NUM_TEST:]
    return Task(
        name="digits",
        model=partial(_model, options),
        loss=classification_loss,
        data=(images[train], labels[train]),
        optimizer=partial(torch.optim.AdamW, lr=options.learning_rate),
        batch_size=options.batch_size,
        evaluation=(images[test], labels[test]),
        metrics={"accuracy": accuracy},
    )


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
