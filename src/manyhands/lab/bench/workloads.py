"""What the step benchmark trains: three tasks whose steps differ in how much of them is communication.

Each is a value that travels as JSON; the sizes are fields, so a test can have small ones. Batches grow with the number
of workers (weak scaling). Optimizers are torch's fused ones, for every contender alike.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyhands.task import Task
from manyhands.workloads.tasks.language import LanguageOptions, language
from manyhands.workloads.tasks.vision import ImageClassifier, classification_loss

__all__ = ["WORKLOADS", "BenchWorkload", "Cnn", "Language", "Mlp"]

_EPOCH_BATCHES = 8  # made-up data come round again soon, so that the loss visibly falls


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchWorkload(ABC):
    """Something to train, with `batch` samples per worker in every step."""

    word: ClassVar[str]
    optimizer: ClassVar[str]
    """What updates the weights, for the report."""

    batch: int

    @abstractmethod
    def task(self, workers: int) -> Task:
        """The task, with the global batch of `workers`; the same on every rank."""

    def to_json(self) -> str:
        """One line that `from_json` reads."""
        return json.dumps({"word": self.word, **asdict(self)})

    @staticmethod
    def from_json(text: str) -> BenchWorkload:
        """What `to_json` gave."""
        fields = json.loads(text)
        return type(WORKLOADS[fields.pop("word")])(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp(BenchWorkload):
    """A perceptron with many weights and a small batch: little but communication and the optimizer."""

    word: ClassVar[str] = "mlp"
    optimizer: ClassVar[str] = "SGD with momentum"

    batch: int = 8
    inputs: int = 1024
    width: int = 3296
    hidden: int = 3
    classes: int = 10

    def task(self, workers: int) -> Task:
        """Random vectors, labelled by a linear teacher."""
        return Task(
            name=self.word,
            model=self._model,
            loss=classification_loss,
            data=_labelled((self.inputs,), self.classes, _EPOCH_BATCHES * self.batch * workers),
            optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
            batch_size=self.batch * workers,
        )

    def _model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for inputs in (self.inputs, *[self.width] * (self.hidden - 1)):
            layers += [nn.Linear(inputs, self.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, self.classes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cnn(BenchWorkload):
    """The classifier of `digits` and `mnist` on larger images: few weights and much arithmetic."""

    word: ClassVar[str] = "cnn"
    optimizer: ClassVar[str] = "SGD with momentum"

    batch: int = 16
    side: int = 32
    width: int = 32
    classes: int = 10

    def task(self, workers: int) -> Task:
        """Random images, labelled by a linear teacher."""
        return Task(
            name=self.word,
            model=partial(ImageClassifier, side=self.side, white=1, width=self.width, classes=self.classes),
            loss=classification_loss,
            data=_labelled((1, self.side, self.side), self.classes, _EPOCH_BATCHES * self.batch * workers),
            optimizer=partial(torch.optim.SGD, lr=3e-4, momentum=0.9, fused=True),
            batch_size=self.batch * workers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Language(BenchWorkload):
    """The transformer of `language` with a few million weights, on the text of Python's standard library."""

    word: ClassVar[str] = "language"
    optimizer: ClassVar[str] = "AdamW"

    batch: int = 8
    context: int = 64
    layers: int = 4
    width: int = 256
    heads: int = 8

    def task(self, workers: int) -> Task:
        """The built-in task."""
        options = LanguageOptions(
            context=self.context,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            batch_size=self.batch * workers,
        )
        return replace(
            language(options), optimizer=partial(torch.optim.AdamW, lr=options.learning_rate, fused=True)
        )


WORKLOADS: dict[str, BenchWorkload] = {workload.word: workload for workload in (Mlp(), Cnn(), Language())}


def _labelled(shape: tuple[int, ...], classes: int, count: int) -> tuple[Tensor, Tensor]:
    """Random samples with labels that can be learnt, so that the loss falls: those of a random linear map."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(count, *shape, generator=generator)
    teacher = torch.randn(math.prod(shape), classes, generator=generator)
    return samples, (samples.flatten(1) @ teacher).argmax(dim=1)
