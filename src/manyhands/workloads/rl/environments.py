"""Environments side by side: one interface over gymnasium's environments, one by one or vectorized.

Nothing here needs gymnasium except a name to look up: a function may return anything with its methods and spaces.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from manyhands.errors import UserError, first_line, printable
from manyhands.workloads.rl.named_environments import open_named
from manyhands.workloads.rl.stepping import Array, Columns, EnvironmentFailed, Environments, Stepped

__all__ = ["EnvironmentFailed", "Environments", "Source", "Stepped", "open_environments"]

Source = str | Callable[..., Any]
"""A name of gymnasium, a function that makes one environment, or a function of their number that makes all."""


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
        columns = Columns(
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
        environments, self._environments = self._environments, ()
        for environment in environments:
            _close(environment)

    def picture(self, index: int) -> Array:
        environment = self._environments[index]
        try:  # without a mode gymnasium would only warn
            shown = environment.render() if getattr(environment, "render_mode", "any") is not None else None
        except Exception as error:
            raise UserError(f"environment: it cannot be drawn: {first_line(error)}") from error
        if not isinstance(shown, np.ndarray):
            raise UserError('environment: it shows no pictures; make it with render_mode="rgb_array"')
        return shown

    def _begin(self, index: int, observations: Array, **seed: int) -> None:
        try:
            observation, _ = self._environments[index].reset(**seed)
        except Exception as error:
            raise self._raised(error, index) from error
        self._put(observation, observations, index)

    def _put(self, observation: Any, observations: Array, index: int) -> None:
        try:
            given = observation if type(observation) is np.ndarray else np.asarray(observation)
        except ValueError as error:  # of lists that differ in length
            raise self._failed("returned an observation that is no array,", index) from error
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
        columns = Columns(
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
        _close(self._environment)

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
        made = open_named(source, count, given)
    elif _takes_count(source, given):
        made = _made(source, count, **given)
    else:
        made = [_made(source, **given) for _ in range(count)]
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


def _made(source: Callable[..., Any], *count: int, **options: Any) -> Any:
    try:
        return source(*count, **options)
    except Exception as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"environment: the function that makes it raised {type(error).__name__}: {printable(first_line(error))}"
        ) from error


def _close(environment: Any) -> None:
    try:
        environment.close()
    except Exception as error:
        raise UserError(
            f"environment: its close() raised {type(error).__name__}: {printable(first_line(error))}"
        ) from error


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
