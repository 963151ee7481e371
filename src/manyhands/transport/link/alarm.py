"""A bell that one thread rings and that ends the waits of another."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Alarm"]


class Alarm:
    """Says who was lost, once somebody who watches over the peers has found out; the first to be told stays.

    `mark` gets the number of each collective that is entered, for those who watch from elsewhere.
    """

    def __init__(self, mark: Callable[[int], None] = lambda _call: None) -> None:
        self.mark = mark
        self._rung = threading.Event()
        self._lost: tuple[int, str] | None = None
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def on_ring(self, act: Callable[[], None]) -> None:
        """Call `act` in the thread that rings, at once if it has rung: for waits that cannot look up by themselves."""
        with self._lock:
            if self._lost is None:
                self._listeners.append(act)
                return
        act()

    def ring(self, rank: int, sentence: str) -> None:
        """Rank `rank` is lost, for this reason."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = rank, sentence
            listeners, self._listeners = self._listeners, []
        self._rung.set()
        for act in listeners:
            act()

    def lost(self, wait_s: float = 0.0) -> tuple[int, str] | None:
        """The rank that was lost and why, waiting up to `wait_s` for that; None if nobody was."""
        if wait_s > 0:
            self._rung.wait(wait_s)
        return self._lost
