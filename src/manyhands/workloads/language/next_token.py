"""What the tasks share that predict the next token of a text: their options, their data, the loss and its metric."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from manyhands.data.file_reader import encode, read_text, standard_library_text, windows
from manyhands.errors import DataError
from manyhands.task import Task
from manyhands.workloads.task_options import CheckedOptions, option


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions(CheckedOptions):
    """What may be chosen about every task that learns a text."""

    path: Path | None = option(None, "UTF-8 text file, plain or gzip; without it, Python's standard library")
    batch_size: int = option(32, "windows of text in a global batch", at_least=1)
    learning_rate: float = option(1e-3, "learning rate of AdamW", above=0)
    evaluation_bytes: int = option(
        65_536,
        "held out for evaluation: the last tenth of the text, at most this many bytes or tokens",
        at_least=2,
    )


def text_task(name: str, model: Callable[[], nn.Module], options: TextOptions, context: int) -> Task:
    """Train `model` to predict the next byte of a text file, or of the Python standard library where none is given."""
    tokens, held_out = held_out_text(options, context)
    return Task(
        name=name,
        model=model,
        loss=next_byte_loss,
        data=windows(tokens, context),
        optimizer=partial(torch.optim.AdamW, lr=options.learning_rate),
        batch_size=options.batch_size,
        evaluation=windows(held_out, context),
        metrics={"bits_per_byte": bits_per_byte},
    )


def held_out_text(options: TextOptions, context: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The bytes to learn from and those held out; DataError where these are too few for one window."""
    text = standard_library_text() if options.path is None else read_text(options.path)
    tokens = encode(text)
    held_out = min(len(tokens) // 10, options.evaluation_bytes)
    if held_out <= context:
        raise DataError(
            f"{options.path or 'the standard library'}: of {len(tokens)} bytes of text {held_out} are held out "
            f"for evaluation (evaluation_bytes={options.evaluation_bytes}), too few for one window of "
            f"context={context}; give a longer text or a shorter context"
        )
    return tokens[:-held_out], tokens[-held_out:]


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross entropy, in nats per token, of every token of a batch of windows given those before it."""
    tokens = batch.long()
    scores: Tensor = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def bits_per_byte(model: nn.Module, batch: Tensor) -> Tensor:
    """The same in bits: what a text compressed with this model would take."""
    return next_byte_loss(model, batch) / math.log(2)


class Perplexity:
    """exp(total loss / total tokens), the same however the tokens are batched."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._loss, self._tokens = 0.0, 0

    def update(self, loss: Tensor, tokens: Tensor) -> None:
        self._loss += float(loss)
        self._tokens += int(tokens)

    def compute(self) -> float:
        return math.exp(min(self._loss / self._tokens, 700))  # beyond is infinity


def token_losses(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The total loss of a batch of windows, and how many tokens it is of."""
    count = batch[:, 1:].numel()
    return next_byte_loss(model, batch).double() * count, torch.tensor(count)
