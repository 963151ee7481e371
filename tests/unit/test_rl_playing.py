"""What a policy earns in whole episodes, beside closed forms and a plain loop over gymnasium."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyhands.errors import UserError
from manyhands.workloads.rl.playing import film, play


class Corridor:
    """Observes how far it came of `length`; action 1 goes on for a reward of 1, action 0 ends the episode."""

    observation_space: Any = SimpleNamespace(shape=(1,), dtype=np.dtype(np.float32))
    action_space: Any = SimpleNamespace(n=2)

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.at = 0
        self.length = 5 if seed is None else seed
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += action
        done = action == 0 or self.at == self.length
        return np.array([self.at], np.float32), float(action), done, False, {}

    def render(self) -> Any:
        return np.full((8, 8, 3), 10 * self.at, np.uint8)

    def close(self) -> None: ...


class Fixed(nn.Module):
    """The same scores whatever it sees."""

    def __init__(self, scores: Sequence[float]) -> None:
        super().__init__()
        self.given = nn.Parameter(torch.tensor(scores))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        assert not self.training
        return self.given.expand(len(observations), -1), torch.zeros(len(observations))


def test_only_the_first_episode_of_each_seed_counts() -> None:
    policy = Fixed([0.0, 1.0])
    assert play(policy, Corridor, [7, 2, 30]).tolist() == [7, 2, 30]
    assert play(Fixed([1.0, 0.0]), Corridor, [7, 2]).tolist() == [0, 0]
    assert policy.training


def test_what_was_earned_until_the_last_step_counts() -> None:
    assert play(Fixed([0.0, 1.0]), Corridor, [7, 2, 30], most_steps=10).tolist() == [7, 2, 10]


def test_drawn_actions_follow_the_policy_and_the_seed() -> None:
    """Going on with probability p, without end: p / (1 - p) steps on average, with variance p / (1 - p)²."""
    p = 0.75
    policy = Fixed([0.0, float(np.log(p / (1 - p)))])
    seeds = range(1_000_000, 1_004_000)  # so far that no corridor ends
    returns = play(policy, Corridor, seeds, greedy=False)
    assert abs(returns.mean() - 3.0) < 4 * np.sqrt(p) / (1 - p) / np.sqrt(len(seeds))
    np.testing.assert_array_equal(play(policy, Corridor, seeds[100:110], greedy=False), returns[100:110])


class Leaning(nn.Module):
    """Pushes the cart to where the pole falls."""

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        falling = observations[:, 2] + observations[:, 3]
        return torch.stack([-falling, falling], 1), falling


def test_returns_are_those_of_a_loop_over_gymnasium() -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="the extra manyhands[rl] is not installed")
    expected = []
    for seed in range(20):
        environment = gymnasium.make("CartPole-v1")
        observation, _ = environment.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = environment.step(
                int(observation[2] + observation[3] > 0)
            )
            total, over = total + reward, terminated or truncated
        expected.append(total)
    assert 100 < np.mean(expected) < 500  # neither all too short nor all at the limit
    assert play(Leaning(), "CartPole-v1", range(20)).tolist() == expected


def test_a_film_has_a_picture_a_step(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image", reason="the extra manyhands[images] is not installed")
    path = tmp_path / "episode.png"
    assert film(Fixed([0.0, 1.0]), Corridor, 6, path) == 6
    with images.open(path) as moving:
        assert (moving.size, moving.n_frames) == ((8, 8), 5)
        moving.seek(3)
        assert np.unique(np.asarray(moving.convert("RGB"))).tolist() == [40]


def test_a_film_of_cartpole_shows_the_pole(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image", reason="the extra manyhands[images] is not installed")
    path = tmp_path / "episode.png"
    total = film(Fixed([0.0, 1.0]), "CartPole-v1", 3, path)
    with images.open(path) as moving:
        assert moving.n_frames == total - 1
        leaning = []
        for at in (0, moving.n_frames - 1):
            moving.seek(at)
            shown = np.asarray(moving.convert("L")).astype(int)
            pole = np.argwhere(shown[: len(shown) // 2] < 200)[:, 1].mean()
            cart = np.argwhere(shown < 80)[:, 1].mean()
            leaning.append(pole - cart)
    assert abs(leaning[0]) < 3
    assert leaning[1] < -5  # pushed to the right only, so the pole falls to the left


def test_a_film_ends_in_time_and_is_small(tmp_path: Path) -> None:
    path = tmp_path / "episode.png"
    film(Leaning(), "CartPole-v1", 3, path)
    whole = path.stat().st_size
    film(Leaning(), "CartPole-v1", 3, path, most_bytes=whole // 2)
    assert path.stat().st_size <= whole // 2
    with pytest.raises(UserError, match="nothing to show"):
        film(Leaning(), "CartPole-v1", 3, path, within_s=0)


def test_an_environment_without_pictures_is_refused(tmp_path: Path) -> None:
    class Hidden(Corridor):
        def render(self) -> Any:
            return None

    with pytest.raises(UserError, match='make it with render_mode="rgb_array"'):
        film(Fixed([0.0, 1.0]), Hidden, 6, tmp_path / "episode.png")
