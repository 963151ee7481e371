"""Calls of one process group, in order: at once in the caller's thread, or in a thread of the group.

A call that its caller waits for runs in the caller's thread when nothing else is under way, which saves two thread
switches. Any other call is queued for a thread of the group, so that a gradient hook returns at once.

A thread that completes a work runs the callbacks of its future, and a callback may make calls of the same group and
wait for them, as PowerSGD's hook does. So the lock is released before the callbacks, and where no thread is idle
another is started.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

from manyhands.errors import UserError

_AT_ONCE: Final = timedelta(0)  # torch's way to say that a wait has no deadline of its own


class FinishedWork(c10d.Work):
    """A call that has succeeded."""

    def __init__(self, result: Sequence[Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = _AT_ONCE) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Tensor]:
        return list(self._result)

    def synchronize(self) -> None:
        """Return at once: there is nothing to do on the CPU."""

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future


class PendingWork(FinishedWork):
    """A call under way; completed once, by the thread that runs it."""

    def __init__(self, result: Sequence[Tensor]) -> None:
        super().__init__(result)
        self._complete = threading.Event()
        self._error: BaseException | None = None
        self._future: Future[Any] = Future()

    def complete(self, error: BaseException | None) -> None:
        self._error = error
        self._complete.set()
        if error is None:
            self._future.set_result(self._result)
        else:  # a future takes nothing but an Exception
            self._future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def wait(self, timeout: timedelta = _AT_ONCE) -> bool:
        """Wait for the end, and raise what the call raised; TimeoutError after `timeout`, unless that is zero."""
        seconds = timeout.total_seconds()
        if not self._complete.wait(seconds if timeout > _AT_ONCE else None):
            raise TimeoutError(f"timed out: the call is not complete after the timeout of {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._complete.is_set()

    def is_success(self) -> bool:
        return self._complete.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        return self._future


class Conductor:
    """Runs jobs in order, one at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = threading.Lock()  # held by the thread that runs a job
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], None], PendingWork]] = deque()
        self._idle = 0  # threads that will poll the queue again before anything else
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def perform(self, job: Callable[[], None], result: Sequence[Tensor], *, background: bool) -> c10d.Work:
        """Run `job`, which fills `result`: in the background, or now; it then raises what the job raises."""
        if not background and not self._queue and self._running.acquire(blocking=False):
            try:
                self._check_open()
                job()
            finally:
                self._running.release()
            return FinishedWork(result)
        work = PendingWork(result)
        with self._changed:
            self._check_open()
            self._queue.append((job, work))
            if self._idle:
                self._changed.notify()
            else:
                thread = threading.Thread(target=self._serve, name=f"manyhands {self._name}", daemon=True)
                self._threads.add(thread)
                self._idle += 1
                thread.start()
        if not background:
            work.wait()
        return work

    def close(self, interrupt: Callable[[], None], patience_s: float) -> None:
        """Let the jobs under way end, or `interrupt` them after `patience_s`; idempotent."""
        deadline = time.monotonic() + patience_s
        with self._changed:
            drained = self._changed.wait_for(lambda: not self._queue, patience_s)
        mine = drained and self._running.acquire(timeout=max(deadline - time.monotonic(), 0))
        if not mine:
            interrupt()
        with self._changed:
            self._closed = True
            dropped, self._queue = self._queue, deque()
            threads = self._threads - {threading.current_thread()}
            self._changed.notify_all()
        for _, work in dropped:
            work.complete(UserError(f"{self._name}: closed before this call began"))
        if not mine:
            self._running.acquire()  # what was interrupted ends soon
        self._running.release()
        for thread in threads:
            thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise UserError(f"{self._name} is closed")

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queue)
                if self._closed:
                    self._threads.discard(threading.current_thread())
                    return
            error: BaseException | None = None
            with self._running:
                with self._changed:
                    if not self._queue:  # another thread took the job
                        continue
                    job, work = self._queue.popleft()
                    self._idle -= 1
                    self._changed.notify_all()
                try:
                    job()
                except BaseException as raised:
                    error = raised
            work.complete(error)
            with self._changed:
                self._idle += 1
