"""The algorithms: what a policy learns from rollouts, as a loss.

    loss = policy loss + value_cost · ½ (target − value)² − entropy_cost · entropy

summed over the transitions of rollouts and divided by their number of rows, so that the mean over workers with equally
many rollouts is what one process computes of all. Published losses of IMPALA are sums over the rows instead: their
learning rates for plain SGD, limits of the gradient's norm and ε are for gradients that are B · T times larger.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.data.batches import permutation
from manyhands.errors import UserError
from manyhands.workloads.rl.returns import gae, n_step, transitions, v_trace
from manyhands.workloads.rl.rollouts import Rollouts
from manyhands.workloads.task_options import CheckedOptions, option

__all__ = ["A2C", "ALGORITHMS", "PPO", "Impala", "PolicyGradient"]


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(CheckedOptions, ABC):
    """An algorithm: `prepare` is called once for a batch of rollouts, `part` and `loss` for each of its updates."""

    corrects_lag: ClassVar[bool]
    """Whether it may learn from rollouts of older weights than those that it changes."""

    discount: float = option(0.99, "what a reward one step later is worth: gamma", at_least=0, at_most=1)
    value_cost: float = option(0.5, "weight of the values' loss, half the squared error", at_least=0)
    entropy_cost: float = option(0.01, "weight of the entropy, which keeps actions varied", at_least=0)

    @property
    def updates(self) -> int:
        """How many optimizer steps a batch of rollouts gives."""
        return 1

    def check(self, *, length: int, workers: int) -> None:
        """UserError where it cannot learn from rollouts of so many rows, by so many workers."""

    def prepare(self, policy: nn.Module, rollouts: Rollouts) -> Any:  # noqa: ARG002
        """What all updates of a batch of rollouts need, from the policy before the first of them."""
        return rollouts

    def part(self, batch: Any, update: int, seed_of_batch: int) -> Any:  # noqa: ARG002
        """The rows of a prepared batch that its update 0, 1, … learns from."""
        return batch

    @abstractmethod
    def loss(self, policy: nn.Module, batch: Any) -> Tensor:
        """A scalar to minimise."""

    def _total(self, policy_losses: Tensor, entropies: Tensor, errors: Tensor, valid: Tensor) -> Tensor:
        rows = policy_losses + 0.5 * self.value_cost * errors.square() - self.entropy_cost * entropies
        return torch.where(valid, rows, 0.0).sum() / valid.numel()


@dataclass(frozen=True, kw_only=True)
class A2C(PolicyGradient):
    """Advantage actor-critic with n-step returns (Mnih et al., 2016), for rollouts of the newest weights.

    With workers that act and learn without waiting for each other it is A3C. Stable-Baselines3's `vf_coef` of 0.5 is
    `value_cost` 1, as its squared error is not halved.
    """

    corrects_lag = False

    value_cost: float = option(1.0, "weight of the values' loss, half the squared error", at_least=0)

    def loss(self, policy: nn.Module, batch: Rollouts) -> Tensor:
        judged = _judge(policy, batch.observations, batch.actions, batch.rewards.dtype)
        rewards, discounts = transitions(batch, self.discount)
        errors = n_step(rewards, discounts, judged.bootstrap) - judged.values
        policy_losses = -errors.detach() * judged.log_probs
        return self._total(policy_losses, judged.entropies, errors, batch.valid)


@dataclass(frozen=True, kw_only=True)
class Impala(PolicyGradient):
    """IMPALA (Espeholt et al., 2018): rollouts of older weights are corrected for by V-trace."""

    corrects_lag = True

    corrects: bool = option(
        True, "whether rollouts of older weights are corrected for; False shows why they are"
    )
    rho: float = option(1.0, "limit of the ratio of policies in the values' targets", above=0)
    c: float = option(1.0, "limit of the ratio of policies in the trace", above=0)
    rho_policy: float = option(1.0, "limit of the ratio of policies in the policy's gradient", above=0)
    trace: float = option(1.0, "decay of the trace: lambda", at_least=0, at_most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c > self.rho:
            raise UserError(f"c is {self.c:g}; it must be at most rho, which is {self.rho:g}")

    def loss(self, policy: nn.Module, batch: Rollouts) -> Tensor:
        judged = _judge(policy, batch.observations, batch.actions, batch.rewards.dtype)
        rewards, discounts = transitions(batch, self.discount)
        log_ratios = (judged.log_probs - batch.log_probs) * self.corrects
        targets, advantages = v_trace(
            log_ratios, discounts, rewards, judged.values, judged.bootstrap,
            rho=self.rho, c=self.c, rho_policy=self.rho_policy, trace=self.trace,
        )  # fmt: skip
        policy_losses = -advantages * judged.log_probs
        return self._total(policy_losses, judged.entropies, targets - judged.values, batch.valid)


class PreparedRows(NamedTuple):
    """What PPO learns from, (B, T) each but the observations (B, T, …)."""

    observations: Tensor
    actions: Tensor
    valid: Tensor
    log_probs: Tensor  # of the policy that acted
    advantages: Tensor
    targets: Tensor


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyGradient):
    """Proximal policy optimization with a clipped ratio (Schulman et al., 2017); with lag APPO (Petrenko et al., 2020).

    Each minibatch has the same rows of every rollout, so that it does not depend on how rollouts are split among
    workers. CleanRL's `vf_coef` is `value_cost`, Stable-Baselines3's is half of it.
    """

    corrects_lag = True

    trace: float = option(0.95, "decay of the advantages' trace: lambda", at_least=0, at_most=1)
    clip: float = option(0.2, "how far the ratio of policies counts beyond 1", above=0)
    epochs: int = option(4, "passes over a batch of rollouts", at_least=1)
    minibatches: int = option(4, "optimizer steps of a pass", at_least=1)
    normalize: bool = option(False, "whether advantages get mean 0 and deviation 1 in each batch of rollouts")

    @property
    def updates(self) -> int:
        return self.epochs * self.minibatches

    def check(self, *, length: int, workers: int) -> None:
        if length % self.minibatches:
            raise UserError(
                f"minibatches is {self.minibatches}; it must divide the {length} rows of a rollout, so that all "
                "minibatches are of one size"
            )
        if self.normalize and workers > 1:
            raise UserError(
                f"normalize is true with {workers} workers, each of which would use a mean of its own; leave it out, "
                "or train with one worker"
            )

    @torch.no_grad()
    def prepare(self, policy: nn.Module, rollouts: Rollouts) -> PreparedRows:
        judged = _judge(policy, rollouts.observations, rollouts.actions, rollouts.rewards.dtype)
        rewards, discounts = transitions(rollouts, self.discount)
        advantages = gae(rewards, discounts, self.trace, judged.values, judged.bootstrap)
        targets = advantages + judged.values
        if self.normalize:
            known = advantages[rollouts.valid]
            advantages = (advantages - known.mean()) / (known.std(correction=0) + 1e-8)
        observations = rollouts.observations[:, :-1]
        return PreparedRows(
            observations, rollouts.actions, rollouts.valid, rollouts.log_probs, advantages, targets
        )

    def part(self, batch: PreparedRows, update: int, seed_of_batch: int) -> PreparedRows:
        epoch, number = divmod(update, self.minibatches)
        length = batch.actions.shape[1]
        size = length // self.minibatches
        order = torch.from_numpy(permutation(length, seed_of_batch, epoch))
        rows = order[number * size : (number + 1) * size].to(batch.actions.device)
        return PreparedRows(*(one.index_select(1, rows) for one in batch))

    def loss(self, policy: nn.Module, batch: PreparedRows) -> Tensor:
        judged = _judge(policy, batch.observations, batch.actions, batch.targets.dtype)
        ratios = (judged.log_probs - batch.log_probs).exp()
        clipped = ratios.clamp(1 - self.clip, 1 + self.clip)
        policy_losses = -torch.minimum(batch.advantages * ratios, batch.advantages * clipped)
        return self._total(policy_losses, judged.entropies, batch.targets - judged.values, batch.valid)


ALGORITHMS: dict[str, type[PolicyGradient]] = {"a2c": A2C, "impala": Impala, "ppo": PPO}
"""The algorithms by their names on a command line."""


class _Judged(NamedTuple):
    """What a policy says about rows, (B, T) each: of the action there, and of the observation."""

    log_probs: Tensor
    entropies: Tensor
    values: Tensor
    bootstrap: Tensor  # (B,), the value of the observation after the last row, where there is one


def _judge(policy: nn.Module, observations: Tensor, actions: Tensor, precision: torch.dtype) -> _Judged:
    """`observations` may be one more than `actions`; all are seen by the policy at once."""
    rollouts, count = observations.shape[:2]
    rows = actions.shape[1]
    scores, values = policy(observations.flatten(0, 1))
    values = values.to(precision).unflatten(0, (rollouts, count))
    every_log_prob = scores.to(precision).unflatten(0, (rollouts, count))[:, :rows].log_softmax(2)
    log_probs = every_log_prob.gather(2, actions.unsqueeze(2)).squeeze(2)
    lowest = torch.finfo(
        precision
    ).min  # in place of minus infinity, of an action that cannot be chosen: 0 · it is 0
    entropies = -(every_log_prob.exp() * every_log_prob.clamp(min=lowest)).sum(2)
    return _Judged(log_probs, entropies, values[:, :rows], values[:, -1].detach())
