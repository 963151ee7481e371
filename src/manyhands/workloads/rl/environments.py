"""Environments side by side: one interface over gymnasium's environments, one by one or vectorized.

An environment begins its next episode by itself, in one of gymnasium's three ways. What a step gives is the same:

                 observations after the last step      the step after it
    one by one   the first of the next episode         a step as any other
    SAME_STEP    the first of the next episode         a step as any other
    DISABLED     the first of the next episode         a step as any other (we ask it to begin anew)
    NEXT_STEP    the last of the episode               valid=False: it ignores the action and begins anew

In each of them, `finals` has the last observation of an episode that was truncated: the one to bootstrap from.

Nothing here needs gymnasium except a name to look up: a function may return anything with its methods and spaces.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from manyhands.errors import UserError, first_line, num_of, printable
from manyhands.workloads.rl.episodes import Episode, EpisodeRecorder

__all__ = ["EnvironmentFailed", "Environments", "Source", "Stepped", "open_environments"]

Array = np.ndarray[Any, Any]
Source = str | Callable[..., Any]
"""A name of gymnasium, a function that makes one environment, or a function of their number that makes all."""


class EnvironmentFailed(UserError):
    """An environment raised, or returned what its spaces do not allow."""

    def __init__(self, what: str, environment: int | None, episode: int, step: int) -> None:
        who = "the vector environment" if environment is None else f"environment {environment}"
        super().__init__(f"{who} {what} in step {step} of episode {episode}")
        self.environment, self.episode, self.step = environment, episode, step


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
        if self._dtype.kind == "f" and not np.isfinite(observations).all():
            rows = np.isfinite(observations.reshape(len(observations), -1)).all(axis=1)
            raise self._failed("returned an observation that is not finite", first + int(np.argmin(rows)))
        if rewards is not None and not np.isfinite(rewards).all():
            raise self._failed("returned a reward that is not finite", int(np.argmin(np.isfinite(rewards))))

    def _stepped(self, observations: Array, columns: _Columns, finals: dict[int, Array]) -> Stepped:
        self._check_finite(observations, columns.rewards)
        for index, final in finals.items():
            self._check_finite(final[np.newaxis], first=index)
        return Stepped(observations, *columns, finals, self.recorder.step(*columns))


class _Columns(NamedTuple):
    """The columns of a step, in the order of `Stepped` and of `EpisodeRecorder.step`."""

    rewards: Array
    terminated: Array
    truncated: Array
    valid: Array


class _OneByOne(Environments):
    """A loop over single environments in this process: no processes, no copies between them."""

    def __init__(self, environments: Sequence[Any]) -> None:
        first = environments[0]
        super().__init__(len(environments), first.observation_space, first.action_space)
        self._environments = environments

    def reset(self, seeds: Sequence[int]) -> Array:
        self._check_seeds(seeds)
        observations = np.empty((self.count, *self.observation_shape), self._dtype)
        for index, seed in enumerate(seeds):
            self._begin(index, observations, seed=seed)
        self._check_finite(observations)
        return observations

    def step(self, actions: Array) -> Stepped:
        observations = np.empty((self.count, *self.observation_shape), self._dtype)
        columns = _Columns(
            np.empty(self.count),
            np.empty(self.count, bool),
            np.empty(self.count, bool),
            np.ones(self.count, bool),
        )
        finals = {}
        for index, (environment, action) in enumerate(zip(self._environments, actions.tolist(), strict=True)):
            try:
                observation, reward, terminated, truncated, _ = environment.step(action + self._first_action)
                columns.rewards[index] = reward
                columns.terminated[index], columns.truncated[index] = terminated, truncated
            except Exception as error:
                raise self._raised(error, index) from error
            self._put(observation, observations, index)
            if terminated or truncated:
                if not terminated:
                    finals[index] = observations[index].copy()
                self._begin(index, observations)
        return self._stepped(observations, columns, finals)

    def close(self) -> None:
        for environment in self._environments:
            environment.close()
        self._environments = ()

    def _begin(self, index: int, observations: Array, **seed: int) -> None:
        try:
            observation, _ = self._environments[index].reset(**seed)
        except Exception as error:
            raise self._raised(error, index) from error
        self._put(observation, observations, index)

    def _put(self, observation: Any, observations: Array, index: int) -> None:
        given = observation if type(observation) is np.ndarray else np.asarray(observation)
        if given.dtype != self._dtype and not np.can_cast(given.dtype, self._dtype):
            raise self._failed(
                f"returned an observation of type {given.dtype} where its space has {self._dtype}", index
            )
        if given.shape != self.observation_shape:
            raise self._failed(
                f"returned an observation of shape {given.shape} where its space has {self.observation_shape}",
                index,
            )
        observations[index] = given


class _Vectorized(Environments):
    """A vector environment of gymnasium, in whichever way it begins its episodes anew."""

    def __init__(self, environment: Any) -> None:
        super().__init__(
            environment.num_envs, environment.single_observation_space, environment.single_action_space
        )
        mode = environment.metadata.get("autoreset_mode")
        self._mode = str(getattr(mode, "value", mode))
        if self._mode not in ("NextStep", "SameStep", "Disabled"):
            raise UserError(
                "environment: the vector environment does not say how it begins episodes anew; set its "
                "metadata['autoreset_mode'] to a gymnasium.vector.AutoresetMode"
            )
        self._environment = environment
        self._begins = np.zeros(self.count, bool)
        # those that gymnasium itself makes of single environments take a list of seeds, others only one
        self.seeded_separately = hasattr(environment.unwrapped, "env_fns")

    def reset(self, seeds: Sequence[int]) -> Array:
        self._check_seeds(seeds)
        self._begins[:] = False
        seed = list(seeds) if self.seeded_separately else seeds[0]
        observations = self._checked(self._call(self._environment.reset, seed=seed)[0])
        self._check_finite(observations)
        return observations

    def step(self, actions: Array) -> Stepped:
        observations, rewards, terminated, truncated, info = self._call(
            self._environment.step, actions + self._first_action
        )
        observations = self._checked(observations)
        columns = _Columns(
            np.asarray(rewards, float), np.array(terminated), np.array(truncated), ~self._begins
        )
        cut = np.flatnonzero(columns.truncated & ~columns.terminated)
        finals: dict[int, Array] = {}
        if self._mode == "SameStep":
            finals = {int(index): np.asarray(info["final_obs"][index], self._dtype) for index in cut}
        else:
            finals = {int(index): observations[index].copy() for index in cut}
            ended = columns.terminated | columns.truncated
            if self._mode == "NextStep":
                self._begins = ended
            elif ended.any():
                begun, _ = self._call(self._environment.reset, options={"reset_mask": ended})
                observations[ended] = self._checked(begun)[ended]
        return self._stepped(observations, columns, finals)

    def close(self) -> None:
        self._environment.close()

    def _call(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except Exception as error:
            raise self._raised(error, None) from error

    def _checked(self, observations: Any) -> Array:
        given = np.asarray(observations)
        expected = (self.count, *self.observation_shape)
        if given.shape != expected or given.dtype != self._dtype:
            raise self._failed(
                f"returned observations of shape {given.shape} and type {given.dtype} where its space has "
                f"{expected} and {self._dtype}",
                None,
            )
        return given.copy()


def open_environments(
    source: Source, count: int, *, options: Mapping[str, Any] | None = None
) -> Environments:
    """`count` environments; `options` are keyword arguments of what makes them."""
    if count < 1:
        raise UserError(f"environments={count}; give at least 1")
    given = dict(options or {})
    if isinstance(source, str):
        from manyhands.workloads.rl.gymnasium_names import open_named

        made = open_named(source, count, given)
    elif _takes_count(source, given):
        made = source(count, **given)
    else:
        made = [source(**given) for _ in range(count)]
    if isinstance(made, Environments):
        return made
    if isinstance(made, list) and made:
        _require(made[0], "step", "observation_space", "action_space")
        return _OneByOne(made)
    _require(made, "step", "num_envs", "single_observation_space", "single_action_space")
    if made.num_envs != count:
        raise UserError(
            f"environment: the function was asked for {count} environments and made {made.num_envs}"
        )
    return _Vectorized(made)


def _takes_count(source: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether a function makes all environments at once: it has an argument that nothing else gives."""
    try:
        parameters = inspect.signature(source).parameters.values()
    except (ValueError, TypeError):
        return False
    return any(
        one.default is one.empty
        and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        and one.name not in options
        for one in parameters
    )


def _require(made: Any, *attributes: str) -> None:
    missing = next((one for one in attributes if not hasattr(made, one)), None)
    if missing is not None:
        raise UserError(
            f"environment: the function returned {printable(repr(made), 60)}, which has no {missing}; return a "
            "gymnasium.Env, or from a function of their number a gymnasium.vector.VectorEnv"
        )


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
