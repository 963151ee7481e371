"""Orders the rows of a run's history by step, whichever worker reports them first. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

__all__ = ["RowsInOrder"]


class RowsInOrder:
    """Releases rows of the history in step order; an evaluation comes after the steps that it has seen."""

    def __init__(self, steps_done: int = 0) -> None:
        self._given = steps_done
        self._waiting: list[tuple[int, int, int, dict[str, Any]]] = []
        self._count = 0

    def add(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add rows of any worker; returns those that are complete up to their step."""
        for row in rows:
            self._count += 1
            heapq.heappush(self._waiting, (row["step"], "metrics" in row, self._count, row))
        ready = []
        while self._waiting:
            step, is_evaluation, _, _ = self._waiting[0]
            if step > self._given + (not is_evaluation):
                break
            ready.append(heapq.heappop(self._waiting)[-1])
            self._given = max(self._given, step)
        return ready

    def rest(self) -> list[dict[str, Any]]:
        """The rows that still wait for steps that never came, as after a failure."""
        return [heapq.heappop(self._waiting)[-1] for _ in range(len(self._waiting))]
