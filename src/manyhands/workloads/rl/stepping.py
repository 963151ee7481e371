"""What environments side by side give, step by step, whichever they are.

An environment begins its next episode by itself, in one of gymnasium's three ways. What a step gives is the same:

                 observations after the last step      the step after it
    one by one   the first of the next episode         a step as any other
    SAME_STEP    the first of the next episode         a step as any other
    DISABLED     the first of the next episode         a step as any other (we ask it to begin anew)
    NEXT_STEP    the last of the episode               valid=False: it ignores the action and begins anew

In each of them, `finals` has the last observation of an episode that was truncated: the one to bootstrap from.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from manyhands.errors import UserError, first_line, num_of, printable
from manyhands.workloads.rl.episodes import Episode, EpisodeRecorder

__all__ = ["Array", "Columns", "EnvironmentFailed", "Environments", "Stepped"]

Array = np.ndarray[Any, Any]


class EnvironmentFailed(UserError):
    """An environment raised, or returned what its spaces do not allow."""

    def __init__(self, what: str, environment: int | None, episode: int, step: int) -> None:
        who = "the vector environment" if environment is None else f"environment {environment}"
        super().__init__(f"{who} {what} in step {step} of episode {episode}")
        self.what, self.environment, self.episode, self.step = what, environment, episode, step

    def among(self, numbers: Array) -> EnvironmentFailed:
        """The same of an environment by its number among those of all actors."""
        number = None if self.environment is None else int(numbers[self.environment])
        return EnvironmentFailed(self.what, number, self.episode, self.step)


class Stepped(NamedTuple):
    """What one step of all environments gives; arrays of `count` rows, which the caller may keep."""

    observations: Array  # what the policy sees next
    rewards: Array
    terminated: Array
    truncated: Array
    valid: Array  # False where an environment only began anew
    finals: Mapping[int, Array]  # the last observation of each episode that was truncated and not terminated
    episodes: Sequence[Episode]  # those that ended with this step


class Environments(ABC):
    """`count` environments of equal spaces, stepped together."""

    seeded_separately = True
    """Whether each environment has random numbers of its own, whatever others run beside it."""

    def __init__(self, count: int, observation_space: Any, action_space: Any) -> None:
        self.count = count
        self.observation_shape, self._dtype = _observations_of(observation_space)
        self.observation_dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
        self.actions, self._first_action = _actions_of(action_space)
        self.recorder = EpisodeRecorder(count)

    @abstractmethod
    def reset(self, seeds: Sequence[int]) -> Array:
        """Begin the first episode of each environment, with a seed for each; the first observations."""

    @abstractmethod
    def step(self, actions: Array) -> Stepped:
        """One action from 0 to `actions` - 1 for each environment."""

    @abstractmethod
    def close(self) -> None: ...

    def picture(self, index: int) -> Array:
        """How environment `index` looks now: uint8 (height, width, 3), or without colours (height, width)."""
        raise UserError(f"environment {index} has no pictures; make it a single gymnasium.Env that renders")

    def _check_seeds(self, seeds: Sequence[int]) -> None:
        if len(seeds) != self.count:
            raise UserError(
                f"seeds: {num_of(len(seeds), 'seed')} for {num_of(self.count, 'environment')}; give each one"
            )
        self.recorder = EpisodeRecorder(self.count)

    def _failed(self, what: str, environment: int | None) -> EnvironmentFailed:
        """The step that is being taken is the one after those that are counted."""
        at = environment or 0
        return EnvironmentFailed(
            what, environment, int(self.recorder.numbers[at]), int(self.recorder.steps[at]) + 1
        )

    def _raised(self, error: Exception, environment: int | None) -> EnvironmentFailed:
        return self._failed(f"raised {type(error).__name__}: {printable(first_line(error))},", environment)

    def _check_finite(self, observations: Array, rewards: Array | None = None, first: int = 0) -> None:
        """Of the environments from `first` on."""
        # a sum tells in one pass; where it is not finite because it is large, each number is looked at
        if self._dtype.kind == "f" and not math.isfinite(observations.sum()):
            rows = np.isfinite(observations.reshape(len(observations), -1)).all(axis=1)
            if not rows.all():
                raise self._failed("returned an observation that is not finite", first + int(np.argmin(rows)))
        if rewards is not None and not math.isfinite(rewards.sum()):
            raise self._failed("returned a reward that is not finite", int(np.argmin(np.isfinite(rewards))))

    def _stepped(self, observations: Array, columns: Columns, finals: dict[int, Array]) -> Stepped:
        self._check_finite(observations, columns.rewards)
        for index, final in finals.items():
            self._check_finite(final[np.newaxis], first=index)
        return Stepped(observations, *columns, finals, self.recorder.step(*columns))


class Columns(NamedTuple):
    """The columns of a step, in the order of `Stepped` and of `EpisodeRecorder.step`."""

    rewards: Array
    terminated: Array
    truncated: Array
    valid: Array


def _observations_of(space: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if shape is None or dtype is None or np.dtype(dtype).kind not in "biuf":
        raise UserError(
            f"environment: observations are {printable(str(space), 80)}, but only arrays of numbers can be learned "
            "from; wrap it in gymnasium.wrappers.FlattenObservation"
        )
    return tuple(shape), np.dtype(dtype)


def _actions_of(space: Any) -> tuple[int, int]:
    """How many actions there are, and the number of the first."""
    number = getattr(space, "n", None)
    if not isinstance(number, int | np.integer) or getattr(space, "shape", ()) != ():
        raise UserError(
            f"environment: actions are {printable(str(space), 80)}, but only gymnasium.spaces.Discrete can be acted in"
        )
    return int(number), int(getattr(space, "start", 0))
