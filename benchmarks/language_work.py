"""What `language.py` trains: sizes, data of random tokens, and how many FLOPs a token costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.data.batches import BatchPlan, BatchSource
from manyhands.data.file_reader import windows
from manyhands.workloads.language.bert import BERT, masked_loss
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
        sizes = {one: getattr(self, one) for one in ("layers", "width", "heads", "context", "vocabulary")}
        return BERT(**sizes) if self.name == "bert" else GPT(**sizes)

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
        return {
            "tokens": tokens,
            "places": places,
            "labels": np.take_along_axis(tokens, places, 1).astype(np.int64),
        }

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
        name="gpt", layers=12, width=768, heads=12, context=1024, vocabulary=50304, batch=480, micro=96
    ),
    "bert": Work(
        name="bert", layers=24, width=1024, heads=16, context=128, vocabulary=30528, batch=1024, micro=256
    ),
}
SMALL = {"layers": 6, "width": 384, "heads": 6, "context": 256, "vocabulary": 8192, "batch": 64, "micro": 16}
TINY = {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 64, "batch": 8, "micro": 4}


adamw = partial(torch.optim.AdamW, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
CLIP = 1.0
