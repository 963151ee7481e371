"""A decoder-only transformer that predicts the next byte of a text.

Blocks are pre-norm (Radford et al. 2019): x + attention(norm(x)), then x + feed-forward(norm(x)). Positions
are learned; projections that write into the residual stream start smaller the deeper the model is. There is
no dropout, so a run follows from its seed alone. Options reach from the default, which learns visibly in a
minute on two cores, to layers=14, width=768, heads=12: a hundred million parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.data.file_reader import VOCABULARY
from manyhands.engine.chain import ChainFunction
from manyhands.errors import UserError
from manyhands.task import Task
from manyhands.workloads.builtin_task import BuiltinTask
from manyhands.workloads.language.next_token import TextOptions, text_task
from manyhands.workloads.task_options import check_options, option

__all__ = ["GPT", "GPT_TASK", "GPTBlock", "GPTOptions", "gpt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTOptions(TextOptions):
    """What may be chosen about `gpt`."""

    layers: int = option(2, "transformer blocks", at_least=1, at_most=1000)
    width: int = option(128, "features per position", at_least=1)
    heads: int = option(4, "attention heads; must divide the width", at_least=1)
    tied: bool = option(True, "share the weights of embedding and output layer")

    def __post_init__(self) -> None:
        check_options(self)
        if self.width % self.heads:
            raise UserError(f"heads is {self.heads}; it must divide width, which is {self.width}")


def gpt(options: GPTOptions | None = None) -> Task:
    """Predict the next byte of a text file, or of the Python standard library where none is given."""
    options = options or GPTOptions()
    return text_task("gpt", partial(_model, options), options)


def _model(options: GPTOptions) -> GPT:
    names = ("context", "layers", "width", "heads", "tied")
    return GPT(**{name: getattr(options, name) for name in names})


GPT_TASK = BuiltinTask(
    name="gpt",
    help="the next byte of a text, a small decoder-only transformer",
    options_type=GPTOptions,
    make=gpt,
    model=_model,
    steps=500,
)


class GPT(nn.Module):
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
        self.blocks = nn.ModuleList(GPTBlock(width=width, heads=heads) for _ in range(layers))
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


class GPTBlock(nn.Module):
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
