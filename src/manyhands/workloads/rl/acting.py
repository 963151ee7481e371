"""Acting: a policy and environments, side by side, make rows of rollouts.

What chance decides follows from (seed, number of the environment, how many rows it has acted) and not from who acts, so
any split of the environments among workers and actors makes the same rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from manyhands.data.randomness import mix
from manyhands.workloads.rl.episodes import Episode
from manyhands.workloads.rl.policies import choose, scorer
from manyhands.workloads.rl.rollouts import Rollouts, RolloutSpec
from manyhands.workloads.rl.stepping import Array, EnvironmentFailed, Environments

__all__ = ["ActedRow", "Actor", "draws"]

_ACTING, _BEGINNING = 1, 2  # what the draws of actions and the seeds of environments are apart by


def draws(seed: int, keys: NDArray[np.uint64], first: int, count: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), `count` for each key from its number `first` on: SplitMix64 in counter mode."""
    with np.errstate(over="ignore"):
        base = np.array([mix(seed, _ACTING, int(key)) for key in keys], np.uint64)
        numbers = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
        state = base[:, None] + numbers * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    uniform: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform


class ActedRow(NamedTuple):
    """Where a policy has to say how it goes on."""

    number: int  # of the actions to take; the length of the rollout where there are none left
    observations: Array  # to act on
    finals: Mapping[int, Array]  # last observations of episodes that the row before cut: what are they worth?


class Actor:
    """Acts in `environments`, whose numbers among those of all actors are `keys`; begins at the first rollout."""

    def __init__(self, environments: Environments, spec: RolloutSpec, keys: Sequence[int], seed: int) -> None:
        self._environments, self._spec, self._seed = environments, spec, seed
        self._keys = np.asarray(keys, np.uint64)
        self._seeds = [mix(seed, _BEGINNING, key) >> 33 for key in keys]  # of 31 bits, as any library takes
        self._observations: Array | None = None
        self._rows = 0  # acted so far, in each environment
        self.ended: list[Episode] = []  # in the last rollout

    def uniforms(self) -> NDArray[np.float64]:
        """The numbers (environments, rows) that the actions of the next rollout are drawn with."""
        return draws(self._seed, self._keys, self._rows, self._spec.length)

    def act(self, policy: nn.Module, into: Rollouts, version: int) -> list[Episode]:
        """Fill one rollout of every environment, with weights of this version; which episodes ended."""
        for _ in self.acting(policy, into, version):
            pass
        return self.ended

    def acting(self, policy: nn.Module, into: Rollouts, version: int) -> Iterator[None]:
        """`act`, which pauses before each step of the environments."""
        device = next(policy.parameters()).device
        uniforms = torch.from_numpy(self.uniforms()).to(device)
        into.versions.fill_(version)
        acted, scores_of = into.actions.numpy(), scorer(policy)
        for row, observations, finals in self.rows(into):
            with torch.no_grad():
                if finals:
                    _, values = policy(torch.from_numpy(np.stack(list(finals.values()))).to(device))
                    into.final_values[list(finals), row - 1] = values.to("cpu", into.final_values.dtype)
                if row < self._spec.length:
                    scores = scores_of(torch.from_numpy(observations).to(device))
                    actions, log_probs = choose(scores, uniforms[:, row])
                    acted[:, row] = actions.cpu().numpy()
                    into.log_probs[:, row].copy_(log_probs)
            yield

    def rows(self, into: Rollouts) -> Iterator[ActedRow]:
        """Fill one rollout of every environment but for what a policy has to say: whoever takes a row writes that."""
        length, self.ended = self._spec.length, []
        # to write a row of numpy's costs less than one of torch's, which has types that numpy has not
        observed, acted = into.observations.numpy(), into.actions.numpy()
        flags = [one.numpy() for one in (into.terminated, into.truncated, into.valid)]
        into.final_values.zero_()
        if self._observations is None:
            try:
                self._observations = self._environments.reset(self._seeds)
            except EnvironmentFailed as failed:
                raise failed.among(self._keys) from failed.__cause__
        finals: Mapping[int, Array] = {}
        for row in range(length):
            observed[:, row] = self._observations
            yield ActedRow(row, self._observations, finals)
            try:
                stepped = self._environments.step(acted[:, row].copy())
            except EnvironmentFailed as failed:
                raise failed.among(self._keys) from failed.__cause__
            self._observations, finals = stepped.observations, stepped.finals
            into.rewards[:, row].copy_(torch.from_numpy(stepped.rewards))
            for flag, given in zip(
                flags, (stepped.terminated, stepped.truncated, stepped.valid), strict=True
            ):
                flag[:, row] = given
            self.ended += stepped.episodes
        observed[:, length] = self._observations
        if finals:
            yield ActedRow(length, self._observations, finals)
        self._rows += length
