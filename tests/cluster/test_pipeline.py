"""Pipelines against one process: every schedule, several stages and micro-batches, and what a model may have."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from equality import distance
from pipelines import MODELS, Ended, adamw, sgd, task_of, train_alone, train_in_stages

COUNTS = (1, 2, 4, 8)


@cache
def alone(name: str, optimizer: Callable[[Any], torch.optim.Optimizer], steps: int) -> Ended:
    return train_alone(task_of(name, optimizer), steps)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_loss_and_every_gradient_are_those_of_one_process(name: str, schedule: str, stages: int) -> None:
    fitting = [m for m in COUNTS if schedule != "interleaved" or m % stages == 0] or [stages]
    for microbatches in fitting:
        text = f"pipeline stages={stages} microbatches={microbatches} schedule={schedule}"
        ended = train_in_stages(task_of(name, sgd), text, stages, steps=1)
        expected = alone(name, sgd, 1)
        assert ended.losses == pytest.approx(expected.losses, rel=1e-9), text
        assert distance(ended.weights, expected.weights) < 1e-9, text


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_slices_of_time_give_the_gradients_of_whole_sequences(stages: int) -> None:
    for slices in (1, 2, 4, 6):
        text = f"pipeline stages={stages} microbatches={slices} schedule=wavefront"
        ended = train_in_stages(task_of("lstm", sgd), text, stages, steps=1)
        expected = alone("lstm", sgd, 1)
        assert ended.losses == pytest.approx(expected.losses, rel=1e-9), text
        assert distance(ended.weights, expected.weights) < 1e-9, text


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("text", ["pipeline stages=3 microbatches=4", "pipeline schedule=zb-h1"])
def test_twenty_steps_of_adamw_are_those_of_one_process(name: str, text: str) -> None:
    ended = train_in_stages(task_of(name), text, 3 if "3" in text else 2, steps=20)
    expected = alone(name, adamw, 20)
    assert ended.losses == pytest.approx(expected.losses, rel=1e-9)
    assert distance(ended.weights, expected.weights) < 1e-9
