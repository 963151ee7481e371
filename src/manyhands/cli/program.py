"""The command line in a process of its own, which may begin and end in ways that are not for a caller's process."""

from __future__ import annotations

import atexit
import os
import sys
from importlib import import_module

_ours = False


def program() -> None:
    global _ours
    _ours = True
    status: list[int] = []
    atexit.register(_leave, status)  # before anybody else, so that it is called after all others
    try:
        import_module("manyhands.cli.main").main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status.append(end.code or 0)
        raise
    status.append(0)


def spare_the_compiler() -> None:
    """Let torch import its compiler only if something is compiled, where the process is ours to say so."""
    if _ours:
        import_module("manyhands.engine.dynamo").defer()


def _leave(status: list[int]) -> None:
    """End here: to take thousands of modules apart takes a second in which nobody gains anything."""
    if not status:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # Python itself says what could not be written
        return
    os._exit(status[0] & 0xFF)
