"""Atari games: what learning sees, and what is recorded, beside ale-py's own environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.errors import UserError
from manyhands.workloads.rl.environments import Environments, open_environments
from manyhands.workloads.rl.playing import film

pytest.importorskip("ale_py", reason="the extra manyhands[atari] is not installed")
gymnasium = pytest.importorskip("gymnasium")


def played(environments: Environments, actions: np.ndarray[Any, Any], seeds: list[int]) -> list[Any]:
    environments.reset(seeds)
    return [environments.step(row) for row in actions]


def test_rewards_are_signs_and_lost_lives_are_ends_but_whole_games_are_recorded() -> None:
    """Beside ale-py's environment with neither, whose rewards and lives say what is to be seen."""
    actions = np.random.default_rng(0).integers(0, 4, (450, 2))
    games = open_environments("ALE/Breakout-v5", 2)
    assert (games.observation_shape, games.observation_dtype, games.actions) == ((4, 84, 84), torch.uint8, 4)
    steps = played(games, actions, [3, 4])
    plain = gymnasium.make_vec(
        "ALE/Breakout-v5",
        2,
        vectorization_mode="vector_entry_point",
        num_threads=1,
        reward_clipping=False,
        autoreset_mode="SameStep",
    )
    _, info = plain.reset(seed=np.array([3, 4]))
    lives, totals, recorded, lost = info["lives"], np.zeros(2), [], 0
    for ours, row in zip(steps, actions, strict=True):
        observations, rewards, over, truncated, info = plain.step(row)
        np.testing.assert_array_equal(ours.observations, observations)
        np.testing.assert_array_equal(ours.rewards, np.sign(rewards))
        assert not truncated.any()
        fewer = info["lives"] < lives
        np.testing.assert_array_equal(ours.terminated, over | fewer)
        lost += int(fewer.sum())
        lives, totals = info["lives"], totals + rewards
        for game in np.flatnonzero(over):
            recorded.append((game, totals[game]))
            totals[game] = 0
    assert [(one.environment, one.total) for one in (e for step in steps for e in step.episodes)] == recorded
    assert len(recorded) >= 2
    assert lost > 2 * len(recorded)


def test_a_game_goes_as_it_would_alone() -> None:
    actions = np.random.default_rng(1).integers(0, 6, (30, 3))
    together = played(open_environments("ALE/Pong-v5", 3), actions, [5, 9, 14])
    alone = played(open_environments("ALE/Pong-v5", 1), actions[:, 1:2], [9])
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.observations[1], other.observations[0])


def test_a_time_limit_truncates_and_shows_the_last_observation() -> None:
    games = open_environments("ALE/Pong-v5", 1, options={"max_num_frames_per_episode": 80})
    steps = played(games, np.zeros((40, 1), np.int64), [0])
    cut = next(index for index, one in enumerate(steps) if one.truncated[0])
    last = steps[cut].finals[0]
    # three of its four pictures were there a step ago
    np.testing.assert_array_equal(last[:3], steps[cut - 1].observations[0, 1:])
    assert not np.array_equal(last, steps[cut].observations[0])


def test_both_can_be_left_out() -> None:
    plain = {"reward_clipping": False, "life_loss_info": False}
    actions = np.random.default_rng(0).integers(0, 4, (200, 1))
    steps = played(open_environments("ALE/Breakout-v5", 1, options=plain), actions, [3])
    assert sum(int(one.terminated[0]) for one in steps) == sum(len(one.episodes) for one in steps)


def test_a_game_is_filmed(tmp_path: Path) -> None:
    class Still(nn.Module):
        def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros(len(observations), 6), torch.zeros(len(observations))

    images = pytest.importorskip("PIL.Image", reason="the extra manyhands[images] is not installed")
    film(Still(), "ALE/Pong-v5", 0, tmp_path / "pong.png", most_steps=12)
    with images.open(tmp_path / "pong.png") as moving:
        assert moving.size == (84, 84)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        (
            "ALE/Pongg-v5",
            {},
            "environment 'ALE/Pongg-v5' is not known to gymnasium; did you mean 'ALE/Pong-v5'?",
        ),
        ("ALE/Pong-v5", {"stacks": 3}, "environment 'ALE/Pong-v5' cannot be made: .*stacks"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace("?", r"\?")):
        open_environments(name, 1, options=options)
