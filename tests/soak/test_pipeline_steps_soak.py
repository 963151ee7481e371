"""Twenty steps of AdamW under every schedule, number of stages and of micro-batches, as in one process."""

from __future__ import annotations

from functools import cache

import pytest

from equality import distance
from manyhands.strategies.pipeline.schedules import SCHEDULES
from pipelines import MODELS, Ended, task_of, train_alone, train_in_stages

pytestmark = pytest.mark.soak


@cache
def alone(name: str) -> Ended:
    return train_alone(task_of(name), 20)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_schedule_takes_the_steps_of_one_process(name: str, schedule: str, stages: int) -> None:
    if schedule == "wavefront" and name != "lstm":
        return
    for microbatches in (1, 2, 4, 8):
        if schedule == "interleaved" and microbatches % stages:
            continue
        microbatches = min(microbatches, 6) if schedule == "wavefront" else microbatches  # six time steps
        text = f"pipeline stages={stages} microbatches={microbatches} schedule={schedule}"
        ended = train_in_stages(task_of(name), text, stages, steps=20)
        assert ended.losses == pytest.approx(alone(name).losses, rel=1e-9), text
        assert distance(ended.weights, alone(name).weights) < 1e-9, text
