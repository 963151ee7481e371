"""Rollouts: what acting gives and learning takes, in tensors of a fixed layout.

Row t is the transition out of observation t: `terminated[t]` says that this transition ended its episode. So T rows
have T + 1 observations, and the last one is where the value is bootstrapped.

    observation   0     1     2     3     4          episode ends in row 1; the environment begins anew by itself
    row              0     1     2     3             so observation 2 is the first of the next episode
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RolloutSpec", "Rollouts"]

_OF_IMAGES = 3  # dimensions


class Rollouts(NamedTuple):
    """B rollouts of T rows each; all but the observations are (B, T)."""

    observations: Tensor  # (B, T + 1, …)
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor  # cut by a time limit, which is not the end of what could be earned
    valid: Tensor  # False where an environment only began anew: no transition, nothing to learn from
    log_probs: Tensor  # of the action, under the policy that chose it
    final_values: (
        Tensor  # of an episode's last observation where it was truncated, by the policy that acted; else 0
    )
    versions: Tensor  # of the weights that chose the action: how many updates they had seen

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated

    def part(self, begin: int, end: int) -> Rollouts:
        return Rollouts(*(one[begin:end] for one in self))


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSpec:
    """The shapes and types of rollouts."""

    length: int  # T
    observation_shape: tuple[int, ...]
    observation_dtype: torch.dtype
    precision: torch.dtype = torch.float32  # of rewards, log-probabilities and values

    @property
    def threads(self) -> int:
        """That compute with such observations: layers of few numbers are over before several threads have met."""
        return torch.get_num_threads() if len(self.observation_shape) == _OF_IMAGES else 1

    def fields(self, count: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and type of each field of `count` rollouts, in the order of `Rollouts`."""
        rows = (count, self.length)
        return {
            "observations": ((count, self.length + 1, *self.observation_shape), self.observation_dtype),
            "actions": (rows, torch.int64),
            "rewards": (rows, self.precision),
            "terminated": (rows, torch.bool),
            "truncated": (rows, torch.bool),
            "valid": (rows, torch.bool),
            "log_probs": (rows, self.precision),
            "final_values": (rows, self.precision),
            "versions": (rows, torch.int64),
        }

    def empty(self, count: int) -> Rollouts:
        return Rollouts(*(torch.zeros(shape, dtype=dtype) for shape, dtype in self.fields(count).values()))
