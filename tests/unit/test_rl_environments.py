"""Environments side by side: what a step gives, in each of gymnasium's ways to begin an episode anew."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.errors import UserError
from manyhands.workloads.rl.environments import EnvironmentFailed, Environments, Stepped, open_environments
from manyhands.workloads.rl.episodes import Episode, EpisodeRecorder

ENDINGS = ((2, "terminated"), (3, "truncated"), (1, "truncated"))
"""How long each episode of `Counting` is and how it ends, over and over."""


class Counting:
    """Observes (episode, step); the reward is 10 · episode + step, negative where the action was 1."""

    observation_space: Any = SimpleNamespace(shape=(2,), dtype=np.dtype(np.float32))
    action_space: Any = SimpleNamespace(n=2)

    def __init__(self, first: int = 0) -> None:
        self.episode, self.at, self.seeds, self.closed = first - 1, 0, [], False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        self.episode, self.at = self.episode + 1, 0
        return self.observation(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        length, how = ENDINGS[self.episode % len(ENDINGS)]
        assert self.at < length, "a step after the end of an episode"
        self.at += 1
        reward = float(10 * self.episode + self.at) * (-1 if action == 1 else 1)
        over = self.at == length
        return self.observation(), reward, over and how == "terminated", over and how == "truncated", {}

    def observation(self) -> Any:
        return np.array([self.episode, self.at], np.float32)

    def close(self) -> None:
        self.closed = True


def test_an_environment_begins_anew_within_the_step_that_ends_an_episode() -> None:
    made = [Counting(0), Counting(1)]
    rest = iter(made)
    environments = open_environments(lambda: next(rest), 2)
    assert (environments.count, environments.observation_shape, environments.actions) == (2, (2,), 2)
    assert environments.observation_dtype == torch.float32
    assert environments.reset([7, 8]).tolist() == [[0, 0], [1, 0]]

    one = environments.step(np.array([0, 1]))
    assert one.observations.tolist() == [[0, 1], [1, 1]]
    assert one.rewards.tolist() == [1, -11]
    assert not one.terminated.any()
    assert not one.finals
    two = environments.step(np.array([0, 0]))
    assert two.observations.tolist() == [[1, 0], [1, 2]]
    assert (two.terminated.tolist(), two.truncated.tolist()) == ([True, False], [False, False])
    assert not two.finals  # what is terminated is worth nothing
    assert two.episodes == [Episode(0, 0, 2, 3.0, "terminated")]
    three = environments.step(np.array([0, 0]))
    assert three.observations.tolist() == [[1, 1], [2, 0]]
    assert {index: final.tolist() for index, final in three.finals.items()} == {1: [1, 3]}
    assert three.truncated.tolist() == [False, True]
    assert three.valid.all()
    assert three.episodes == [Episode(1, 0, 3, -11.0 + 12 + 13, "truncated")]
    assert [one.seeds for one in made] == [[7, None], [8, None]]  # seeded once, then left alone
    environments.close()
    assert made[0].closed


def vector(mode: str) -> Callable[[int], Any]:
    """The same environments in gymnasium's own vector environment."""
    gymnasium = pytest.importorskip("gymnasium", reason="the extra manyhands[rl] is not installed")

    class Registered(Counting, gymnasium.Env):  # type: ignore[misc]
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

    def make(count: int) -> Any:
        return gymnasium.vector.SyncVectorEnv(
            [lambda first=first: Registered(first) for first in range(count)], autoreset_mode=mode
        )

    return make


def transitions(environments: Environments, steps: int) -> list[list[tuple[Any, ...]]]:
    """Each environment's transitions: from, reward, how it ended, and where the value is bootstrapped from."""
    rows: list[list[tuple[Any, ...]]] = [[] for _ in range(environments.count)]
    before = environments.reset(list(range(environments.count)))
    for number in range(steps):
        stepped: Stepped = environments.step(np.full(environments.count, number % 2))
        for index in np.flatnonzero(stepped.valid).tolist():
            ended = bool(stepped.terminated[index] or stepped.truncated[index])
            after = stepped.finals.get(index) if ended else stepped.observations[index]
            flags = (bool(stepped.terminated[index]), bool(stepped.truncated[index]))
            to = None if after is None else after.tolist()
            rows[index].append((before[index].tolist(), abs(stepped.rewards[index]), *flags, to))
        before = stepped.observations
    return rows


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_every_way_to_begin_anew_gives_the_same_transitions(mode: str) -> None:
    rest = iter(range(3))
    expected = transitions(open_environments(lambda: Counting(next(rest)), 3), 20)
    assert expected[0][:6] == [
        ([0, 0], 1, False, False, [0, 1]),
        ([0, 1], 2, True, False, None),
        ([1, 0], 11, False, False, [1, 1]),
        ([1, 1], 12, False, False, [1, 2]),
        ([1, 2], 13, False, True, [1, 3]),
        ([2, 0], 21, False, True, [2, 1]),
    ]
    given = transitions(open_environments(vector(mode), 3), 20)
    for ours, theirs in zip(expected, given, strict=True):
        assert theirs == ours[: len(theirs)]
        assert len(theirs) >= (
            13 if mode == "NextStep" else 20
        )  # where a step of each episode is spent on its start


def test_a_step_that_only_begins_anew_is_not_valid_and_counts_as_none() -> None:
    environments = open_environments(vector("NextStep"), 1)
    environments.reset([0])
    steps = [environments.step(np.array([0])) for _ in range(7)]
    assert [bool(one.valid[0]) for one in steps] == [True, True, False, True, True, True, False]
    assert [one.episodes for one in steps if one.episodes] == [
        [Episode(0, 0, 2, 3.0, "terminated")],
        [Episode(0, 1, 3, 36.0, "truncated")],
    ]
    assert {index: final.tolist() for index, final in steps[5].finals.items()} == {0: [1, 3]}


def test_actions_that_begin_elsewhere_are_moved() -> None:
    class Moved(Counting):
        action_space = SimpleNamespace(n=2, start=1)

    environments = open_environments(Moved, 1)
    environments.reset([0])
    assert environments.step(np.array([0])).rewards.tolist() == [-1]


def test_both_flags_at_once_are_a_termination() -> None:
    class Both(Counting):
        def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self.observation(), 1.0, True, True, {}

    environments = open_environments(Both, 1)
    environments.reset([0])
    stepped = environments.step(np.array([0]))
    assert not stepped.finals
    assert stepped.episodes == [Episode(0, 0, 1, 1.0, "terminated")]


def test_the_recorder_leaves_out_rows_that_are_no_steps() -> None:
    recorder = EpisodeRecorder(2)
    no, yes = np.array([False, False]), np.array([True, True])
    recorder.step(np.array([1.0, 5.0]), no, no, np.array([True, False]))
    assert recorder.step(np.array([2.0, 3.0]), yes, no, yes) == [
        Episode(0, 0, 2, 3.0, "terminated"),
        Episode(1, 0, 1, 3.0, "terminated"),
    ]
    assert recorder.step(np.array([1.0, 1.0]), yes, no, no) == []


class Broken(Counting):
    """Returns what it is told to in the second step of its second episode."""

    def __init__(self, observation: Any = None, reward: Any = 0.0) -> None:
        super().__init__()
        self.broken, self.reward = observation, reward

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        good = super().step(action)
        if (self.episode, self.at) != (1, 2):
            return good
        if isinstance(self.broken, Exception):
            raise self.broken
        return good[0] if self.broken is None else self.broken, self.reward, False, False, {}


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (Broken(ZeroDivisionError("division by zero")), "raised ZeroDivisionError: division by zero,"),
        (Broken(np.array([1, np.nan], np.float32)), "returned an observation that is not finite"),
        (Broken(np.zeros(3, np.float32)), "an observation of shape (3,) where its space has (2,)"),
        (Broken(np.zeros(2)), "an observation of type float64 where its space has float32"),
        (Broken([[1.0], [2.0, 3.0]]), "returned an observation that is no array,"),
        (Broken(reward=np.inf), "returned a reward that is not finite"),
        (Broken(reward="much"), "raised ValueError: could not convert string to float"),
    ],
)
def test_a_broken_environment_is_named_with_episode_and_step(broken: Broken, sentence: str) -> None:
    rest: Any = iter([Counting(), broken])
    environments = open_environments(lambda: next(rest), 2)
    environments.reset([0, 1])
    for _ in range(3):
        environments.step(np.array([0, 0]))  # the first episode, and one step of the second
    with pytest.raises(EnvironmentFailed) as failed:
        environments.step(np.array([0, 0]))
    assert sentence in str(failed.value)
    assert str(failed.value).endswith("in step 2 of episode 1")
    assert (failed.value.environment, failed.value.episode, failed.value.step) == (1, 1, 2)


def test_environments_that_cannot_be_made_or_closed_say_so() -> None:
    class Unmade(Counting):
        def __init__(self) -> None:
            raise OSError("no display")

    class Unclosed(Counting):
        def close(self) -> None:
            raise OSError("no display")

    with pytest.raises(UserError, match=r"the function that makes it raised OSError: no display$"):
        open_environments(Unmade, 2)
    environments = open_environments(Unclosed, 2)
    with pytest.raises(UserError, match=r"its close\(\) raised OSError: no display$"):
        environments.close()


def test_a_broken_last_observation_is_found_although_another_is_shown() -> None:
    class Ending(Counting):
        def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return np.array([np.nan, 0], np.float32), 1.0, False, self.seeds[-1] == 1, {}

    environments = open_environments(Ending, 2)
    environments.reset([0, 1])
    with pytest.raises(EnvironmentFailed, match="environment 0 returned an observation that is not finite"):
        environments.step(np.array([0, 0]))
    environments.reset([1, 1])
    with pytest.raises(EnvironmentFailed, match="environment 0 returned an observation that is not finite"):
        environments.step(np.array([0, 0]))


def test_a_vector_environment_that_raises_is_named() -> None:
    environments = open_environments(vector("NextStep"), 2)
    environments.reset([0, 1])
    with pytest.raises(
        EnvironmentFailed, match=r"the vector environment raised ValueError: .* in step 1 of episode 0"
    ):
        environments.step(np.array([5, 5, 5]))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (lambda: 5, "environment: the function returned 5, which has no step"),
        (lambda count: [], "environment: the function returned [], which has no step"),
        (
            lambda: SimpleNamespace(step=0, observation_space=0, action_space=SimpleNamespace(n=2)),
            "environment: observations are 0, but only arrays of numbers",
        ),
        (
            lambda: SimpleNamespace(
                step=0, observation_space=Counting.observation_space, action_space=SimpleNamespace(shape=(1,))
            ),
            "but only gymnasium.spaces.Discrete can be acted in",
        ),
    ],
)
def test_what_is_no_environment_is_refused(source: Any, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        open_environments(source, 1)
    assert sentence in str(refused.value)


def test_a_vector_environment_of_another_size_is_refused() -> None:
    with pytest.raises(UserError, match="was asked for 2 environments and made 3"):
        open_environments(lambda count: vector("NextStep")(3), 2)


def test_a_number_of_environments_and_of_seeds_is_checked() -> None:
    with pytest.raises(UserError, match="environments=0; give at least 1"):
        open_environments(Counting, 0)
    with pytest.raises(UserError, match="seeds: 1 seed for 2 environments"):
        open_environments(Counting, 2).reset([1])


def test_options_go_to_the_function() -> None:
    assert open_environments(Counting, 1, options={"first": 4}).reset([0]).tolist() == [[4, 0]]


def test_a_function_of_the_number_may_return_environments_of_ours() -> None:
    made = open_environments(Counting, 3)
    assert open_environments(lambda count: made, 3) is made
