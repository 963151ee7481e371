"""Inputs that a model takes by name, as a mask, under `pipeline`: each stage gives them to its modules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from equality import OPTIMIZERS, distance
from manyhands.errors import UserError
from manyhands.workloads.tasks import build


class Mixing(nn.Module):
    """Adds to each position the mean of those that are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        kept = keep[..., None].to(x.dtype)
        mixed: Tensor = x + self.linear((x * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)).tanh()
        return mixed


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(Mixing() for _ in range(3))

    def chain(self) -> Sequence[nn.Module]:
        return [self.embedding, *self.layers, self.head]

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, keep)
        scores: Tensor = self.head(x)
        return scores


def loss(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch["tokens"], keep=batch["keep"])
    return F.cross_entropy(scores.mean(1), batch["labels"])


def right(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch["tokens"], keep=batch["keep"]).mean(1)
    return (scores.argmax(1) == batch["labels"]).double().mean()


def task() -> mh.Task:
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (26, 5), generator=drawn)
    lengths = torch.randint(1, 6, (26, 1), generator=drawn)
    data = {"tokens": tokens, "keep": torch.arange(5) < lengths, "labels": tokens[:, 0] % 3}
    torch.manual_seed(0)
    template = Masked().double()
    return mh.Task(
        model=lambda: copy.deepcopy(template),
        loss=loss,
        data=data,
        optimizer=OPTIMIZERS["adamw"],
        batch_size=8,
        evaluation={name: one[:9] for name, one in data.items()},
        metrics={"right": right},
    )


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        ("stages=3 microbatches=2", 3),
        ("stages=5 microbatches=4 schedule=1f1b recompute=yes", 5),
        ("stages=2 microbatches=2 schedule=interleaved", 2),
        ("stages=3 microbatches=3 schedule=zb-h1", 3),
        ("stages=2 microbatches=2 tensor=2", 4),
    ],
)
def test_stages_compute_what_one_process_does(settings: str, workers: int) -> None:
    alone = mh.fit(task(), "single", steps=5, seed=0)
    run = mh.fit(task(), f"pipeline {settings}", workers=workers, steps=5, seed=0)
    assert distance(run.model.state_dict(), alone.model.state_dict()) < 1e-9
    assert run.summary["final"] == pytest.approx(alone.summary["final"], rel=1e-9)


def test_masked_targets_are_measured_alike() -> None:
    sizes = {"context": 12, "layers": 2, "width": 12, "heads": 3, "batch_size": 7, "evaluation_bytes": 200}
    bert = build("bert", **sizes)  # type: ignore[arg-type]
    torch.manual_seed(0)
    template = bert.model().double()
    bert = replace(bert, model=lambda: copy.deepcopy(template))
    alone = mh.fit(bert, "single", steps=2, seed=0)
    run = mh.fit(bert, "pipeline stages=3 microbatches=2", workers=3, steps=2, seed=0)
    assert run.summary["final"] == pytest.approx(alone.summary["final"], rel=1e-9)


def test_a_name_that_no_module_takes_is_one_sentence() -> None:
    def with_another(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["tokens"], mask=batch["keep"]).mean(1), batch["labels"])

    with pytest.raises(UserError, match="gives the model 'mask', which no module of its chain takes"):
        mh.fit(
            replace(task(), loss=with_another, evaluation=None, metrics={}),
            "pipeline stages=2",
            workers=2,
            steps=1,
        )
