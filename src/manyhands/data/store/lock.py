"""One live run per directory: an flock on a file in it, which the system releases however the holder dies."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

from manyhands.data.store.atomic import reason, write_all
from manyhands.errors import UserError

__all__ = ["RunLock"]

_TRIES, _TRY_AGAIN_S = 3, 0.02


class RunLock:
    """The right to write into a run directory, held from `acquire` to `close`; `close` is idempotent.

    The lock belongs to the open file: a child that inherits `descriptor` holds it on, should its parent die
    first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1

    def acquire(self) -> None:
        """Take the lock now, or raise UserError with the process that has it."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UserError(f"{self.path} cannot be opened: {reason(error)}") from error
        try:
            _lock(descriptor)
            os.ftruncate(descriptor, 0)
            write_all(descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode())
        except BlockingIOError:
            holder = os.read(descriptor, 256).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise UserError(
                f"{self.path.parent} is in use by another run (process {holder}); wait for it to end, or "
                "choose another out"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise UserError(f"{self.path} cannot be locked: {reason(error)}") from error
        self.descriptor = descriptor

    @staticmethod
    def is_held(path: Path) -> bool | None:
        """Whether somebody has the lock at `path`; None where there is none to have. For viewers."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def close(self) -> None:
        """Release the lock; the file stays, because a removed one could be locked by two."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _lock(descriptor: int) -> None:
    """BlockingIOError where another run has it; a viewer that looks has it for a moment only, and is waited for."""
    for _ in range(_TRIES - 1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_TRY_AGAIN_S)
        else:
            return
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
