"""MNIST, or any set of the same shape (Fashion-MNIST, KMNIST), from idx files in a user's directory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manyhands.data.file_reader import read_idx
from manyhands.errors import DataError, UserError
from manyhands.task import Task
from manyhands.workloads.builtin_task import BuiltinTask
from manyhands.workloads.task_options import check_options, option
from manyhands.workloads.tasks.digits import LEAST_DEPTH, ImageClassifier, check_width, image_task

_SIDE, _WHITE, _CLASSES = 28, 255, 10
_LABELS_OFFSET = 8  # of the first label: the magic number and one size lie before it


@dataclass(frozen=True, kw_only=True, slots=True)
class MnistOptions:
    """What may be chosen about the mnist task."""

    path: Path = option(..., "directory of the four idx files, plain or gzip")
    batch_size: int = option(128, "samples in a global batch", at_least=1)
    learning_rate: float = option(2e-3, "learning rate of AdamW", above=0)
    width: int = option(16, "channels of the first convolution, a multiple of 4", at_least=4)
    depth: int = option(LEAST_DEPTH, "convolutions", at_least=LEAST_DEPTH, at_most=1000)

    def __post_init__(self) -> None:
        check_options(self)
        check_width(self.width)


def mnist(options: MnistOptions) -> Task:
    """Classify 28×28 images with a small CNN; a file missing or damaged is an error that names it."""
    path = options.path
    if not path.is_dir():
        raise UserError(f"path is {str(path)!r}; it must be a directory that holds the idx files of MNIST")
    data, evaluation = _read_pair(path, "train"), _read_pair(path, "t10k")
    return image_task("mnist", partial(_model, options), options, data, evaluation)


def _model(options: MnistOptions) -> ImageClassifier:
    return ImageClassifier(side=_SIDE, white=_WHITE, width=options.width, stride=2, depth=options.depth)


MNIST = BuiltinTask(
    name="mnist",
    help="handwritten digits of 28×28 pixels from idx files, a small CNN",
    options_type=MnistOptions,
    make=mnist,
    model=_model,
    epochs=2,
)


def _read_pair(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images as uint8 (n, 1, 28, 28), which is how they stay in memory, and labels as int64 (n,)."""
    images_path, labels_path = _find(folder, f"{part}-images", 3), _find(folder, f"{part}-labels", 1)
    images, labels = read_idx(images_path), read_idx(labels_path)
    for path, array, shape in ((images_path, images, (_SIDE, _SIDE)), (labels_path, labels, ())):
        if array.dtype != np.uint8:
            raise DataError(f"{path}, byte 2: items of {array.dtype}; expected uint8 (type code 08)")
        if array.shape[1:] != shape or array.ndim == 0:
            expected = "×".join(["n", *map(str, shape)])
            raise DataError(f"{path}, byte 4: sizes {'×'.join(map(str, array.shape))}; expected {expected}")
    if len(images) != len(labels):
        raise DataError(f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels")
    wrong = np.flatnonzero(labels >= _CLASSES)
    if wrong.size:
        where = f"{labels_path}, byte {_LABELS_OFFSET + int(wrong[0])}"
        raise DataError(f"{where}: label {labels[wrong[0]]}; expected 0 to {_CLASSES - 1}")
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))


def _find(folder: Path, stem: str, num_dims: int) -> Path:
    """The file under one of the names in use: with a dash or a dot before `idx`, plain or gzip."""
    names = [f"{stem}{mark}idx{num_dims}-ubyte{suffix}" for suffix in ("", ".gz") for mark in "-."]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder} has no {names[0]} (nor {', '.join(names[1:])})")
