"""What `language.py` trains: sizes, a BERT of its own, data of random tokens, and how many FLOPs a token costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.data.batches import BatchPlan, BatchSource
from manyhands.data.file_reader import windows
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import next_byte_loss

SEED = 1
MASKED = 20  # targets in a sequence of 128, as `max_predictions_per_seq` of NVIDIA's recipe


@dataclass(frozen=True, kw_only=True)
class Work:
    """One model and the batches that it is trained on; `batch` samples make a step, `micro` of them at a time."""

    name: str
    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    batch: int
    micro: int

    @property
    def pieces(self) -> int:
        return self.batch // self.micro

    def model(self) -> nn.Module:
        if self.name == "bert":
            return Bert(self)
        sizes = {one: getattr(self, one) for one in ("layers", "width", "heads", "context", "vocabulary")}
        return GPT(**sizes)

    @property
    def loss(self) -> Callable[[nn.Module, Any], Tensor]:
        return masked_loss if self.name == "bert" else next_byte_loss

    def data(self) -> Any:
        """As `Task.data` takes it: windows over a text, or sequences with places to predict."""
        draw = np.random.default_rng(SEED)
        samples = 4 * self.batch
        if self.name == "gpt":
            return windows(
                draw.integers(0, self.vocabulary, samples * self.context + 1, np.int32), self.context
            )  # type: ignore[arg-type]
        tokens = draw.integers(0, self.vocabulary, (samples, self.context), np.int32)
        masked = max(1, MASKED * self.context // 128)
        places = np.stack([draw.permutation(self.context)[:masked] for _ in range(samples)]).astype(np.int64)
        return {"tokens": tokens, "places": places, "targets": np.take_along_axis(tokens, places, 1)}

    def batches(self, size: int) -> Iterator[Any]:
        """The micro-batches of `size` samples that `mh.fit` computes, in its order."""
        source = BatchSource(self.data())
        plan, step = BatchPlan(len(source), self.batch, SEED), 0
        while True:
            indices = plan.indices(step)
            for first in range(0, self.batch, size):
                yield source.fetch(indices[first : first + size])
            step += 1

    def flops(self, model: nn.Module) -> float:
        """Of a token, forward and backward: 6 for each parameter but the positions, and 12·layers·width·context."""
        count = sum(one.numel() for one in model.parameters()) - self.context * self.width
        return 6 * count + 12 * self.layers * self.width * self.context


WORKS = {
    "gpt": Work(
        name="gpt", layers=12, width=768, heads=12, context=1024, vocabulary=50304, batch=480, micro=48
    ),
    "bert": Work(
        name="bert", layers=24, width=1024, heads=16, context=128, vocabulary=30528, batch=1024, micro=256
    ),
}
TINY = {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 64, "batch": 8, "micro": 4}


class Bert(nn.Module):
    """The encoder of Devlin et al. (2019) with its head for masked tokens, which is applied to those alone."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        width = work.width
        self.tokens = nn.Embedding(work.vocabulary, width)
        self.positions = nn.Embedding(work.context, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(width, work.heads) for _ in range(work.layers))
        self.change, self.change_norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(work.vocabulary))
        for one in self.modules():
            if isinstance(one, nn.Linear | nn.Embedding):
                nn.init.normal_(one.weight, std=0.02)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Scores of every token of the vocabulary at the `places` of each sequence."""
        x = self.norm(
            self.tokens(tokens) + self.positions.weight[: tokens.shape[1]] + self.segments.weight[0]
        )
        for layer in self.layers:
            x = layer(x)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        picked = self.change_norm(F.gelu(self.change(x[rows, places])))
        return F.linear(picked, self.tokens.weight, self.bias)


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mix_norm, self.shrink_norm = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        by_head = self.project(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*by_head.unbind(0))
        x = self.mix_norm(x + self.mix(seen.transpose(1, 2).flatten(2)))
        fed: Tensor = self.shrink_norm(x + self.shrink(F.gelu(self.expand(x))))
        return fed


def masked_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["tokens"].long(), batch["places"])
    return F.cross_entropy(scores.flatten(0, 1), batch["targets"].long().flatten())


adamw = partial(torch.optim.AdamW, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
CLIP = 1.0
