"""Returns and advantages of rollouts: n-step returns (A3C: Mnih et al., 2016), GAE (Schulman et al., 2016) and V-trace
(IMPALA: Espeholt et al., 2018).

All take tensors (B, T) of one type and device, and `bootstrap` (B,), the value of the observation after the last row.
`discounts` are 0 where an episode ended in the row: what comes after it does not count. Nothing has a gradient.

Each of them is one recursion from the last row to the first, s[t] = terms[t] + factors[t] · s[t + 1]: compiled on the
CPU; on other devices log2 T rounds, each of which doubles the number of rows that are summed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.workloads.rl.rl_kernels import sum_backwards
from manyhands.workloads.rl.rollouts import Rollouts

__all__ = ["VTrace", "gae", "n_step", "transitions", "v_trace"]


class VTrace(NamedTuple):
    """What V-trace gives, of shape (B, T)."""

    targets: Tensor  # of the values: v_s of the paper
    advantages: Tensor  # times the truncated ratio: the weight of the gradient of log π


def transitions(rollouts: Rollouts, discount: float) -> tuple[Tensor, Tensor]:
    """The rewards and discounts of rollouts, which say all about the ends of their episodes.

    Where a time limit cut an episode, its reward contains what the last observation is still worth. A row that is no
    transition has neither reward nor discount; it comes right after an ended one, so nothing flows through it.
    """
    cut = rollouts.truncated & ~rollouts.terminated
    worth = torch.where(cut, discount * rollouts.final_values, 0.0)
    rewards = torch.where(rollouts.valid, rollouts.rewards + worth, 0.0)
    return rewards, discount * (rollouts.valid & ~rollouts.ended).to(rewards.dtype)


@torch.no_grad()
def v_trace(
    log_ratios: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    *,
    rho: float = 1.0,
    c: float = 1.0,
    rho_policy: float = 1.0,
    trace: float = 1.0,
) -> VTrace:
    """V-trace of actions chosen by another policy; `log_ratios` are log π(a) − log μ(a), where μ chose.

    The ratio is cut at `rho` in the temporal differences, which decides what the values converge to, at `c` in the
    trace, which decides how fast, and at `rho_policy` in the advantages.
    """
    ratios = log_ratios.exp()
    deltas = ratios.clamp(max=rho) * (rewards + discounts * _next(values, bootstrap) - values)
    targets = values + _summed_backwards(deltas, discounts * ratios.clamp(max=c) * trace)
    advantages = rewards + discounts * _next(targets, bootstrap) - values
    return VTrace(targets, ratios.clamp(max=rho_policy) * advantages)


@torch.no_grad()
def gae(
    rewards: Tensor, discounts: Tensor, traces: Tensor | float, values: Tensor, bootstrap: Tensor
) -> Tensor:
    """Generalized advantage estimates; `traces` are λ."""
    return _summed_backwards(rewards + discounts * _next(values, bootstrap) - values, discounts * traces)


@torch.no_grad()
def n_step(rewards: Tensor, discounts: Tensor, bootstrap: Tensor) -> Tensor:
    """The discounted rewards up to the end of the rollout, and the value there: n is the number of rows left."""
    last = rewards[:, -1:] + discounts[:, -1:] * bootstrap.unsqueeze(1)
    return _summed_backwards(torch.cat([rewards[:, :-1], last], 1), discounts)


def _next(values: Tensor, bootstrap: Tensor) -> Tensor:
    return torch.cat([values[:, 1:], bootstrap.unsqueeze(1)], 1)


def _summed_backwards(terms: Tensor, factors: Tensor) -> Tensor:
    """s[:, t] = terms[:, t] + factors[:, t] · s[:, t + 1], into `terms` where that is on the CPU."""
    if terms.device.type == "cpu":
        terms = terms.contiguous()
        sum_backwards(terms.numpy(), factors.contiguous().numpy())
        return terms
    return _summed_by_doubling(terms, factors)


def _summed_by_doubling(terms: Tensor, factors: Tensor) -> Tensor:
    """After a round with `rows`, each sum is over 2 · rows rows, and its factor is of the row after them."""
    rows, length = 1, terms.shape[1]
    while rows < length:
        terms = torch.cat([terms[:, :-rows] + factors[:, :-rows] * terms[:, rows:], terms[:, -rows:]], 1)
        factors = torch.cat([factors[:, :-rows] * factors[:, rows:], torch.zeros_like(factors[:, -rows:])], 1)
        rows *= 2
    return terms
