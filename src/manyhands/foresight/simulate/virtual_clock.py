"""Virtual clock: a queue of scheduled calls; calls at the same time run in the order of scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Agenda"]


class Agenda:
    """A virtual clock with scheduled calls; nothing sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_done = 0
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...], bool]] = []
        self._number = 0
        self._num_in_earnest = 0

    def at(self, at_s: float, what: Callable[..., None], *arguments: Any, idly: bool = False) -> None:
        """Schedule `what(*arguments)`; an `idly` scheduled call runs only while other calls are scheduled."""
        self._number += 1
        self._num_in_earnest += not idly
        at_s = at_s if at_s > self.now_s else self.now_s
        heapq.heappush(self._planned, (at_s, self._number, what, arguments, idly))

    def next(self) -> bool:
        """Advance to the next scheduled call and run it; False if there is none."""
        if not self._num_in_earnest:
            return False
        self.now_s, _, what, arguments, idly = heapq.heappop(self._planned)
        self._num_in_earnest -= not idly
        self.num_done += 1
        what(*arguments)
        return True
