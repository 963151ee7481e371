"""A child process that this one did not start itself: its number, and what became of it."""

from __future__ import annotations

import os
import select

__all__ = ["AdoptedProcess", "StillRunning"]


class StillRunning(Exception):
    """The process has not ended in time."""


class AdoptedProcess:
    """A child of ours, with its process descriptor, which it owns; only this object waits for it."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.returncode: int | None = None
        """As in `subprocess`; None until it is waited for."""

    def wait(self, timeout_s: float | None = None) -> int:
        """Its return code, once it has ended; StillRunning after `timeout_s`."""
        if self.returncode is None:
            if timeout_s is not None and not select.select([self.pidfd], [], [], timeout_s)[0]:
                raise StillRunning(f"process {self.pid} has not ended after {timeout_s:g} s")
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def close(self) -> None:
        """Let go of the descriptor; idempotent."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
