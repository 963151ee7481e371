"""Compiled kernels of reinforcement learning: sums along rollouts, and actions drawn from scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.native.decorators import njit

__all__ = ["draw_actions", "sum_backwards", "warm"]


def warm() -> None:
    for kind in (np.float32, np.float64):
        rows = np.zeros((1, 1), kind)
        sum_backwards(rows, rows)
        draw_actions(rows, np.zeros(1), np.zeros(1, np.int64), np.zeros(1, kind))


@njit(cache=True, nogil=True)
def sum_backwards(terms: Any, factors: Any) -> None:
    """In place, from the last column on: each term gets its factor times the sum of the column after it."""
    rows, columns = terms.shape
    for row in range(rows):
        for column in range(columns - 2, -1, -1):
            terms[row, column] += factors[row, column] * terms[row, column + 1]


@njit(cache=True, nogil=True)
def draw_actions(scores: Any, uniforms: Any, actions: Any, log_probs: Any) -> None:
    """Of each row of scores the first action at which the sum of probabilities exceeds the uniform number."""
    rows, count = scores.shape
    for row in range(rows):
        highest = np.float64(scores[row, 0])
        for action in range(1, count):
            highest = max(highest, np.float64(scores[row, action]))
        total = 0.0
        for action in range(count):
            total += np.exp(scores[row, action] - highest)
        bound, sum_before, drawn = uniforms[row] * total, 0.0, 0
        for action in range(count):
            weight = np.exp(scores[row, action] - highest)
            if weight > 0:
                drawn = action  # the last possible one, where rounding leaves the sum below the bound
            sum_before += weight
            if sum_before > bound:
                break
        actions[row] = drawn
        log_probs[row] = scores[row, drawn] - highest - np.log(total)
