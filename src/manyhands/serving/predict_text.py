"""Text generation: models of `language` and `recurrent` continue a prompt byte by byte.

Several prompts are continued as one batch, with shorter ones padded at their end. These models are causal, so the
scores at the last byte of each prompt do not depend on the padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.data.text_windows import VOCABULARY, decode, encode
from manyhands.errors import UserError, nearest
from manyhands.workloads.exporting import load, recorded_options
from manyhands.workloads.predictor import ModulePredictor, ReadAs

__all__ = ["MOST_LENGTH", "Prompt", "TextGenerator", "open_text"]

MOST_LENGTH = 4096  # bytes that one request may ask for

MOST_TEMPERATURE = 100.0
_FIELDS = ("prompt", "length", "temperature", "seed")
_MOST_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt and its sampling parameters."""

    prompt: str
    length: int = 200  # bytes to write
    temperature: float = 0.8
    """Scores are divided by it: 0 takes the likeliest byte, 1 draws as the model says."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) or not self.prompt:
            raise UserError(f"prompt is {_short(self.prompt)}; it must be text of at least one letter")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError("prompt holds half of a surrogate pair, which is no text") from error
        for name, least, most in (("length", 1, MOST_LENGTH), ("seed", 0, 2**63 - 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise UserError(f"{name} is {_short(value)}; it must be an integer from {least} to {most}")
        warmth = self.temperature
        if (
            not isinstance(warmth, int | float)
            or isinstance(warmth, bool)
            or not 0 <= warmth <= MOST_TEMPERATURE
        ):
            raise UserError(
                f"temperature is {_short(warmth)}; it must be a number from 0 to {MOST_TEMPERATURE:g}"
            )


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"


class TextGenerator(ModulePredictor[list[Prompt]]):
    """Continues prompts; `context` is the model's context length in bytes."""

    takes: ClassVar[str] = 'a prompt, or {"prompt": …, "length": …, "temperature": …, "seed": …}'

    def __init__(self, model: nn.Module, context: int) -> None:
        super().__init__(model)
        self.context = context

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[list[Prompt]]:
        """Raise UserError: this model generates text and does not read inputs from a file."""
        del read_as
        raise UserError(
            f'this model writes text: manyhands generate RUN --prompt "{source[:40]}" continues it'
        )

    def inputs(self, values: Sequence[Any]) -> list[Prompt]:
        """Parse JSON values: a text, or an object with `prompt` and sampling parameters."""
        prompts = []
        for number, value in enumerate(values):
            fields = {"prompt": value} if isinstance(value, str) else value
            if not isinstance(fields, dict):
                raise UserError(f"input {number} is no text; it must be {self.takes}")
            for name in fields:
                if name not in _FIELDS:
                    raise UserError(
                        f"input {number} has a field {_short(name)}; {nearest(name[:_MOST_SHOWN], _FIELDS)}"
                    )
            try:
                prompts.append(Prompt(**{"prompt": "", **fields}))
            except UserError as error:
                raise UserError(f"input {number}: {error}") from error
        return prompts

    def together(self, parts: Sequence[list[Prompt]]) -> list[Prompt]:
        return [prompt for part in parts for prompt in part]

    def answers(self, inputs: list[Prompt]) -> list[Any]:
        return [{"text": decode(np.asarray(written, np.uint8))} for written in self.continued(inputs)]

    def continued(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        texts = [encode(prompt.prompt).tolist() for prompt in prompts]
        starts = [len(text) for text in texts]
        drawn_from = [torch.Generator().manual_seed(prompt.seed) for prompt in prompts]
        with torch.inference_mode():
            for place in range(max((prompt.length for prompt in prompts), default=0)):
                going = [number for number, prompt in enumerate(prompts) if place < prompt.length]
                scores = self._next_scores([texts[number] for number in going])
                for row, number in enumerate(going):
                    texts[number].append(chosen(scores[row], prompts[number].temperature, drawn_from[number]))
        return [text[start:] for text, start in zip(texts, starts, strict=True)]

    def _next_scores(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the scores of the next byte of each text: (texts, vocabulary)."""
        seen = [text[-self.context :] for text in texts]
        longest = max(map(len, seen))
        filled = torch.tensor([[*text, *[0] * (longest - len(text))] for text in seen])
        scores: Tensor = self.model(filled)
        return scores[torch.arange(len(seen)), torch.tensor([len(text) - 1 for text in seen])]

    @property
    def example(self) -> Any:
        return {"prompt": "def ", "length": 80}

    def example_batch(self, count: int, seed: int = 0) -> Tensor:
        drawn = torch.Generator().manual_seed(seed)
        return torch.randint(0, VOCABULARY, (count, self.context), generator=drawn)


def chosen(scores: Tensor, temperature: float, drawn_from: torch.Generator) -> int:
    """Choose the next byte: the most likely at temperature 0, else sampled from the tempered softmax."""
    if temperature == 0:
        return int(scores.argmax())
    chances = (scores.double() / max(temperature, math.ulp(1.0))).softmax(dim=0)
    return int(torch.multinomial(chances, 1, generator=drawn_from))


def open_text(path: Path) -> TextGenerator:
    model = load(path)
    context = recorded_options(path).get("context")
    if type(context) is not int or context < 1:  # the header of an untrusted file
        raise UserError(f"model {path} does not say how many bytes it looks back on; export it again")
    return TextGenerator(model, context)
