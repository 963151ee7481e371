"""What a run says it sent, by what it was for, held against what an exchange must send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh

WORKERS, STEPS = 2, 4
GRADIENT = 8192  # bytes: 1024 numbers of 8, which any of the strategies lays out without padding
STATUS = 512  # bytes that travel with it: the loss, who wants to stop, who has a gradient


def summary(strategy: str, out: Path | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, dtype=torch.float64, generator=generator)
    task = mh.Task(
        model=lambda: nn.Linear(32, 32, bias=False, dtype=torch.float64),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(x, x.flip(0)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=16,
        evaluation=(x, x),
    )
    options = mh.Options(checkpoint_every=2 if out is not None else None)
    return mh.fit(task, strategy, workers=WORKERS, steps=STEPS, out=out, options=options).summary


def num_bytes(found: dict[str, Any]) -> dict[str, int]:
    return {name: sent["bytes_sent"] for name, sent in found["sent"].items()}


def require_whole(found: dict[str, Any]) -> None:
    """The parts are the whole, and what workers booked for their steps is the part of the gradients."""
    for name in ("bytes_sent", "messages_sent"):
        assert found[name] == sum(sent[name] for sent in found["sent"].values())
        booked = sum(worker[name] for worker in found["per_worker"])
        assert found["sent"]["gradients"][name] == booked


@pytest.mark.parametrize(
    ("strategy", "a_step"),
    [
        ("allreduce link=tcp", 2 * (WORKERS - 1) * (GRADIENT + STATUS)),  # a reduce-scatter and an all-gather
        ("ps consistency=async", GRADIENT),  # each batch is pushed by one worker
    ],
)
def test_gradients_are_those_of_the_formula(strategy: str, a_step: int) -> None:
    found = summary(strategy)
    require_whole(found)
    assert num_bytes(found)["gradients"] == STEPS * a_step
    assert num_bytes(found)["checkpoints"] == 0


def test_what_codecs_keep_counts_for_checkpoints_and_not_for_gradients(tmp_path: Path) -> None:
    strategy = "allreduce link=tcp codec=int8"
    plain, kept = summary(strategy), summary(strategy, tmp_path / "run")
    for found in (plain, kept):
        require_whole(found)
    before, after = num_bytes(plain), num_bytes(kept)
    assert (after["gradients"], after["control"]) == (before["gradients"], before["control"])
    assert before["checkpoints"] == 0
    assert after["checkpoints"] >= 2 * GRADIENT, "what the other worker's codec left out, twice"
    assert before["gradients"] < STEPS * 2 * (GRADIENT / 4 + STATUS), "an eighth, and scales beside it"


def test_workers_book_the_bytes_that_a_codec_makes_and_not_those_of_the_gradient() -> None:
    found = summary("ps consistency=async link=tcp codec=int8")
    require_whole(found)
    assert 0 < num_bytes(found)["gradients"] < STEPS * GRADIENT / 4
