"""Detects dead processes of one host through the kernel: connected sockets that carry almost no traffic.

Each of two processes holds one end of a connected socket. A process that leaves in good order says so first; one
that is killed says nothing, and the kernel closes its end. A single thread of the process waits for all of them,
asleep until something happens.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Final

FAREWELL: Final = b"farewell"
OnEnd = Callable[[bool], None]
"""Called once, in the watching thread, when the peer is gone; True if it said farewell."""


class _Watcher:
    """The process's lifelines and the thread that waits for them, which runs while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[socket.socket, OnEnd] = {}
        self._thread: threading.Thread | None = None
        self._wakeup: tuple[socket.socket, socket.socket] | None = None

    def watch(self, lifeline: socket.socket, on_end: OnEnd) -> None:
        with self._lock:
            self._watched[lifeline] = on_end
            if self._wakeup is None:
                if self._thread is not None:
                    self._thread.join()  # it needs the lock no more
                self._wakeup = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                self._thread = threading.Thread(
                    target=self._run, args=(self._wakeup[1],), name="manyhands lifelines", daemon=True
                )
                self._thread.start()
            self._ring()

    def forget(self, lifeline: socket.socket) -> None:
        with self._lock:
            self._watched.pop(lifeline, None)
            # It goes on for the others, or ends now; where the peer was the first to leave, it may be about to.
            thread = None if self._watched else self._thread
            self._ring()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _ring(self) -> None:
        if self._wakeup is not None:
            self._wakeup[0].send(b"!")

    def _run(self, wakeup: socket.socket) -> None:
        while True:
            with selectors.DefaultSelector() as selector:
                with self._lock:  # whoever forgets a lifeline closes it next
                    if not self._watched:
                        self._end()
                        return
                    for watched in (wakeup, *self._watched):
                        selector.register(watched, selectors.EVENT_READ)
                ready = [key.fileobj for key, _ in selector.select()]
            if wakeup in ready:
                wakeup.recv(64)
                continue  # what is watched has changed, and a forgotten lifeline must not be read
            for lifeline in ready:
                assert isinstance(lifeline, socket.socket)
                self._read(lifeline)

    def _read(self, lifeline: socket.socket) -> None:
        with self._lock:
            if lifeline not in self._watched:
                return
            try:
                said = lifeline.recv(64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                said = b""
            on_end = self._watched.pop(lifeline)
        on_end(said == FAREWELL)

    def _end(self) -> None:
        assert self._wakeup is not None
        for end in self._wakeup:
            end.close()
        self._wakeup = None

    def let_go(self) -> None:
        """Close this process's copies, without the lock: another thread may hold it that a child does not have."""
        for end in (*self._watched, *(self._wakeup or ())):
            end.close()


_watcher = _Watcher()


def _start_afresh() -> None:
    """A forked child has no such thread, and the lifelines it holds would hide its parent's death."""
    global _watcher
    parents, _watcher = _watcher, _Watcher()
    parents.let_go()


os.register_at_fork(after_in_child=_start_afresh)


def watch(lifeline: socket.socket, on_end: OnEnd) -> None:
    """From now on, `on_end` is called when the process at the other end is gone; the socket stays the caller's."""
    _watcher.watch(lifeline, on_end)


def forget(lifeline: socket.socket) -> None:
    """Watch no longer; idempotent. Close the socket only after this."""
    _watcher.forget(lifeline)
