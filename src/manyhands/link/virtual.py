"""Virtual time for roles that run in threads of one process: one clock per role, and nobody really sleeps.

A role that waits says until when. Virtual time passes only when every running role waits: then the one with
the earliest deadline (ties go by name) is told that it has passed. Any other role wakes later in virtual time
and can send nothing into that one's past, so what a role sees does not depend on how its thread was
scheduled.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from manyhands.errors import ManyhandsError, UserError

__all__ = ["RoleKilled", "VirtualTime"]

T = TypeVar("T")


class RoleKilled(ManyhandsError):
    """Raised inside a role that was killed on purpose, so that nothing of its code runs on."""


class VirtualTime:
    """The clocks of all roles, who waits for what, and who dies when.

    `changed` guards everything, also in the code that uses this class; methods that say so want it held. A clock is
    read without it: one number of a dict is whole.
    `stall_s` is the one real time here: how long to wait for a role that neither waits nor ends.
    """

    def __init__(self, stall_s: float) -> None:
        self.changed = threading.RLock()
        self._bells: dict[str, threading.Condition] = {}  # of those who wait; all of the one lock
        self._stall_s = stall_s
        self._clock_s: dict[str, float] = {}
        self._dies_s: dict[str, float] = {}
        self._running: set[str] = set()
        self._waiting: dict[str, float] = {}
        self._expired: set[str] = set()

    def clock_s(self, role: str) -> float:
        """What the clock of `role` shows."""
        return self._clock_s.get(role, 0.0)

    def dies_s(self, role: str) -> float:
        """When `role` dies; infinity for a role that was not killed."""
        return self._dies_s.get(role, math.inf)

    def kill(self, role: str, at_s: float) -> None:
        """Let `role` die when its clock reaches `at_s`."""
        with self.changed:
            self._dies_s[role] = min(at_s, self.dies_s(role))
            self.wake_all()

    def move(self, role: str, to_s: float) -> None:
        """Put the clock of `role` forward; RoleKilled if it does not live to see that."""
        with self.changed:
            now_s, dies_s = self.clock_s(role), self.dies_s(role)
            self._clock_s[role] = max(now_s, min(to_s, dies_s))
            if self._clock_s[role] >= dies_s:
                raise RoleKilled(f"{role} was killed at {dies_s:g} s of virtual time")

    def wait(self, role: str, until_s: Callable[[], float], ready: Callable[[], bool]) -> bool:
        """Wait until `ready` (True), or until virtual time reaches `until_s` (False); `changed` is held.

        Neither moves the clock. Whoever makes a waiting role ready must `wake` it.
        """
        if role in self._waiting:
            raise UserError(
                f"two threads act as {role!r} at once; a role of a simulated network is one thread"
            )
        try:
            while not ready():
                if role in self._expired:
                    return False
                self._waiting[role] = min(until_s(), self.dies_s(role))
                self._expire_one()
                if role not in self._expired and not self._bell(role).wait(self._stall_s):
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
        self._waiting.pop(role, None)
        self._bell(role).notify_all()

    def wake_all(self) -> None:
        """Deadlines may have changed: everybody looks again before time passes; `changed` is held."""
        self._waiting.clear()
        for bell in self._bells.values():
            bell.notify_all()

    def run(self, roles: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Run each function in a thread as that role; return what those that lived to the end returned.

        A role that raises dies at that moment, for its peers as in life; of several, the earliest error is
        raised.
        """
        results: dict[str, T] = {}
        errors: list[tuple[float, str, BaseException]] = []

        def act(role: str, function: Callable[[], T]) -> None:
            try:
                results[role] = function()
            except RoleKilled:
                pass
            except BaseException as error:
                errors.append((self.clock_s(role), role, error))
                self.kill(role, self.clock_s(role))
            finally:
                with self.changed:
                    self._running.discard(role)
                    self._expire_one()

        with self.changed:
            self._running |= set(roles)
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

    def _expire_one(self) -> None:
        """If everybody waits, tell the role with the earliest deadline that it has passed."""
        if self._waiting and not self._busy():
            role = min(self._waiting, key=lambda name: (self._waiting[name], name))
            del self._waiting[role]
            self._expired.add(role)
            self._bell(role).notify_all()

    def _bell(self, role: str) -> threading.Condition:
        return self._bells.setdefault(role, threading.Condition(self.changed))
