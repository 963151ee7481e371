"""The order in which gradients leave a host: one worker after another, and of each one shard after another.

    worker 0   │ push 0 │ push 1 │ push 2 │ push 3 │
    worker 1                                       │ push 1 │ push 2 │ …
    servers             │ values 0 │ values 1 │ …                           on their way back meanwhile

What leaves together arrives together: workers that push at the same time wait for each other's gradients, and then for
each other's parameters, and the cable is idle in the other direction. In this order both directions are busy.

Nothing depends on it but time: a worker that has waited too long for the others pushes beside them.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable

from manyhands.strategies.ps.ps_messages import Push
from manyhands.transport.hub.hub import Hub
from manyhands.transport.liveness import forget_in_children

_BACKLOG = 128


class HostGate:
    """Lets one process of a host pass at a time, of those that give the same name: who listens at it has passed.

    The kernel opens the gate when that process ends. Others wait connected to it.
    """

    def __init__(self, name: str) -> None:
        self._address = f"\0{name}"
        self._passed: socket.socket | None = None
        self._waiting: socket.socket | None = None
        forget_in_children(self)

    def enter(self) -> bool:
        """Pass, if nobody else has or this process has already."""
        if self._passed is None:
            end = socket.socket(socket.AF_UNIX)
            try:
                end.bind(self._address)
                end.listen(_BACKLOG)
            except OSError:
                end.close()
            else:
                self._passed = end
        return self._passed is not None

    def leave(self) -> None:
        if self._passed is not None:
            self._passed.close()
            self._passed = None

    def wait(self) -> int:
        """A descriptor that is readable once who has passed leaves; -1 if that is so already."""
        self.stop_waiting()
        end = socket.socket(socket.AF_UNIX)
        end.setblocking(False)
        try:
            end.connect(self._address)
        except OSError:
            end.close()
            return -1
        self._waiting = end
        return end.fileno()

    def stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None

    def let_go_in_child(self) -> None:
        self.leave()
        self.stop_waiting()


class PushOrder:
    """Sends one worker's pushes by `send`, each once the one before has left; `go_on` after every poll of `hub`.

    A push waits for those of other workers as long as all `workers` would need, by the time that the last took.
    """

    def __init__(self, hub: Hub, send: Callable[[int, Push], None], gate: HostGate, workers: int) -> None:
        self._hub, self._send, self._gate, self._workers = hub, send, gate, workers
        self._waiting: deque[tuple[int, Push]] = deque()
        self._leaving: int | None = None  # the member to which a push leaves
        self._begun_s: float | None = None  # since when pushes leave
        self._asked_s: float | None = None  # since when the gate is waited for
        self._descriptor = -1
        self._took_s = 0.0
        self._is_patient = True  # until the wait for another worker was in vain

    def add(self, to: int, push: Push) -> None:
        self._waiting.append((to, push))
        self.go_on()

    def go_on(self) -> None:
        """Send what may leave now."""
        while self._leaving is None or self._hub.sent(self._leaving):
            self._leaving = None
            if not self._waiting:
                if self._begun_s is not None:
                    self._took_s, self._begun_s = time.monotonic() - self._begun_s, None
                    self._gate.leave()
                return
            if self._begun_s is None and not self._may_begin():
                return
            self._leaving, push = self._waiting.popleft()
            self._send(self._leaving, push)

    def close(self) -> None:
        self._waiting.clear()
        self._stop_waiting()
        self._gate.leave()

    def _may_begin(self) -> bool:
        now_s = time.monotonic()
        self._asked_s = self._asked_s or now_s
        self._stop_waiting()
        passed = self._gate.enter()
        if not passed and self._is_patient and now_s - self._asked_s < self._workers * self._took_s:
            self._descriptor = self._gate.wait()
            if self._descriptor >= 0:
                self._hub.register(self._descriptor)
            return False
        self._is_patient, self._asked_s, self._begun_s = passed, None, now_s
        return True

    def _stop_waiting(self) -> None:
        if self._descriptor >= 0:
            self._hub.unregister(self._descriptor)
            self._descriptor = -1
        self._gate.stop_waiting()
