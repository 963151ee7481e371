"""Environments by name, beside gymnasium's own loop."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from manyhands.errors import UserError
from manyhands.workloads.rl.cart_pole import CartPoles
from manyhands.workloads.rl.environments import Environments, open_environments

gymnasium = pytest.importorskip("gymnasium", reason="the extra manyhands[rl] is not installed")


def single(name: str, seed: int, actions: list[int], **options: Any) -> list[Any]:
    """Observations and rewards of a plain loop over gymnasium.make, anew at each end."""
    environment = gymnasium.make(name, **options)
    observation, _ = environment.reset(seed=seed)
    rows = [observation]
    for action in actions:
        observation, reward, terminated, truncated, _ = environment.step(action)
        final = observation
        if terminated or truncated:
            observation, _ = environment.reset()
        rows.append(
            (observation, reward, terminated, truncated, final if truncated and not terminated else None)
        )
    return rows


def check_against_single(
    environments: Environments, name: str, steps: int, within: float = 0.0, **options: Any
) -> None:
    actions = np.random.default_rng(5).integers(0, environments.actions, (steps, environments.count))
    seeds = [1000 + 7 * index for index in range(environments.count)]
    first = environments.reset(seeds)
    stepped = [environments.step(row) for row in actions]
    for index, seed in enumerate(seeds):
        expected = single(name, seed, actions[:, index].tolist(), **options)
        np.testing.assert_array_equal(first[index], expected[0])
        for ours, (observation, reward, terminated, truncated, final) in zip(
            stepped, expected[1:], strict=True
        ):
            np.testing.assert_allclose(ours.observations[index], observation, within, within)
            assert ours.rewards[index] == reward
            assert (ours.terminated[index], ours.truncated[index]) == (terminated, truncated)
            if final is not None:
                np.testing.assert_allclose(ours.finals[index], final, within, within)


def test_acrobot_is_what_a_loop_over_gymnasium_gives() -> None:
    environments = open_environments("Acrobot-v1", 3, options={"max_episode_steps": 30})
    check_against_single(environments, "Acrobot-v1", 100, max_episode_steps=30)
    environments.close()


def test_compiled_cartpole_is_what_a_loop_over_gymnasium_gives() -> None:
    """Sines are computed by other means, so the last bits may differ: 7 digits of float32."""
    for limit in (500, 17):  # most random episodes end before or after the second
        environments = open_environments("CartPole-v1", 5, options={"max_episode_steps": limit})
        assert isinstance(environments, CartPoles)
        check_against_single(environments, "CartPole-v1", 400, 1e-5, max_episode_steps=limit)


def test_a_vector_environment_of_gymnasium_is_taken_where_it_has_one() -> None:
    """Its reward is 1 a step, so an episode's total is its length."""
    environments = open_environments("CartPole-v1", 16, options={"sutton_barto_reward": False})
    assert (environments.observation_shape, environments.actions) == ((4,), 2)
    assert not environments.seeded_separately
    environments.reset(list(range(16)))
    rng = np.random.default_rng(0)
    episodes = [one for _ in range(300) for one in environments.step(rng.integers(0, 2, 16)).episodes]
    assert len(episodes) > 100
    assert all(one.total == one.steps for one in episodes)
    assert 15 < np.mean([one.steps for one in episodes]) < 30  # 22 by a random policy, as is often published


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("CartPol-v1", "environment 'CartPol-v1' is not known to gymnasium; did you mean 'CartPole-v1'?"),
        ("qqqq", "a name of another package begins with its module"),
        ("Pendulum-v1", "but only gymnasium.spaces.Discrete can be acted in"),
        ("Blackjack-v1", "but only arrays of numbers can be learned from"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_in_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        open_environments(name, 2)
    assert sentence in str(refused.value)


def test_an_option_that_the_environment_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match=r"environment 'Acrobot-v1' cannot be made: .*gravity"):
        open_environments("Acrobot-v1", 1, options={"gravity": 2})


def test_without_gymnasium_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UserError, match=r"pip install 'manyhands\[rl\]'"):
        open_environments("Acrobot-v1", 1)
    open_environments("CartPole-v1", 1)  # is ours
