"""A worker that acts by itself: its share of the environments, in its own process, with the weights that it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from manyhands.data.experience import Experience, ExperienceCollector
from manyhands.data.randomness import mix
from manyhands.workloads.rl.acting import Actor
from manyhands.workloads.rl.episodes import Episode
from manyhands.workloads.rl.policy_gradients import PolicyGradient
from manyhands.workloads.rl.rollouts import RolloutSpec
from manyhands.workloads.rl.stepping import Environments

__all__ = ["ActingWorker", "OwnExperience", "episode_facts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnExperience(Experience):
    """Every worker acts in environments of its own, then learns from what it did: no weights are ever behind."""

    make: Callable[[int], Environments]  # so many, side by side
    spec: RolloutSpec
    algorithm: PolicyGradient

    def dealt(self, parts: int) -> OwnExperience:
        self.algorithm.check(length=self.spec.length, workers=parts)
        return self

    def collector(self, environments: range, seed: int) -> ActingWorker:
        return ActingWorker(self, environments, seed)


class ActingWorker(ExperienceCollector):
    """A batch of rollouts serves `algorithm.updates` steps; the first of them acts."""

    def __init__(self, asked: OwnExperience, environments: range, seed: int) -> None:
        self._algorithm, self._seed = asked.algorithm, seed
        self._environments = asked.make(len(environments))
        self._rollouts = asked.spec.empty(len(environments))
        self._actor = Actor(self._environments, asked.spec, environments, seed)
        self._step, self._updates = -1, 0  # asked for last; served so far
        self._prepared: Any = None
        self._ended: list[Episode] = []

    def collect(self, model: nn.Module, step: int) -> Any:
        if step != self._step:
            self._step = step
            self._updates += 1
        batch, update = divmod(self._updates - 1, self._algorithm.updates)
        if update == 0:
            self._ended += self._actor.act(model, self._rollouts, step)
            self._prepared = self._algorithm.prepare(model, self._rollouts)
        return self._algorithm.part(self._prepared, update, mix(self._seed, batch))

    def facts(self) -> Mapping[str, float]:
        ended, self._ended = self._ended, []
        return episode_facts(ended)

    def close(self) -> None:
        self._environments.close()


def episode_facts(ended: list[Episode]) -> Mapping[str, float]:
    """What a row of the history tells of episodes that have ended."""
    if not ended:
        return {}
    return {
        "episodes": len(ended),
        "episode_return": sum(one.total for one in ended) / len(ended),
        "episode_steps": sum(one.steps for one in ended) / len(ended),
    }
