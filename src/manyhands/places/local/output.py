"""A child's output on its way through the launcher: passed on in whole lines, its end kept for an error.

Output goes to `sys.stdout` and `sys.stderr` as they are at that moment, so that a notebook, a test or a
progress bar that has put something of its own there sees it. Whole lines, so that the lines of two children
do not mix.
"""

from __future__ import annotations

import os
import sys
from typing import IO, Literal

__all__ = ["KEPT_BYTES", "Output"]

KEPT_BYTES = 4096
_READ_BYTES = 64 * 2**10
_LONGEST_LINE = 64 * 2**10


class Output:
    """One output stream of a child: the reading end of its pipe."""

    def __init__(self, pipe: IO[bytes], name: Literal["stdout", "stderr"]) -> None:
        """Own `pipe`; its content goes to the stream `name` of this process."""
        os.set_blocking(pipe.fileno(), False)
        self._pipe = pipe
        self._name = name
        self._waiting = b""
        self._kept = b""

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._pipe.fileno()

    @property
    def last_words(self) -> str:
        """The last 4 KiB that came."""
        return self._kept.decode(errors="replace")

    def pump(self) -> bool:
        """Pass on what has arrived, without waiting; whether more may come."""
        while True:
            try:
                data = os.read(self._pipe.fileno(), _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._kept = (self._kept + data)[-KEPT_BYTES:]
            whole, self._waiting = _split(self._waiting + data)
            self._pass_on(whole)

    def close(self) -> None:
        """Pass on an unfinished last line and close the pipe."""
        self._pass_on(self._waiting)
        self._waiting = b""
        self._pipe.close()

    def _pass_on(self, data: bytes) -> None:
        stream = getattr(sys, self._name)
        if not data or stream is None:
            return
        try:
            stream.write(data.decode(errors="replace"))
            stream.flush()
        except (
            OSError,
            ValueError,
        ):  # our own reader is gone or the stream is closed: no reason to end the run
            pass


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The whole lines of `data` (a progress bar ends its lines with a carriage return), and the rest."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    if len(data) - end > _LONGEST_LINE:
        end = len(data)
    return data[:end], data[end:]
