"""Who acts for a worker: the worker itself, in its own process, or actors of its own that act while it learns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from manyhands.data.experience import Experience, ExperienceCollector
from manyhands.data.randomness import mix
from manyhands.errors import UserError, num_of
from manyhands.native.threads import with_threads
from manyhands.workloads.rl.acting import Actor
from manyhands.workloads.rl.actor_process import ActorJob
from manyhands.workloads.rl.actors import Actors, ActorSettings
from manyhands.workloads.rl.episodes import Episode
from manyhands.workloads.rl.policy_gradients import PolicyGradient
from manyhands.workloads.rl.rollouts import Rollouts, RolloutSpec
from manyhands.workloads.rl.stepping import Environments

__all__ = ["ActedExperience"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActedExperience(Experience):
    """Rollouts of environments, to learn from by `algorithm`.

    Without `actors` every worker acts in environments of its own, then learns from what it did: no weights are ever
    behind. With them, they act while the workers learn, with weights of at most `lag` batches before.
    """

    make: Callable[[int], Environments]  # so many, side by side
    policy: Callable[[], nn.Module]
    spec: RolloutSpec
    algorithm: PolicyGradient
    environments: int
    actors: int = 0  # of all workers together
    lag: int = 0

    def __post_init__(self) -> None:
        if self.lag and not self.actors:
            raise UserError(
                f"lag is {self.lag}, but without actors nothing is ever behind; give actors as well"
            )
        if self.lag and not self.algorithm.corrects_lag:
            word = type(self.algorithm).__name__
            raise UserError(
                f"lag is {self.lag}, but {word} learns from rollouts of the newest weights; give lag=0, or an "
                "algorithm that corrects for it, such as Impala"
            )
        if self.actors and self.environments % self.actors:
            raise UserError(
                f"environments is {self.environments}; {num_of(self.actors, 'actor')} need equally many, so it must be "
                "a multiple of actors"
            )

    @property
    def processes(self) -> int:
        return self.actors and self.actors + 1  # one to spare, for the first that is lost

    def dealt(self, parts: int) -> ActedExperience:
        self.algorithm.check(length=self.spec.length, workers=parts)
        if self.actors % parts:
            raise UserError(f"actors is {self.actors}; it must be a multiple of the {parts} workers")
        return replace(self, actors=self.actors // parts)

    def collector(self, environments: range, seed: int) -> ExperienceCollector:
        return _OfActors(self, environments, seed) if self.actors else _OfWorker(self, environments, seed)


class _Rollouts(ExperienceCollector):
    """A batch of rollouts serves `algorithm.updates` steps; the first of them takes the next."""

    def __init__(self, asked: ActedExperience, environments: range, seed: int) -> None:
        self._asked, self._numbers, self._seed = asked, environments, seed
        self._step, self._updates = -1, 0  # asked for last; served so far
        self._prepared: Any = None
        self._threads = ExitStack()
        self._threads.enter_context(
            with_threads(asked.spec.threads)
        )  # for learning as well, until it is closed

    def collect(self, model: nn.Module, step: int) -> Any:
        algorithm = self._asked.algorithm
        if step != self._step:
            if self._step < 0 and step:  # a run that goes on has environments that begin anew, elsewhere
                self._seed = mix(self._seed, step)
            self._step = step
            self._updates += 1
        batch, update = divmod(self._updates - 1, algorithm.updates)
        if update == 0:
            self._prepared = algorithm.prepare(model, self._next(model, batch))
        return algorithm.part(self._prepared, update, mix(self._seed, batch))

    def close(self) -> None:
        self._threads.close()

    @abstractmethod
    def _next(self, model: nn.Module, batch: int) -> Rollouts:
        """Batch 0, 1, … of rollouts."""


class _OfWorker(_Rollouts):
    """Acts when a batch is needed, with the model that learns from it."""

    _actor: Actor | None = None

    def __init__(self, asked: ActedExperience, environments: range, seed: int) -> None:
        super().__init__(asked, environments, seed)
        self._environments = asked.make(len(environments))
        self._rollouts = asked.spec.empty(len(environments))
        self._ended: list[Episode] = []

    def _next(self, model: nn.Module, batch: int) -> Rollouts:
        if self._actor is None:
            self._actor = Actor(self._environments, self._asked.spec, self._numbers, self._seed)
        self._ended += self._actor.act(model, self._rollouts, batch)
        return self._rollouts

    def facts(self) -> Mapping[str, float]:
        ended, self._ended = self._ended, []
        return _facts_of(ended)

    def close(self) -> None:
        super().close()
        self._environments.close()


class _OfActors(_Rollouts):
    """Takes what actors have done meanwhile."""

    _actors: Actors | None = None
    _lag = 0  # of the last batch: how many batches its oldest weights were behind

    def _next(self, model: nn.Module, batch: int) -> Rollouts:
        asked = self._asked
        if self._actors is None:
            job = ActorJob(
                make=asked.make,
                policy=asked.policy,
                spec=asked.spec,
                environments=self._numbers,
                seed=self._seed,
            )
            each = len(self._numbers) // asked.actors
            settings = ActorSettings(
                actors=asked.actors, environments=each, rollouts_per_update=asked.actors, lag=asked.lag
            )
            self._actors = Actors(job, settings, model.state_dict()).__enter__()
        rollouts = self._actors.collect(model.state_dict(), batch)
        self._lag = batch - int(rollouts.versions.min())
        return rollouts

    def facts(self) -> Mapping[str, float]:
        if self._actors is None:
            return {}
        ended, self._actors.episodes = self._actors.episodes, []
        dropped = self._actors.facts().dropped
        return {"policy_lag": self._lag, **({"dropped": dropped} if dropped else {}), **_facts_of(ended)}

    def close(self) -> None:
        super().close()
        if self._actors is not None:
            self._actors.close()


def _facts_of(ended: list[Episode]) -> Mapping[str, float]:
    """What a row of the history tells of episodes that have ended."""
    if not ended:
        return {}
    return {
        "episodes": len(ended),
        "episode_return": sum(one.total for one in ended) / len(ended),
        "episode_steps": sum(one.steps for one in ended) / len(ended),
    }
