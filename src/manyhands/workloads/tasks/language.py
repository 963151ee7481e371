"""A decoder-only transformer that predicts the next byte of a text.

Blocks are pre-norm (Radford et al. 2019): x + attention(norm(x)), then x + feed-forward(norm(x)). Positions
are learned; projections that write into the residual stream start smaller the deeper the model is. There is
no dropout, so a run follows from its seed alone. Options reach from the default, which learns visibly in a
minute on two cores, to layers=14, width=768, heads=12: a hundred million parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.data.file_reader import VOCABULARY, encode, read_text, standard_library_text, windows
from manyhands.engine.chain import ChainFunction
from manyhands.errors import DataError, UserError
from manyhands.task import Task
from manyhands.workloads.task_options import CheckedOptions, check_options, option
from manyhands.workloads.tasks.builtin import BuiltinTask

__all__ = [
    "LANGUAGE",
    "LanguageOptions",
    "TextOptions",
    "Transformer",
    "bits_per_byte",
    "language",
    "next_byte_loss",
    "text_task",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions(CheckedOptions):
    """What may be chosen about every task that learns a text."""

    path: Path | None = option(None, "UTF-8 text file, plain or gzip; without it, Python's standard library")
    context: int = option(64, "context length in bytes", at_least=1)
    batch_size: int = option(32, "windows of text in a global batch", at_least=1)
    learning_rate: float = option(1e-3, "learning rate of AdamW", above=0)
    evaluation_bytes: int = option(
        65_536, "held out for evaluation: the last tenth of the text, at most this many bytes", at_least=2
    )


def text_task(name: str, model: Callable[[], nn.Module], options: TextOptions) -> Task:
    """Train `model` to predict the next byte of a text file, or of the Python standard library where none is given."""
    text = standard_library_text() if options.path is None else read_text(options.path)
    tokens = encode(text)
    held_out = min(len(tokens) // 10, options.evaluation_bytes)
    if held_out <= options.context:
        raise DataError(
            f"{options.path or 'the standard library'}: of {len(tokens)} bytes of text {held_out} are held out "
            f"for evaluation (evaluation_bytes={options.evaluation_bytes}), too few for one window of "
            f"context={options.context}; give a longer text or a shorter context"
        )
    return Task(
        name=name,
        model=model,
        loss=next_byte_loss,
        data=windows(tokens[:-held_out], options.context),
        optimizer=partial(torch.optim.AdamW, lr=options.learning_rate),
        batch_size=options.batch_size,
        evaluation=windows(tokens[-held_out:], options.context),
        metrics={"bits_per_byte": bits_per_byte},
    )


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross entropy, in nats per byte, of every byte of a batch of windows given those before it."""
    tokens = batch.long()
    scores: Tensor = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def bits_per_byte(model: nn.Module, batch: Tensor) -> Tensor:
    """The same in bits: what a text compressed with this model would take."""
    return next_byte_loss(model, batch) / math.log(2)


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageOptions(TextOptions):
    """What may be chosen about the language task."""

    layers: int = option(2, "transformer blocks", at_least=1, at_most=1000)
    width: int = option(128, "features per position", at_least=1)
    heads: int = option(4, "attention heads; must divide the width", at_least=1)
    tied: bool = option(True, "share the weights of embedding and output layer")

    def __post_init__(self) -> None:
        check_options(self)
        if self.width % self.heads:
            raise UserError(f"heads is {self.heads}; it must divide width, which is {self.width}")


def language(options: LanguageOptions | None = None) -> Task:
    """Predict the next byte of a text file, or of the Python standard library where none is given."""
    options = options or LanguageOptions()
    return text_task("language", partial(_model, options), options)


def _model(options: LanguageOptions) -> Transformer:
    names = ("context", "layers", "width", "heads", "tied")
    return Transformer(**{name: getattr(options, name) for name in names})


LANGUAGE = BuiltinTask(
    name="language",
    help="the next byte of a text, a small decoder-only transformer",
    options_type=LanguageOptions,
    make=language,
    model=_model,
    steps=500,
)


class Transformer(nn.Module):
    """Scores of the next token at every position; position t sees tokens 0..t only."""

    def __init__(
        self,
        *,
        context: int,
        layers: int,
        width: int,
        heads: int,
        tied: bool = True,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width=width, heads=heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # Normal weights of 0.02, as in GPT-2; those that write into the residual stream over √(2·layers).
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                writes_residual = name.endswith(("mix.weight", "shrink.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if writes_residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if tied:
            self.head.weight = self.tokens.weight

    def chain(self) -> Sequence[nn.Module]:
        embedding = ChainFunction(_embedded, tokens=self.tokens, positions=self.positions)
        return [embedding, *self.blocks, self.norm, self.head]

    def tensor_plan(self) -> dict[str, str]:
        """How `tensor` slices it: the vocabulary here, the rest as each block says."""
        return {"tokens": "vocabulary", "head": "vocabulary"}

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) tokens to (batch, time, vocabulary) scores."""
        x = _embedded(tokens, self.tokens, self.positions)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def _embedded(x: Tensor, tokens: nn.Embedding, positions: nn.Embedding) -> Tensor:
    length, context = x.shape[1], positions.num_embeddings
    if length > context:
        raise UserError(f"a window of {length} tokens is longer than context={context}")
    embedded: Tensor = tokens(x) + positions.weight[:length]
    return embedded


class TransformerBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.attention_norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def tensor_plan(self) -> dict[str, str]:
        """How `tensor` slices it: some heads, and some features of the feed-forward layer, for each worker."""
        return {
            "project": f"heads={self.heads} fused=3",
            "mix": f"row heads={self.heads}",
            "expand": "column",
            "shrink": "row",
        }

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        projected = self.project(self.attention_norm(x))
        by_head = projected.view(batch, length, 3, -1, self.head_width)  # a slice has some of the heads
        query, key, value = by_head.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, -1))
        fed: Tensor = self.shrink(F.gelu(self.expand(self.feed_norm(x))))
        return x + fed
