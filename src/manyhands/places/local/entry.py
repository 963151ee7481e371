"""The first file of the template process: tie its life to the launcher's, and only then import anything heavy."""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import json
import os
import signal
import sys
from contextlib import suppress

from manyhands.places.local.forking import die_with_parent, run_template, spare_finalizers

TEMPLATE_VARIABLE = "MANYHANDS_TEMPLATE"


def main() -> int:
    """Be the template that the environment describes, or one of its forks; the exit status, 2 if run by hand."""
    text = os.environ.pop(TEMPLATE_VARIABLE, None)
    if text is None:
        print("only the launchers of manyhands.places.local can run this file", file=sys.stderr)
        return 2
    launcher_pid = json.loads(text)["launcher_pid"]
    die_with_parent(launcher_pid, signal.SIGKILL)
    template_pid = os.getpid()
    left_with: list[int] = []
    atexit.register(_leave, left_with, launcher_pid)  # before others: it is called after all of them
    status = 1
    try:
        status = run_template(text)
    finally:  # what a role cannot tell a launcher that is gone is raised
        if os.getpid() != template_pid:
            spare_finalizers()  # those of what a role has imported itself
            left_with.append(status)
    return status


def _leave(left_with: list[int], launcher_pid: int) -> None:
    # In a fork, end here, with all that was written: to take the modules apart would copy what all forks share.
    # Whatever a role has started ends with it. The launcher sees to that; where it has just died, nobody else does.
    if left_with:
        stream = io.IOBase.__base__  # a plain class: to ask an abstract one of every type takes 5 ms
        assert stream is not None
        for thing in gc.get_objects():
            if issubclass(type(thing), stream):
                with suppress(ValueError):  # detached from what it wrote to
                    if not thing.closed and thing.writable():
                        thing.flush()
        ctypes.CDLL(None).fflush(None)
        if os.getppid() != launcher_pid:
            os.killpg(0, signal.SIGKILL)
        os._exit(left_with[0])


if __name__ == "__main__":
    sys.exit(main())
