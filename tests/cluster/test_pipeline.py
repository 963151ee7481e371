"""Pipelines against one process: every schedule, several stages and micro-batches, for three kinds of model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from equality import distance
from manyhands.engine.computing import Computer
from manyhands.strategies.pipeline.schedules import SCHEDULES
from pipelines import MODELS, State, gradients_of, plan_of, task_of, train_alone, train_in_stages

COUNTS = (1, 2, 4, 8)
TWICE = 7
"""Steps for the samples twice, and for one batch more."""
MANY = 20


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Stages are threads by themselves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def alone(name: str) -> tuple[float, State]:
    """Loss and gradients of the first batch, by torch."""
    task = task_of(name)
    computer, model = Computer(plan_of(task, 1), 0), task.model()
    (piece,) = computer.share(0, 0, 1).pieces
    loss = task.loss(model, piece.fetch())
    loss.backward()
    return float(loss.detach()), {
        key: one.grad for key, one in model.named_parameters() if one.grad is not None
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "wavefront"])
def test_loss_and_every_gradient_are_those_of_one_process(name: str, schedule: str) -> None:
    expected, gradients = alone(name)
    task = task_of(name)
    model = task.model()
    for stages in (1, 2, 3, 4):
        fitting = [m for m in COUNTS if schedule != "interleaved" or m % stages == 0] or [stages]
        for microbatches in fitting:
            found, ours = gradients_of(task, SCHEDULES[schedule](stages, microbatches), model=model)
            assert found == pytest.approx(expected, rel=1e-9), (stages, microbatches)
            assert distance(ours, gradients) < 1e-9, (stages, microbatches)


def test_slices_of_time_give_the_gradients_of_whole_sequences() -> None:
    expected, gradients = alone("lstm")
    task = task_of("lstm")
    model = task.model()
    for stages in (1, 2, 3, 4):
        for slices in (1, 2, 4, 6):
            found, ours = gradients_of(task, SCHEDULES["wavefront"](stages, slices), model=model)
            assert found == pytest.approx(expected, rel=1e-9), (stages, slices)
            assert distance(ours, gradients) < 1e-9, (stages, slices)


def test_eight_slices_of_time_of_uneven_lengths() -> None:
    """Eleven time steps."""
    windows = torch.randint(0, 11, (7, 12), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    task = replace(task_of("lstm"), data=windows)
    model, rows = task.model(), next(iter(Computer(plan_of(task, 1), 0).share(0, 0, 1).pieces)).fetch()
    expected = task.loss(model, rows)
    expected.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    for stages in (1, 2, 3, 4):
        found, ours = gradients_of(task, SCHEDULES["wavefront"](stages, 8))
        assert found == pytest.approx(float(expected.detach()), rel=1e-9)
        assert distance(ours, gradients) < 1e-9, stages


@pytest.mark.parametrize(
    ("name", "text", "workers", "steps"),
    [
        ("transformer", "pipeline stages=3", 3, TWICE),
        ("cnn", "pipeline microbatches=3 schedule=zb-h1", 2, MANY),
        ("cnn", "pipeline schedule=interleaved", 2, TWICE),
        ("lstm", "pipeline microbatches=3 schedule=wavefront", 2, MANY),
        ("lstm", "pipeline stages=4 schedule=gpipe", 4, TWICE),
        ("transformer", "pipeline schedule=naive", 2, TWICE),
    ],
)
def test_steps_of_adamw_are_those_of_one_process(name: str, text: str, workers: int, steps: int) -> None:
    ended = train_in_stages(task_of(name), text, workers, steps=steps)
    expected = train_alone(task_of(name), steps)
    assert ended.losses == pytest.approx(expected.losses, rel=1e-9)
    assert distance(ended.weights, expected.weights) < 1e-9
