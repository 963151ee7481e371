"""How far a command of many runs is, and where its tables go: the same for all such commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

__all__ = ["status_line", "table_console", "time_left"]


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Say what goes on: a line that changes on a terminal, and a line for each change elsewhere."""
    console = Console(stderr=True)
    status = console.status("starting")

    def say(line: str) -> None:
        if console.is_terminal:
            status.update(line)
        else:
            print(line, file=sys.stderr, flush=True)

    with status:
        yield say


def time_left(seconds: float | None) -> str:
    """What a line ends with; nothing where it is not known."""
    return "" if seconds is None else f" · about {seconds:.0f} s left"


def table_console(width: int) -> Console:
    """As wide as the terminal, or `width` in a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=width)
