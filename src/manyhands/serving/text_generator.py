"""Continues prompts, for models of `gpt` and `recurrent`, and for GPT-2 directories of Hugging Face.

A text's tokens are those of the model's tokenizer, or bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manyhands.engine.device import check_device, device_of
from manyhands.errors import ManyhandsError, UserError, nearest, num_of, printable
from manyhands.serving.decoding import TextEngine, rows_within
from manyhands.serving.text_coding import BYTES, TextCoding, coding_by, coding_of
from manyhands.serving.text_scheduler import TextLimits, TextRefused, TextRequest
from manyhands.workloads.exporting import load, recorded_options
from manyhands.workloads.language.gpt import GPT, GPT2_LAYOUT
from manyhands.workloads.language.huggingface import fill, read_config, read_sizes
from manyhands.workloads.language.sampling import Sampling, require_integer
from manyhands.workloads.predictor import ModulePredictor, ReadAs
from manyhands.workloads.text.json_text import utf8
from manyhands.workloads.text.tokenizer import TOKENIZER_FILE, read_tokenizer

MOST_TOKENS = 4096  # that one request may ask for
_FIELDS = ("prompt", "tokens", "temperature", "top_k", "top_p", "seed")
_UNFINISHED = "\ufffd"  # what decoding gives for a part of a letter


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt(Sampling):
    """A prompt, how many tokens to write, and how they are chosen."""

    prompt: str
    tokens: int = 200

    def __post_init__(self) -> None:
        Sampling.__post_init__(self)
        if not isinstance(self.prompt, str) or not self.prompt:
            raise UserError(
                f"prompt is {printable(repr(self.prompt), 60)}; it must be text of at least one letter"
            )
        utf8(self.prompt, "prompt")
        require_integer("tokens", self.tokens, 1, MOST_TOKENS)


class TextPieces:
    """The text of tokens as they come; a letter is given out when all its tokens are there."""

    def __init__(self, coding: TextCoding) -> None:
        self._coding = coding
        self._tokens: list[int] = []  # the newest, from the second last end of a letter on
        self._end = 0  # how many of them are before the last end of a letter
        self._given = 0  # letters of their text

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._coding.decode(self._tokens)
        if text.endswith(_UNFINISHED):
            return self._new(text[:-1])
        piece = self._new(text)
        # Some tokens stay: whether the next one begins with a space may depend on those before it.
        del self._tokens[: self._end]
        self._end, self._given = len(self._tokens), len(self._coding.decode(self._tokens))
        return piece

    def rest(self) -> str:
        """What is left of a letter that was never finished."""
        return self._new(self._coding.decode(self._tokens))

    def _new(self, text: str) -> str:
        piece, self._given = text[self._given :], max(self._given, len(text))
        return piece


class TextGenerator(ModulePredictor[list[Prompt]]):
    """Continues prompts; `context` is how many tokens the model sees, in its positions or in its training."""

    takes: ClassVar[str] = (
        'a prompt, or {"prompt": …, "tokens": …, "temperature": …, "top_k": …, "top_p": …, "seed": …}'
    )

    def __init__(self, model: nn.Module, context: int, coding: TextCoding = BYTES) -> None:
        super().__init__(model)
        self.context, self.coding = context, coding
        self.limits = TextLimits()  # of a worker that serves it

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[list[Prompt]]:
        del read_as
        raise UserError(f'this model writes text; use manyhands generate RUN --prompt "{source[:40]}"')

    def inputs(self, values: Sequence[Any]) -> list[Prompt]:
        prompts = []
        for number, value in enumerate(values):
            fields = {"prompt": value} if isinstance(value, str) else value
            if not isinstance(fields, dict):
                raise UserError(f"input {number} is not text; it must be {self.takes}")
            try:
                prompts.append(self.prompt(fields))
            except UserError as error:
                raise UserError(f"input {number}: {error}") from error
        return prompts

    def prompt(self, fields: dict[str, Any]) -> Prompt:
        """From JSON; UserError says which field is wrong."""
        for name in fields:
            if name not in _FIELDS:
                raise UserError(
                    f"there is a field {printable(repr(name), 60)}; {nearest(name[:60], _FIELDS)}"
                )
        prompt = Prompt(**{"prompt": "", **fields})
        self.tokens_of(prompt)
        return prompt

    def tokens_of(self, prompt: Prompt) -> list[int]:
        tokens = self.coding.encode(prompt.prompt)
        if not 0 < len(tokens) <= self.context:
            raise UserError(
                f"prompt has {num_of(len(tokens), self.coding.unit)}; the model takes 1 to {self.context}"
            )
        return tokens

    def together(self, parts: Sequence[list[Prompt]]) -> list[Prompt]:
        return [prompt for part in parts for prompt in part]

    def answers(self, inputs: list[Prompt]) -> list[Any]:
        return [{"text": self.coding.decode(tokens)} for tokens in self.continued(inputs)]

    def check_device(self, device: str) -> None:
        check_device(device)
        if device != "cpu" and self.precision == "int8":
            raise UserError("--precision int8 computes on the CPU only; on a GPU give bf16")

    def prepare(self, rank: int = 0) -> None:
        super().prepare()
        self.model = self.model.to(device_of(self.device, rank))

    def limit(self, limits: TextLimits) -> None:
        """Take on the limits of a server; UserError where they leave no text."""
        rows_within(self.model, limits)
        self.limits = limits

    def engine(self, limits: TextLimits) -> TextEngine:
        return TextEngine(self.model, limits, self.context, self.coding.vocabulary, self.coding.end_of_text)

    def request(self, prompt: Prompt, number: int) -> TextRequest:
        return TextRequest(number=number, prompt=self.tokens_of(prompt), tokens=prompt.tokens, how=prompt)

    def written(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, int]]:
        """The number of a prompt and a token that continues it, as they come."""
        count = max(1, len(prompts))
        engine = self.engine(TextLimits(rows=min(count, self.limits.rows), waiting=count))
        for number, prompt in enumerate(prompts):
            engine.submit(self.request(prompt, number))
        while not engine.is_idle:
            for event in engine.step(0.0):
                if isinstance(event, TextRefused):
                    raise ManyhandsError(event.sentence)
                if event.token is not None:
                    yield event.number, event.token

    def continued(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in prompts]
        for number, token in self.written(prompts):
            texts[number].append(token)
        return texts

    def pieces(self, prompt: Prompt) -> Iterator[str]:
        """The text that continues a prompt, as it comes."""
        pieces = TextPieces(self.coding)
        for _, token in self.written([prompt]):
            yield pieces.push(token)
        yield pieces.rest()

    @property
    def example(self) -> Any:
        return {"prompt": "def ", "tokens": 80}

    def example_batch(self, count: int, seed: int = 0) -> tuple[Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        return (torch.randint(0, self.coding.vocabulary, (count, self.context), generator=drawn),)

    def warm(self) -> None:
        self.continued([Prompt(prompt="a", tokens=2)])


def open_text(path: Path) -> TextGenerator:
    """Of a run's directory, or of a file of `manyhands export`."""
    model, coding = load(path), coding_of(path)
    context = recorded_options(path).get("context")
    if type(context) is not int or context < 1:  # the header of an untrusted file
        raise UserError(f"model {path} does not name its context length; export it again")
    if isinstance(model, GPT):
        _require_fit(coding, model.sizes.vocabulary, path)
    return TextGenerator(model, context, coding)


def open_gpt2(folder: Path) -> TextGenerator:
    """Of a directory that transformers wrote: config.json, model.safetensors and tokenizer.json."""
    sizes, file = read_sizes(folder, GPT2_LAYOUT), folder / TOKENIZER_FILE
    coding = coding_by(read_tokenizer(file)) if file.is_file() else BYTES
    if coding is BYTES and sizes["vocabulary"] != BYTES.vocabulary:
        raise UserError(
            f"{folder} has no {TOKENIZER_FILE}, and its model has a vocabulary of {sizes['vocabulary']:,}, not of "
            f"{BYTES.vocabulary} bytes; put the tokenizer there"
        )
    _require_fit(coding, sizes["vocabulary"], folder)
    model = GPT(**sizes, tied=read_config(folder).get("tie_word_embeddings") is not False)
    fill(model, folder, GPT2_LAYOUT, sizes)
    return TextGenerator(model, sizes["context"], coding)


def _require_fit(coding: TextCoding, vocabulary: int, path: Path) -> None:
    if coding.vocabulary > vocabulary:
        raise UserError(
            f"the tokenizer of {path} has {coding.vocabulary:,} tokens, but the model's vocabulary is {vocabulary:,}; "
            "give its own tokenizer"
        )
