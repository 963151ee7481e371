"""A thread beside its worker's: its errors are raised in the waiting thread, and no wait outlasts it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

__all__ = ["SideThread"]

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
    def _run(self) -> None:
        """The thread's main loop, until `_ends`; its error is raised in `_wait`."""

    @abstractmethod
    def _is_idle(self) -> bool:
        """With the lock held: whether the thread waits for its worker only."""

    def _start(self) -> None:
        """Start the thread unless it was started."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._guarded, name=self._name, daemon=True)
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
        if idle:
            self._join()
        release()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(_END_S)

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
