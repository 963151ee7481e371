"""Episodes: what each environment has earned since it began, counted without knowing the environment."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from manyhands.native.decorators import njit

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
        if not _count(self.steps, self.totals, rewards, terminated, truncated, valid):
            return []
        indices = np.flatnonzero((terminated | truncated) & valid)
        columns = (
            indices,
            self.numbers[indices],
            self.steps[indices],
            self.totals[indices],
            terminated[indices],
        )
        episodes = [
            Episode(index, number, steps, total, "terminated" if ended else "truncated")
            for index, number, steps, total, ended in zip(*(one.tolist() for one in columns), strict=True)
        ]
        self.numbers[indices] += 1
        self.steps[indices] = 0
        self.totals[indices] = 0
        return episodes


@njit(cache=True, nogil=True)
def _count(steps: Any, totals: Any, rewards: Any, terminated: Any, truncated: Any, valid: Any) -> int:
    """Add a step to each; how many episodes ended. numpy's own sums of few numbers cost several times as much."""
    ended = 0
    for index in range(len(steps)):
        if valid[index]:
            steps[index] += 1
            totals[index] += rewards[index]
            ended += terminated[index] or truncated[index]
    return ended
