"""Reinforcement learning under strategies: the same weights however environments are split, bounds on lag, replay."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import UserError
from manyhands.strategies.ps.audit import audit_run
from manyhands.workloads.rl.policy_gradients import PolicyGradient

pytestmark = pytest.mark.timeout(120)
QUIET = mh.Options(progress="none", allow_overload=True)


class _Space:
    def __init__(self, **about: Any) -> None:
        self.__dict__.update(about)


class Corridor:
    """Walk right to the end of a corridor of five places, for a reward of 1; a step now and then slips."""

    observation_space = _Space(shape=(2,), dtype=np.dtype(np.float64))
    action_space = _Space(n=2, start=0, dtype=np.dtype(np.int64), shape=())

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._chance = np.random.default_rng(seed)
        self._place, self._steps = 0, 0
        return self._seen(), {}

    def _seen(self) -> Any:
        return np.array([self._place / 4, self._chance.random()])

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        slips = self._chance.random() < 0.1
        self._place = max(0, self._place + (1 if (action == 1) != slips else -1))
        self._steps += 1
        return self._seen(), float(self._place == 4), self._place == 4, self._steps == 12, {}

    def close(self) -> None: ...


def policy(dtype: torch.dtype = torch.float64) -> nn.Module:
    return mh.rl.ActorCritic((2,), 2, hidden=16).to(dtype)


def corridor(algorithm: PolicyGradient | None = None, environments: int = 7, **actors: int) -> mh.Task:
    return mh.rl.task(
        policy=policy,
        algorithm=algorithm or mh.rl.A2C(),
        environment=Corridor,
        environments=environments,
        length=8,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        episodes=4,
        **actors,
    )


def weights(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


@pytest.mark.parametrize("strategy", ["mirrored", "allreduce algorithm=ring", "central"])
@pytest.mark.parametrize("algorithm", [mh.rl.A2C(), mh.rl.PPO(minibatches=2, epochs=2)], ids=["a2c", "ppo"])
def test_three_workers_learn_what_one_learns(strategy: str, algorithm: PolicyGradient) -> None:
    alone = mh.fit(corridor(algorithm), "single", workers=1, steps=12, options=QUIET)
    together = mh.fit(corridor(algorithm), strategy, workers=3, steps=12, options=QUIET)
    assert torch.allclose(weights(alone.model), weights(together.model), rtol=0, atol=1e-9)
    untrained = policy()
    assert not torch.allclose(weights(alone.model), weights(untrained), atol=1e-2)


@pytest.mark.filterwarnings("ignore:hogwild on a dense model")
@pytest.mark.parametrize("strategy", ["mirrored", "hogwild", "ps consistency=async", "local steps=4"])
def test_the_corridor_is_learned(strategy: str) -> None:
    run = mh.fit(corridor(), strategy, workers=2, steps=240, options=QUIET)
    assert (
        run.summary["final"]["return"] >= 0.75
    )  # 0 for one that does not walk; slips can cost a late arrival


def test_a_run_with_a_bound_on_lag_is_audited_and_replayed_to_the_same_bytes(tmp_path: Path) -> None:
    strategy = "ps consistency=bounded:2"
    run = mh.fit(corridor(), strategy, workers=3, steps=40, out=tmp_path / "run", options=QUIET)
    assert run.path is not None
    found = audit_run(run.path).found
    assert not found.violations
    assert not found.missing
    again = mh.replay(run.path, corridor())
    assert again.first_difference is None
    assert again.same_bytes


@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
def test_a_strategy_without_whole_models_is_refused(strategy: str) -> None:
    with pytest.raises(UserError, match="made by acting with the model: acting needs a complete model"):
        mh.fit(corridor(), strategy, workers=2, steps=2, options=QUIET)


@pytest.mark.parametrize("workers", [1, 2])
def test_actors_without_lag_make_the_run_synchronous(workers: int) -> None:
    """Their environments are others than a worker's own, but the same in every run."""
    task = partial(corridor, mh.rl.Impala(), environments=8, actors=4, lag=0)
    runs = [mh.fit(task(), "mirrored", workers=workers, steps=10, options=QUIET) for _ in range(2)]
    first, second = (weights(run.model) for run in runs)
    assert torch.equal(first, second)
    assert {row["policy_lag"] for row in runs[0].history if "policy_lag" in row} == {0}


def test_actors_keep_within_the_lag_and_learn() -> None:
    task = corridor(mh.rl.Impala(), environments=8, actors=2, lag=3)
    run = mh.fit(task, "single", workers=1, steps=240, options=QUIET)
    lags = {row["policy_lag"] for row in run.history if "policy_lag" in row}
    assert max(lags) <= 3
    assert run.summary["final"]["return"] >= 0.75


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"lag": 2}, "lag is 2, but without actors nothing is ever behind"),
        ({"actors": 2, "lag": 2}, "lag is 2, but A2C learns from rollouts of the newest weights"),
        ({"actors": 3}, "environments is 7; 3 actors need equally many"),
    ],
)
def test_actors_that_do_not_fit_are_refused(given: dict[str, int], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        corridor(**given)
