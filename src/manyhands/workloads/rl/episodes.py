"""Episodes: what each environment has earned since it began, counted without knowing the environment."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

__all__ = ["Episode", "EpisodeRecorder"]


class Episode(NamedTuple):
    """An episode that ended."""

    environment: int
    number: int  # the environment's first episode is 0
    steps: int
    total: float  # the sum of its rewards: the return without discount
    how_ended: Literal["terminated", "truncated"]


class EpisodeRecorder:
    """Counts the steps and rewards of `count` environments side by side."""

    def __init__(self, count: int) -> None:
        self.numbers = np.zeros(count, np.int64)
        self.steps = np.zeros(count, np.int64)
        self.totals = np.zeros(count)

    def step(
        self,
        rewards: np.ndarray[Any, Any],
        terminated: np.ndarray[Any, Any],
        truncated: np.ndarray[Any, Any],
        valid: np.ndarray[Any, Any],
    ) -> list[Episode]:
        """The episodes that ended with this step; rows that are not valid are no steps."""
        self.steps += valid
        self.totals += rewards * valid
        ended = (terminated | truncated) & valid
        if not ended.any():
            return []
        indices = np.flatnonzero(ended)
        episodes = [
            Episode(
                index,
                int(self.numbers[index]),
                int(self.steps[index]),
                float(self.totals[index]),
                "terminated" if terminated[index] else "truncated",
            )
            for index in indices.tolist()
        ]
        self.numbers[indices] += 1
        self.steps[indices] = 0
        self.totals[indices] = 0
        return episodes
