"""A thread that does work in the order given, while its worker computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from manyhands.strategies.common.collectives.side_thread import SideThread

__all__ = ["Background"]


class Background(SideThread):
    """One worker's background thread, started with the first work. `close` is idempotent.

    An error in the thread is raised by `wait`; work that was given after it is not done.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._waiting: deque[Callable[[], None]] = deque()
        self._given = 0
        self._done = 0

    @property
    def is_idle(self) -> bool:
        """Whether no work is running or queued."""
        with self._changed:
            return self._is_idle()

    def give(self, work: Callable[[], None]) -> int:
        """Queue work after what was given before; return its number, for `wait`, at once."""
        with self._changed:
            self._given += 1
            if self._error is None and not self._ends:
                self._waiting.append(work)
                self._start()
                self._changed.notify_all()
            return self._given

    def wait(self, number: int) -> None:
        """Wait until work `number` is done, or raise an earlier error; each piece of work has its own deadlines."""
        with self._changed:
            while self._done < number:
                self._wait()

    def close(self, release: Callable[[], None]) -> None:
        """Stop the thread; `release` ends whatever its work waits for."""
        with self._changed:
            self._waiting.clear()
        self._end(release)

    def _is_idle(self) -> bool:
        return self._done == self._given

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._waiting and not self._ends:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting and not self._ends else None
