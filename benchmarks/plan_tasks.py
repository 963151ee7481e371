"""The tasks on which plans are proved. Of the planner, the bound on the costs of a step came after a first run of the
tasks that are held out; nothing else was chosen by looking at them.

A task that needs a file or a package that is not here is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.nn import functional

import manyhands as mh

__all__ = ["HELD_OUT", "SEEN"]


def _classes(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


def _task(model: Callable[[], nn.Module], inputs: torch.Tensor, classes: int, batch_size: int) -> mh.Task:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return model()

    labels = torch.randint(classes, (len(inputs),), generator=torch.Generator().manual_seed(1))
    return mh.Task(model=built, loss=_classes, data=(inputs, labels), optimizer=_adamw, batch_size=batch_size)


def _layers(count: int, width: int, classes: int) -> nn.Module:
    hidden = [one for _ in range(count) for one in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def perceptron() -> mh.Task:
    """Three wide layers: much to send for little to compute."""
    return _task(lambda: _layers(3, 1024, 10), _numbers(2048, 1024), 10, 64)


def images() -> mh.Task:
    """Convolutions on small images: much to compute for little to send."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 64, 10),
        )  # fmt: skip

    return _task(model, _numbers(1024, 3, 32, 32), 10, 128)


def deep() -> mh.Task:
    """Thirty narrow layers: many small gradients."""
    return _task(lambda: _layers(30, 128, 10), _numbers(2048, 128), 10, 256)


def words() -> mh.Task:
    """A table of vectors and a head: nearly all parameters are in one large tensor."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(20_000, 128), nn.Flatten(), nn.Linear(16 * 128, 20))

    numbers = torch.randint(20_000, (4096, 16), generator=torch.Generator().manual_seed(0))
    return _task(model, numbers, 20, 256)


def transformer() -> mh.Task:
    """Four blocks of attention over sequences of vectors."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
            self.blocks = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
            self.head = nn.Linear(128, 10)

        def forward(self, vectors: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(vectors).mean(1))

    return _task(Encoder, _numbers(512, 32, 128), 10, 32)


def uneven() -> mh.Task:
    """One layer that is far larger than the others, as a head often is."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8000)
        )

    return _task(model, _numbers(2048, 256), 8000, 128)


SEEN: Final[dict[str, Callable[[], mh.Task]]] = {
    "digits": lambda: mh.tasks.build("digits"),
    "gpt": lambda: mh.tasks.build("gpt"),
    "perceptron": perceptron,
}
"""On which the planner was developed."""

HELD_OUT: Final[dict[str, Callable[[], mh.Task]]] = {
    "images": images,
    "deep": deep,
    "words": words,
    "transformer": transformer,
    "uneven": uneven,
}
"""Named before any of them was measured."""
