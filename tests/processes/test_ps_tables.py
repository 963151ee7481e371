"""Row-sparse tables on real servers and workers: a killed primary costs nothing, and what it cost is in the log."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh

STEPS = 30


class Bag(nn.Module):
    """The mean of a few words of a table, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4, dtype=torch.float64)
        self.out = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.out(self.words(words).mean(dim=1))
        return logits


def task_of(optimizer: Callable[[Iterable[Parameter]], Optimizer], death: Path | None = None) -> mh.Task:
    """With `death`, the first server that has taken 10 steps creates that file and is killed."""

    def rate(step: int) -> float:
        if death is not None and step == 10:
            try:
                os.close(os.open(death, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return 1.0
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    draw = torch.Generator().manual_seed(5)
    words = torch.randint(0, 50, (90, 3), generator=draw)
    return mh.Task(
        model=Bag,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        data=(words, words.sum(dim=1) % 2),
        optimizer=optimizer,
        scheduler=lambda optimizer: LambdaLR(optimizer, rate),
        batch_size=20,
        evaluation=(words, words.sum(dim=1) % 2),
        sparse={"words.weight": lambda batch: batch[0]},
    )


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        difference = (mine - theirs).abs().max().item()
        assert difference < 1e-9, f"{name} differs by {difference}"


def test_a_killed_primary_loses_no_row(tmp_path: Path) -> None:
    def optimizer(parameters: Iterable[Parameter]) -> Optimizer:
        return Adagrad(parameters, lr=0.3)

    alone = mh.fit(task_of(optimizer), "single", steps=STEPS, seed=4)
    out, death = tmp_path / "run", tmp_path / "death"
    task = task_of(optimizer, death)
    run = mh.fit(task, "ps servers=2 replicas=1", workers=2, steps=STEPS, seed=4, out=out)
    assert death.exists()
    assert_equal(run.model, alone.model)
    assert run.summary["final"]["evaluation_loss"] == pytest.approx(
        alone.summary["final"]["evaluation_loss"], abs=1e-9
    )
    logs = [file.read_text().splitlines() for file in (out / "updates").glob("shard-*")]
    rows = [json.loads(line) for lines in logs for line in lines]
    updates = [update for row in rows if row["row"] == "step" for update in row["updates"]]
    assert len(updates) >= 2 * 2 * STEPS
    assert all(update["rows_version"] == update["read_version"] for update in updates), (
        "in step, both are the step's"
    )


@pytest.mark.soak
def test_over_tcp(tmp_path: Path) -> None:
    def optimizer(parameters: Iterable[Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.5)

    alone = mh.fit(task_of(optimizer), "single", steps=STEPS, seed=4)
    run = mh.fit(task_of(optimizer), "ps servers=2 link=tcp", workers=2, steps=STEPS, seed=4)
    assert_equal(run.model, alone.model)
