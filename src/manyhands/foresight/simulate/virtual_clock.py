"""Virtual time: what is to happen, in order; two things at one moment happen in the order of their planning."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Agenda"]


class Agenda:
    """A clock, and what is planned for later; nothing sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_done = 0
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...], bool]] = []
        self._number = 0
        self._num_in_earnest = 0

    def at(self, at_s: float, what: Callable[..., None], *arguments: Any, idly: bool = False) -> None:
        """Plan `what(*arguments)`; what is planned `idly` happens as long as something else is planned too."""
        self._number += 1
        self._num_in_earnest += not idly
        at_s = at_s if at_s > self.now_s else self.now_s
        heapq.heappush(self._planned, (at_s, self._number, what, arguments, idly))

    def next(self) -> bool:
        """Let time pass until the next thing that is planned, and do it; False if nothing is."""
        if not self._num_in_earnest:
            return False
        self.now_s, _, what, arguments, idly = heapq.heappop(self._planned)
        self._num_in_earnest -= not idly
        self.num_done += 1
        what(*arguments)
        return True
