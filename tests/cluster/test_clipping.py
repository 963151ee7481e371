"""Clipped gradients are those of torch's own functions in a plain loop, whoever holds which part of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from equality import distance, train_in_threads
from manyhands.errors import UserError
from manyhands.native.group.shared_group import SharedGroupFiles
from ways import connect

STEPS = 6
GENERATOR = torch.Generator().manual_seed(3)
DATA = (
    torch.randn(24, 5, generator=GENERATOR, dtype=torch.float64),
    torch.randn(24, 3, generator=GENERATOR, dtype=torch.float64),
)
MODEL = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
CLIPS: list[dict[str, Any]] = [{"clip_norm": 0.05}, {"clip_norm": 1e3}, {"clip_value": 0.01}]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def task(**clipping: Any) -> mh.Task:
    """Every step sees all samples, so that nothing depends on how batches are drawn."""
    return mh.Task(
        model=lambda: copy.deepcopy(MODEL),
        loss=loss,
        data=DATA,
        optimizer=optimizer,
        batch_size=24,
        **clipping,
    )


def plain_loop(clip_norm: float | None = None, clip_value: float | None = None) -> dict[str, Tensor]:
    """What a user writes without us."""
    model = copy.deepcopy(MODEL)
    steps = optimizer(model.parameters())
    for _ in range(STEPS):
        steps.zero_grad()
        loss(model, DATA).backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip_value)
        steps.step()
    return model.state_dict()


@pytest.mark.parametrize("clipping", CLIPS, ids=str)
@pytest.mark.parametrize("way", ["single", "mirrored", "central"])
def test_clipping_is_that_of_the_plain_loop(way: str, clipping: dict[str, Any]) -> None:
    world = 1 if way == "single" else 3
    with SharedGroupFiles.create(world) as files:
        found = train_in_threads(task(**clipping), world, lambda rank: connect(way, files, rank), STEPS)
    expected = plain_loop(**clipping)
    assert max(distance(weights, expected) for weights in found) < 1e-9
    if clipping != {"clip_norm": 1e3}:
        assert distance(expected, plain_loop()) > 1e-3, "it makes a difference"


@pytest.mark.parametrize("clipping", CLIPS[::2], ids=str)
def test_a_worker_that_steps_alone_clips_its_own_gradient(clipping: dict[str, Any]) -> None:
    with SharedGroupFiles.create(1) as files:
        found = train_in_threads(
            task(**clipping), 1, lambda rank: connect("local steps=2", files, rank), STEPS
        )
    assert distance(found[0], plain_loop(**clipping)) < 1e-9
    run = mh.fit(task(**clipping), "hogwild", workers=1, steps=STEPS)
    assert distance(run.model.state_dict(), plain_loop(**clipping)) < 1e-9


def test_what_cannot_be_clipped_is_refused_with_the_reason() -> None:
    with pytest.raises(
        UserError, match=r"task.clip_norm=0.5: the servers of ps apply their shards .* separately"
    ):
        mh.fit(task(clip_norm=0.5), "ps", workers=2, steps=1)
    with pytest.raises(UserError, match="leave one out"):
        task(clip_norm=1.0, clip_value=1.0)
    for bad in (0, -1.0, float("inf"), float("nan"), "1"):
        with pytest.raises(UserError, match="it must be a number above 0, or None"):
            task(clip_norm=bad)
