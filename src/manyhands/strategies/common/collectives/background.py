"""A thread beside its worker's: its errors are raised in the waiting thread, and no wait outlasts it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

__all__ = ["Background", "SideThread"]

_LOOK_S = 1.0  # how often who waits sees whether the thread is still there
_END_S = 10.0  # a thread that has not ended by then ends with the process


class SideThread(ABC):
    """One worker's side thread; shared fields are read and changed under `_changed`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._ends = False
        self._thread: threading.Thread | None = None

    @abstractmethod
    def _run(self) -> None: ...  # the thread's main loop, until `_ends`; its error is raised in `_wait`
    @abstractmethod
    def _is_idle(self) -> bool: ...  # with the lock held: whether the thread waits for its worker only

    def _start(self) -> None:
        def guarded() -> None:
            try:
                self._run()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()

        if self._thread is None:
            self._thread = threading.Thread(target=guarded, name=self._name, daemon=True)
            self._thread.start()

    def _wait(self) -> None:
        """In the worker's thread, with the lock held: wait for a possible change, or raise the thread's error."""
        if self._error is not None:
            raise self._error
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError(f"the thread {self._name!r} has ended, and this worker waits for it")
        self._changed.wait(_LOOK_S)

    def _end(self, release: Callable[[], None]) -> None:
        """Stop the thread; `release` ends whatever it waits for. Idempotent if `release` is."""
        with self._changed:
            self._ends = True
            idle = self._is_idle()
            self._changed.notify_all()
        if idle and self._thread is not None:
            self._thread.join(_END_S)
        release()
        if self._thread is not None:
            self._thread.join(_END_S)


class Background(SideThread):
    """A thread that does work in the order given, while its worker computes; started with the first work.

    An error in the thread is raised by `wait`; work that was given after it is not done. `close` is idempotent.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._waiting: deque[Callable[[], None]] = deque()
        self._given = self._done = 0

    @property
    def is_idle(self) -> bool:
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
        with self._changed:
            self._waiting.clear()
        self._end(release)

    def _is_idle(self) -> bool:
        return self._done == self._given

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ends:
                    self._changed.wait()
                if self._ends:
                    return
                work = self._waiting.popleft()
            work()
            with self._changed:
                self._done += 1
                self._changed.notify_all()
