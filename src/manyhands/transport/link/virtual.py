"""Virtual time for roles that run in threads of one process: one clock per role, and no real sleep.

A waiting role declares its deadline. Virtual time passes only when every running role waits: then the role with the
earliest deadline (ties go by name) is told that it has passed. Any other role wakes up later in virtual time and
can send nothing into that one's past, so what a role sees does not depend on thread scheduling.

The order in which threads run is therefore free to choose: a role that is woken continues once the one that woke it
waits, so that threads run in order instead of competing for the GIL at every message. A role that waits for
something other than a link delays the others for `_PATIENCE_S` of real time, not longer.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from manyhands.errors import ManyhandsError, UserError

__all__ = ["RoleClock", "VirtualTime"]

T = TypeVar("T")

_PATIENCE_S: Final = 0.05


class RoleKilled(ManyhandsError):
    """Raised inside a role that was killed on purpose, so that nothing of its code runs on."""


@dataclass(slots=True)
class RoleClock:
    """What the clock of `role` shows, and when that role dies: infinity for one that was not killed.

    Put forward by its own role alone.
    """

    role: str
    now_s: float = 0.0
    dies_s: float = math.inf

    def move(self, to_s: float) -> None:
        """Put it forward; RoleKilled if its role does not live to see that."""
        self.now_s = max(self.now_s, min(to_s, self.dies_s))
        if self.now_s >= self.dies_s:
            raise RoleKilled(f"{self.role} was killed at {self.dies_s:g} s of virtual time")


class VirtualTime:
    """The clocks of all roles, who waits for what, and who dies when.

    `changed` guards everything, also in the code that uses this class; methods that say so want it held. A clock is
    read without it: a number is whole.
    `stall_s` is the one real time here: how long to wait for a role that neither waits nor ends.
    """

    def __init__(self, stall_s: float) -> None:
        self.changed = threading.RLock()
        self._wakeups: dict[str, threading.Lock] = {}  # let go to ring it, taken to hear it
        self._stall_s = stall_s
        self._clocks: dict[str, RoleClock] = {}
        self._running: set[str] = set()
        self._waiting: dict[str, float] = {}
        self._expired: set[str] = set()
        self._woken: deque[str] = deque()  # asleep, and not waiting any more: whose turn it is next
        self._awake = 0  # threads of roles that do not sleep

    def clock(self, role: str) -> RoleClock:
        clock = self._clocks.get(role)
        return clock if clock is not None else self._clocks.setdefault(role, RoleClock(role))

    def kill(self, role: str, at_s: float) -> None:
        with self.changed:
            clock = self.clock(role)
            clock.dies_s = min(at_s, clock.dies_s)
            self.wake_all()

    def wait(self, role: str, until_s: Callable[[], float], ready: Callable[[], bool]) -> bool:
        """Wait until `ready` (True), or until virtual time reaches `until_s` (False); `changed` is held, once.

        Neither moves the clock. The role that makes a waiting role ready must `wake` it.
        """
        if role in self._waiting:
            raise UserError(
                f"two threads act as {role!r} at once; a role of a simulated network is one thread"
            )
        if ready():
            return True
        try:
            while not ready():
                if role in self._expired:
                    return False
                self._waiting[role] = min(until_s(), self.clock(role).dies_s)
                self._expire_one(role)
                if role not in self._expired and not self._sleep(role):
                    raise ManyhandsError(
                        f"{role} waited {self._stall_s:g} s of real time for {sorted(self._busy())}, which "
                        "neither wait on a simulated link nor have ended"
                    )
            return True
        finally:
            self._waiting.pop(role, None)
            self._expired.discard(role)

    def wake(self, role: str) -> None:
        """`role` may be ready now: it counts as running until it waits again; `changed` is held."""
        if self._waiting.pop(role, None) is not None:
            self._woken.append(role)
            self._let_go_on()

    def wake_all(self) -> None:
        """Deadlines may have changed: everybody looks again before time passes; `changed` is held."""
        self._woken.extend(self._waiting)
        self._waiting.clear()
        self._let_go_on()

    def run(self, roles: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Run each function in a thread as that role; return what those that lived to the end returned.

        A role that raises dies at that moment, for its peers as in life; of several, the earliest error is
        raised.
        """
        results: dict[str, T] = {}
        errors: list[tuple[float, str, BaseException]] = []

        def act(role: str, function: Callable[[], T]) -> None:
            try:
                with self.changed:
                    self._await_turn(role)
                results[role] = function()
            except RoleKilled:
                pass
            except BaseException as error:
                died_s = self.clock(role).now_s
                errors.append((died_s, role, error))
                self.kill(role, died_s)
            finally:
                with self.changed:
                    self._running.discard(role)
                    self._awake -= 1
                    self._expire_one(role)
                    self._let_go_on()

        with self.changed:
            self._running |= set(roles)
            self._woken.extend(roles)
            self._let_go_on()
        threads = [
            threading.Thread(target=act, args=item, name=f"simulated {item[0]}", daemon=True)
            for item in roles.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise min(errors, key=lambda entry: entry[:2])[2]
        return results

    def _busy(self) -> set[str]:
        return self._running - self._waiting.keys()

    def _expire_one(self, awake: str) -> None:
        """If everybody waits, tell the role with the earliest deadline that it has passed; `awake` is not woken."""
        if self._waiting and not self._busy():
            role = min(self._waiting, key=lambda name: (self._waiting[name], name))
            del self._waiting[role]
            self._expired.add(role)
            if role != awake:
                self._woken.append(role)

    def _sleep(self, role: str) -> bool:
        """Let the next role continue, and sleep until `role` is woken; False if that takes more than `stall_s`."""
        self._awake -= role in self._running
        self._let_go_on()
        give_up_s = time.monotonic() + self._stall_s
        while role in self._waiting and time.monotonic() < give_up_s:
            self._hear(role)
        if role in self._waiting:
            self._awake += role in self._running
            return False
        self._await_turn(role, heard=True)
        return True

    def _await_turn(self, role: str, *, heard: bool = False) -> None:
        """Become runnable once no other role is, or once the patience is over."""
        if role in self._woken and not heard:
            self._hear(role)
        if role in self._woken:  # it was not woken to continue
            self._woken.remove(role)
            self._awake += role in self._running

    def _hear(self, role: str) -> None:
        """Wait briefly for this role's wake-up."""
        wakeup = self._wakeup(role)
        self.changed.release()
        wakeup.acquire(timeout=min(_PATIENCE_S, self._stall_s))
        self.changed.acquire()

    def _let_go_on(self) -> None:
        """If no role is running, let the next one in order continue."""
        if self._woken and not self._awake:
            role = self._woken.popleft()
            self._awake += role in self._running
            wakeup = self._wakeup(role)
            if wakeup.locked():
                wakeup.release()

    def _wakeup(self, role: str) -> threading.Lock:
        wakeup = self._wakeups.get(role)
        if wakeup is None:
            wakeup = self._wakeups[role] = threading.Lock()
            wakeup.acquire()
        return wakeup
