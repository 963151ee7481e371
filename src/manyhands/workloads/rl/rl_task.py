"""The task of reinforcement learning: a policy, an algorithm and environments, as a `Task` that every strategy trains.

A sample is one rollout, `length` steps of one environment. A global batch has one of each environment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from manyhands.errors import UserError
from manyhands.task import Task
from manyhands.workloads.builtin_task import BuiltinTask
from manyhands.workloads.rl.collecting import INFERENCES, ActedExperience
from manyhands.workloads.rl.environments import Source, open_environments
from manyhands.workloads.rl.playing import film, play
from manyhands.workloads.rl.policies import ActorCritic, check_policy
from manyhands.workloads.rl.policy_gradients import A2C, ALGORITHMS, PPO, Impala, PolicyGradient
from manyhands.workloads.rl.rollouts import RolloutSpec
from manyhands.workloads.rl.stepping import Environments
from manyhands.workloads.task_options import check_options, option

__all__ = ["DEFAULTS", "RL", "RLDefaults", "RLOptions", "rl", "task"]


def task(
    *,
    policy: Callable[[], nn.Module],
    algorithm: PolicyGradient,
    environment: Source,
    environments: int = 16,
    length: int = 16,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    decay: int = 0,
    clip_norm: float | None = None,
    actors: int = 0,
    lag: int | None = None,
    inference: str = "actor",
    timeout_s: float = 60.0,
    replacements: int = 10,
    episodes: int = 20,
    name: str = "rl",
) -> Task:
    """A Task whose batches are `length` steps of each of so many environments.

    `policy()` gives a module: observations (N, …) -> (scores of the actions (N, A), values (N,)). `environment` is the
    name of a gymnasium environment, a function that makes one, or a function (count) that makes a vector of them. With
    `actors`, processes of their own act while the workers learn, with weights of at most `lag` batches before; by
    default 1 where the algorithm corrects for it, else 0. With `inference="central"` they only step environments, and a
    thread of each worker chooses the actions, on its device. An actor whose environments take no step for `timeout_s`
    is replaced, each up to so many times. In `decay` steps the learning rate falls in a line to a twentieth, where it
    stays; with 0 it does not fall. `episodes` are played after every evaluation, always with the
    best action; their mean return is its metric.
    """
    for field, value in (("environments", environments), ("length", length), ("episodes", episodes)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{field} is {value!r}; it must be an integer of at least 1")
    make = partial(open_environments, environment)
    spec = _checked(policy, make, length)
    returns = Returns(environment)
    return Task(
        name=name,
        model=policy,
        loss=partial(_loss, algorithm, returns),
        data=ActedExperience(
            make=make,
            policy=policy,
            spec=spec,
            algorithm=algorithm,
            environments=environments,
            actors=actors,
            lag=int(actors > 0 and algorithm.corrects_lag) if lag is None else lag,
            inference=inference,
            timeout_s=timeout_s,
            replacements=replacements,
            film=partial(_film, environment),
        ),
        batch_size=environments,
        records_each=length / algorithm.updates,  # steps of environments
        optimizer=optimizer or partial(torch.optim.Adam, lr=7e-4, eps=1e-5),
        scheduler=partial(_falling, steps=decay) if decay else None,
        clip_norm=clip_norm,
        evaluation=torch.arange(episodes),
        metrics={"return": returns},
    )


def _checked(
    policy: Callable[[], nn.Module], make: Callable[[int], Environments], length: int
) -> RolloutSpec:
    """The layout of rollouts that fits the environments; UserError where the policy does not."""
    environments = make(1)
    try:
        model = policy()
        precision = next((one.dtype for one in model.parameters()), torch.float32)
        spec = RolloutSpec(
            length=length,
            observation_shape=environments.observation_shape,
            observation_dtype=environments.observation_dtype,
            precision=precision,
        )
        check_policy(model, spec, environments.actions)
    finally:
        environments.close()
    return spec


def _falling(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: max(_LEAST_RATE, 1 - step / steps))


def _loss(algorithm: PolicyGradient, returns: Returns, policy: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Tensor):  # of an evaluation: the episodes to play
        return -returns(policy, batch)
    return algorithm.loss(policy, batch)


def _film(environment: Source, policy: nn.Module, path: Path) -> None:
    film(policy, environment, _EVALUATION, path, within_s=_FILM_S)


class Returns:
    """The mean return of episodes with these seeds; of the same batch it is computed once."""

    def __init__(self, environment: Source) -> None:
        self._environment = environment
        self._known: tuple[Tensor, Tensor] | None = None

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        if self._known is None or self._known[0] is not batch:
            found = play(model, self._environment, [_EVALUATION + int(seed) for seed in batch])
            self._known = batch, torch.as_tensor(found).double().mean()
        return self._known[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return Returns, (self._environment,)


_EVALUATION = 1 << 20  # seeds of episodes that are played for an evaluation begin here
_FILM_S = 10.0  # that the film of an episode may take, at the end of a run
_LEAST_RATE = 0.05  # of the learning rate at the beginning


@dataclass(frozen=True, kw_only=True, slots=True)
class RLDefaults:
    """What an algorithm is trained with where nothing else is asked for.

    Found with CartPole. Where many steps of few rows learn, as in A2C, a batch in which a pole fell has a gradient so
    large that without a limit the policy forgets; PPO's clipping does for it.
    """

    algorithm: PolicyGradient
    environments: int = 32
    length: int = 5
    clip_norm: float | None = 0.5


DEFAULTS = {
    "a2c": RLDefaults(algorithm=A2C(discount=0.98)),
    "impala": RLDefaults(algorithm=Impala(discount=0.98)),
    "ppo": RLDefaults(
        algorithm=PPO(discount=0.98, trace=0.8, epochs=10, minibatches=2),
        environments=16,
        length=32,
        clip_norm=None,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RLOptions:
    """What may be chosen about reinforcement learning."""

    env: str = option("CartPole-v1", "name of a gymnasium environment", metavar="NAME")
    algorithm: str = option("ppo", "what is learned from rollouts", choices=tuple(ALGORITHMS))
    environments: int | None = option(
        None, "environments of all workers together", at_least=1, shown="32; 16 for ppo"
    )
    length: int | None = option(None, "steps of each in a batch", at_least=1, shown="5; 32 for ppo")
    actors: int = option(0, "processes that act while the workers learn; 0: the workers act", at_least=0)
    lag: int | None = option(
        None, "batches that the weights of actors may be behind", at_least=0, shown="1, or 0 for a2c"
    )
    inference: str = option("actor", "who computes the actions of actors", choices=INFERENCES)
    step_timeout_s: float = option(60.0, "seconds that a step of an actor's environments may take", above=0)
    replacements: int = option(10, "how often each actor may be replaced", at_least=0)
    learning_rate: float = option(1e-3, "learning rate of Adam", above=0)
    decay: int = option(
        4000, "steps in which the learning rate falls to a twentieth; 0: it stays", at_least=0
    )
    discount: float = option(0.98, "what a reward one step later is worth", at_least=0, at_most=1)
    entropy: float = option(0.01, "weight of the entropy in the loss", at_least=0)
    width: int = option(64, "width of the two hidden layers", at_least=1)
    clip_norm: float | None = option(
        None, "largest norm of a gradient; 0: any, as ps cannot clip", at_least=0, shown="0.5; any for ppo"
    )
    episodes: int = option(20, "episodes of an evaluation", at_least=1)

    def __post_init__(self) -> None:
        check_options(self)


def rl(options: RLOptions | None = None) -> Task:
    options = options or RLOptions()
    usual = DEFAULTS[options.algorithm]
    return task(
        policy=partial(_policy, options),
        algorithm=replace(usual.algorithm, discount=options.discount, entropy_cost=options.entropy),
        environment=options.env,
        environments=options.environments or usual.environments,
        length=options.length or usual.length,
        optimizer=partial(torch.optim.Adam, lr=options.learning_rate, eps=1e-5),
        decay=options.decay,
        clip_norm=usual.clip_norm if options.clip_norm is None else options.clip_norm or None,
        actors=options.actors,
        lag=options.lag,
        inference=options.inference,
        timeout_s=options.step_timeout_s,
        replacements=options.replacements,
        episodes=options.episodes,
    )


def _policy(options: RLOptions) -> nn.Module:
    environments = open_environments(options.env, 1)
    try:
        return ActorCritic(environments.observation_shape, environments.actions, hidden=options.width)
    finally:
        environments.close()


RL = BuiltinTask(
    name="rl",
    help="reinforcement learning: a policy that learns from acting in an environment of gymnasium",
    options_type=RLOptions,
    make=rl,
    model=_policy,
    steps=4000,
)
