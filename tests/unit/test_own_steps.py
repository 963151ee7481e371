"""Which optimizers of workers that step by themselves go on with a state, and what is said of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.engine.computing import Built, TrainingPlan
from manyhands.strategies.ps.live.worker_state import OwnSteps, ResidualMemory
from manyhands.strategies.ps.ps_messages import Work, WorkKind
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategy import Strategy


def built() -> Built:
    model = nn.Linear(3, 1)
    return Built(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def own_steps(run: Path, *, load_states: bool) -> tuple[OwnSteps, ResidualMemory, Built]:
    task = mh.Task(
        model=lambda: nn.Linear(3, 1),
        loss=lambda model, batch: model(batch[0]).sum(),
        data=(torch.ones(4, 3),),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=2,
    )
    plan = TrainingPlan(task=task, steps=9, seed=0, evaluate_every=0, checkpoint_every=1)
    strategy = Strategy.parse("ps push=parameters")
    assert isinstance(strategy, Ps)
    owed, mine = ResidualMemory(run, strategy, workers=2), built()
    return OwnSteps(mine, owed, plan, load_states=load_states), owed, mine


def update(clock: int) -> Work:
    return Work(kind=WorkKind.TRAIN, clock=clock, batch=clock, part=1, parts=2)


@pytest.mark.parametrize("clock", [0, 4])
def test_only_who_takes_a_place_over_has_lost_something(clock: int, tmp_path: Path) -> None:
    steps, _, _ = own_steps(tmp_path, load_states=False)
    said = steps.begin(update(clock), slot=1)
    anew = "the optimizer of worker 1 starts without state at batch 5: a successor does not receive the state"
    assert said == (anew if clock else None)
    assert steps.begin(update(clock + 1), slot=1) is None, "it has begun"


def test_a_worker_of_a_resumed_run_has_the_state_that_was_kept_or_says_that_none_was(tmp_path: Path) -> None:
    steps, owed, mine = own_steps(tmp_path, load_states=True)
    before = built()
    before.model(torch.ones(2, 3)).sum().backward()
    before.optimizer.step()
    owed.save(4, 1, {}, before.optimizer.state_dict())
    assert steps.begin(update(4), slot=1) is None
    state = mine.optimizer.state_dict()["state"]
    assert torch.equal(state[0]["momentum_buffer"], torch.full((1, 3), 2.0))
    later, _, mine = own_steps(tmp_path, load_states=True)
    said = later.begin(update(6), slot=1)
    assert said == "the optimizer of worker 1 starts without state at batch 7: its state was not saved"
    assert not mine.optimizer.state_dict()["state"]
