"""An alarm that one thread raises to end the waits of another."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Alarm"]


class Alarm:
    """Reports the lost rank, once a liveness monitor has found one; the first report stays.

    `mark` gets the number of each collective that is entered, for monitors in other threads.
    """

    def __init__(self, mark: Callable[[int], None] = lambda _call: None) -> None:
        self.mark = mark
        self._rung = threading.Event()
        self._lost: tuple[int, str] | None = None
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def on_ring(self, act: Callable[[], None]) -> None:
        """Call `act` in the thread that raises the alarm, at once if it was raised: for waits that cannot poll."""
        with self._lock:
            if self._lost is None:
                self._listeners.append(act)
                return
        act()

    def ring(self, rank: int, sentence: str) -> None:
        """Raise the alarm: rank `rank` is lost, for this reason."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = rank, sentence
            listeners, self._listeners = self._listeners, []
        self._rung.set()
        for act in listeners:
            act()

    def lost(self, wait_s: float = 0.0) -> tuple[int, str] | None:
        """The lost rank and the reason, waiting up to `wait_s` for it; None if no rank was lost."""
        if wait_s > 0:
            self._rung.wait(wait_s)
        return self._lost
