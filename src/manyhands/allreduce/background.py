"""A thread that does work in the order given, while its worker computes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Background"]

_LOOK_S = 1.0  # how often who waits sees whether the thread is still there
_END_S = 10.0  # a thread that has not ended by then ends with the process


class Background:
    """One worker's; the thread begins with the first work. `close` is idempotent.

    What goes wrong in the thread is raised by `wait`; work that was given after it is not done.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._given = 0
        self._done = 0
        self._error: BaseException | None = None
        self._ends = False
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being done, or still to be done."""
        with self._changed:
            return self._done == self._given

    def give(self, work: Callable[[], None]) -> int:
        """Have this done after what was given before it; its number, for `wait`. Returns at once."""
        with self._changed:
            self._given += 1
            if self._error is None and not self._ends:
                self._waiting.append(work)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify_all()
            return self._given

    def wait(self, number: int) -> None:
        """Until work `number` is done, or raise what went wrong before it was; each has deadlines of its own."""
        with self._changed:
            while self._done < number and self._error is None:
                if self._thread is None or not self._thread.is_alive():
                    raise RuntimeError(f"the thread {self._name!r} has ended, and this worker waits for it")
                self._changed.wait(_LOOK_S)
            if self._done < number and self._error is not None:
                raise self._error

    def close(self, release: Callable[[], None]) -> None:
        """End the thread; `release` ends whatever its work waits for."""
        with self._changed:
            self._ends = True
            self._waiting.clear()
            self._changed.notify_all()
        release()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._waiting and not self._ends:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None
