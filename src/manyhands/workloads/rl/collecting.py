"""Who acts for a worker: the worker itself, in its own process, or actors of its own that act while it learns."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from manyhands.data.experience import Experience, ExperienceCollector
from manyhands.data.randomness import mix
from manyhands.data.store.rundir import EPISODE
from manyhands.errors import UserError, num_of
from manyhands.native.threads import with_threads
from manyhands.workloads.rl.acting import Actor
from manyhands.workloads.rl.actor_process import ActorJob
from manyhands.workloads.rl.actors import Actors, ActorSettings
from manyhands.workloads.rl.episodes import Episode
from manyhands.workloads.rl.policy_gradients import PolicyGradient
from manyhands.workloads.rl.rollouts import Rollouts, RolloutSpec
from manyhands.workloads.rl.run_tickets import log_of, starts_of
from manyhands.workloads.rl.stepping import Environments

__all__ = ["INFERENCES", "ActedExperience"]

INFERENCES = ("actor", "central")
"""Who computes the actions of actors: each its own, or a thread of the worker those of all that wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActedExperience(Experience):
    """Rollouts of environments, to learn from by `algorithm`.

    Without `actors` every worker acts in environments of its own, then learns from what it did: no weights are ever
    behind. With them, they act while the workers learn, with weights of at most `lag` batches before; with
    central inference the later rows of a rollout are newer.
    """

    make: Callable[[int], Environments]  # so many, side by side
    policy: Callable[[], nn.Module]
    spec: RolloutSpec
    algorithm: PolicyGradient
    environments: int
    actors: int = 0  # of all workers together
    lag: int = 0
    inference: str = "actor"
    timeout_s: float = 60.0  # that a step of all environments of an actor may take
    replacements: int = 10  # of each actor
    recorded: Path | None = None  # the directory of the run, for the log of actors' tickets
    replayed: Path | None = None  # that of a run whose actors' tickets are acted again
    one_start: bool = False  # of that run is all that a collector acts for
    film: Callable[[nn.Module, Path], object] | None = None  # of an episode, to a file

    def __post_init__(self) -> None:
        if self.inference not in INFERENCES:
            raise UserError(f"inference is {self.inference!r}; it must be {' or '.join(INFERENCES)}")
        if self.inference == "central" and not self.actors:
            raise UserError(
                "inference is central, but without actors the workers act in one batch already; give actors as well"
            )
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

    def recorded_in(self, run: Path) -> ActedExperience:
        return replace(self, recorded=run)

    def replayed_from(self, run: Path, *, each_process: bool = False) -> ActedExperience | None:
        return replace(self, replayed=run, one_start=each_process) if self.actors else None

    def show(self, model: nn.Module, run: Path) -> None:
        if self.film is not None:
            with suppress(UserError):  # not every environment can be drawn
                self.film(model, run / EPISODE)

    def collector(self, environments: range, seed: int) -> ExperienceCollector:
        return _OfActors(self, environments, seed) if self.actors else _OfWorker(self, environments, seed)


class _Rollouts(ExperienceCollector):
    """A batch of rollouts serves `algorithm.updates` steps; the first of them takes the next."""

    def __init__(self, asked: ActedExperience, environments: range, seed: int) -> None:
        self._asked, self._numbers, self._seed = asked, environments, seed
        self._run_seed, self._first = seed, 0  # the step of the run where this began
        self._step, self._updates = -1, 0  # asked for last; served so far
        self._prepared: Any = None
        self._is_new = False  # and no row has told of it
        self._threads = ExitStack()
        self._threads.enter_context(
            with_threads(asked.spec.threads)
        )  # for learning as well, until it is closed

    def collect(self, model: nn.Module, step: int) -> Any:
        algorithm = self._asked.algorithm
        if step != self._step:
            if self._step < 0 or self._begins_anew(step):
                self._begin(step)
            self._step = step
            self._updates += 1
        batch, update = divmod(self._updates - 1, algorithm.updates)
        if update == 0:
            rollouts, device = self._next(model, batch), next(model.parameters()).device
            if device.type != "cpu":
                rollouts = Rollouts(*(one.to(device) for one in rollouts))
            self._prepared = algorithm.prepare(model, rollouts)
            self._is_new = True
        return algorithm.part(self._prepared, update, mix(self._seed, batch))

    def facts(self) -> Mapping[str, Any]:
        if not self._is_new:
            return {}
        self._is_new = False
        asked = self._asked
        ended, more = self._batch_facts()
        frames = asked.environments * asked.spec.length  # of all workers that share the batch
        return {"frames": frames, **more, **_facts_of(ended)}

    @abstractmethod
    def _batch_facts(self) -> tuple[list[Episode], Mapping[str, Any]]:
        """Episodes that ended in the batch, and other facts of it."""

    def _begins_anew(self, step: int) -> bool:  # noqa: ARG002
        """Whether the run that is replayed was resumed at this step."""
        return False

    def _begin(self, step: int) -> None:
        """A run that goes on has environments that begin anew, elsewhere."""
        self._first, self._updates = step, 0
        self._seed = mix(self._run_seed, step) if step else self._run_seed

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

    def _batch_facts(self) -> tuple[list[Episode], Mapping[str, Any]]:
        ended, self._ended = self._ended, []
        return ended, {}

    def close(self) -> None:
        super().close()
        self._environments.close()


class _OfActors(_Rollouts):
    """Takes what actors have done meanwhile."""

    _actors: Actors | None = None
    _lag = 0  # of the last batch: how many batches its oldest weights were behind
    _noticed = 0  # replacements
    _sums: Mapping[str, float]  # of what the history was told, since the actors began
    _lags: Counter[int]
    _is_unrecorded = False  # and the user knows

    def __init__(self, asked: ActedExperience, environments: range, seed: int) -> None:
        super().__init__(asked, environments, seed)
        self._starts = starts_of(asked.replayed, environments) if asked.replayed is not None else None

    def _begins_anew(self, step: int) -> bool:
        # a successor may have begun with the very batch that its predecessor had computed last
        return self._starts is not None and not self._asked.one_start and step in self._starts

    def _begin(self, step: int) -> None:
        super()._begin(step)
        if self._actors is not None:
            self._actors.close()
            self._actors = None
        if self._starts is not None and step not in self._starts:
            names = f"environments {self._numbers.start} to {self._numbers.stop - 1}"
            raise UserError(
                f"{self._asked.replayed} has no log of {names} that begins at step {step}: a run that was resumed "
                "with other workers cannot be replayed"
            )

    def _next(self, model: nn.Module, batch: int) -> Rollouts:
        if self._actors is None:
            self._actors = self._start(model)
        rollouts = self._actors.collect(model.state_dict(), batch)
        self._lag = batch - int(rollouts.versions.min())
        return rollouts

    def _start(self, model: nn.Module) -> Actors:
        asked = self._asked
        job = ActorJob(
            make=asked.make,
            policy=asked.policy,
            spec=asked.spec,
            environments=self._numbers,
            seed=self._seed,
        )
        settings = ActorSettings(
            actors=asked.actors,
            environments=len(self._numbers) // asked.actors,
            rollouts_per_update=asked.actors,
            lag=asked.lag,
            central=asked.inference == "central",
            timeout_s=asked.timeout_s,
            replacements=asked.replacements,
            first_step=self._first,
            steps_each=asked.algorithm.updates,
        )
        record = log_of(asked.recorded, self._numbers) if asked.recorded is not None else None
        replayed = self._starts[self._first] if self._starts is not None else None
        self._noticed, self._sums, self._lags = 0, dict[str, float](), Counter[int]()
        return Actors(job, settings, model.state_dict(), record=record, replayed=replayed).__enter__()

    def _batch_facts(self) -> tuple[list[Episode], Mapping[str, Any]]:
        assert self._actors is not None, "a batch has come from them"
        facts = self._actors.facts()
        sums = {name: getattr(facts, name) for name in ("dropped", *_SECONDS)} | {
            "replaced": len(facts.replaced)
        }
        since = {name: round(value - self._sums.get(name, 0), 6) for name, value in sums.items()}
        lags = facts.lags - self._lags
        self._sums, self._lags = sums, facts.lags.copy()
        counts = {name: value for name, value in since.items() if value or name in _SECONDS}
        by_lag = {str(lag): count for lag, count in sorted(lags.items())}
        return self._actors.episodes, {"policy_lag": self._lag, "lags": by_lag, **counts}

    def notices(self) -> Sequence[str]:
        if self._actors is None:
            return ()
        facts = self._actors.facts()
        found = [f"{sentence}; it was replaced" for sentence in facts.replaced[self._noticed :]]
        self._noticed += len(found)
        if facts.unrecorded and not self._is_unrecorded:
            self._is_unrecorded = True
            found.append(facts.unrecorded)
        return found

    def close(self) -> None:
        super().close()
        if self._actors is not None:
            self._actors.close()


_SECONDS = ("learner_waited_s", "actors_waited_s", "acted_s")


def _facts_of(ended: list[Episode]) -> Mapping[str, float]:
    """What a row of the history tells of episodes that have ended."""
    if not ended:
        return {}
    return {
        "episodes": len(ended),
        "episode_return": sum(one.total for one in ended) / len(ended),
        "episode_steps": sum(one.steps for one in ended) / len(ended),
    }
