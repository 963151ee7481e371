"""Models of one's own for tests: a CNN that is asked with arrays, and a transformer that is asked with texts.

A module as a user has it, named on a command line: `--task own_models:cnn`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.task import Task

CONTEXT, _WIDTH, _LETTERS = 12, 16, 64


def images(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Grey images, in bytes, that are brighter on one side, and which."""
    drawn = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 9, (count, 1, 8, 8), generator=drawn, dtype=torch.uint8)
    sides = torch.randint(0, 2, (count,), generator=drawn)
    for number, side in enumerate(sides.tolist()):
        pixels[number, 0, :, 4 * side : 4 * side + 4] += 7
    return pixels, sides


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 8),
        nn.Tanh(),
        nn.Linear(8, 2),
    )


def _scores(model: nn.Module, batch: Any) -> Tensor:
    scores: Tensor = model(batch[0].float() / 16)
    return scores


def _cnn_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(_scores(model, batch), batch[1])


def _accuracy(model: nn.Module, batch: Any) -> Tensor:
    return (_scores(model, batch).argmax(1) == batch[1]).float().mean()


def cnn() -> Task:
    """Says nothing of inputs and answers: it is asked with what its loss gives the model, and gives scores."""
    return Task(
        name="sides",
        model=_cnn,
        loss=_cnn_loss,
        data=images(96),
        evaluation=images(64, seed=1),
        metrics={"accuracy": _accuracy},
        optimizer=partial(torch.optim.AdamW, lr=2e-2),
        batch_size=32,
    )


class _Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(_LETTERS, _WIDTH), nn.Embedding(CONTEXT, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.letters(x) + self.places(torch.arange(x.shape[1]))
        return found


class _Block(nn.Module):
    """Causal attention of one head, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        # No bias: that of keys has no gradient but rounding, which AdamW would scale up.
        self.inside = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 32), nn.GELU(), nn.Linear(32, _WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inside(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.mlp(x)


def _transformer() -> nn.Module:
    return nn.Sequential(_Embed(), _Block(), _Block(), nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _LETTERS))


def _next_letter(model: nn.Module, batch: Any) -> Tensor:
    letters = batch["letters"]
    scores = model(letters[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), letters[:, 1:].flatten())


def _letters(value: Any) -> Tensor:
    """a text of capital letters"""
    if not isinstance(value, str) or not value:
        raise ValueError("it is not text")
    return torch.tensor([ord(letter) - 32 for letter in value])


def _answer(scores: Tensor) -> Any:
    best = scores[-1].softmax(0).max(0)
    return {"next": chr(int(best.indices) + 32), "probability": round(float(best.values), 4)}


def transformer() -> Task:
    """Learns the alphabet; reads a text, and answers the letter after it."""
    alphabet = torch.arange(33, 59)
    starts = torch.arange(26)[:, None] + torch.arange(CONTEXT + 1)
    return Task(
        name="letters",
        model=_transformer,
        loss=_next_letter,
        data={"letters": alphabet[starts % 26].repeat(2, 1)},
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        batch_size=26,
        read_input=_letters,
        write_answer=_answer,
        example_input="HELLO",
    )
