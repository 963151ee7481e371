"""What a command of many runs leaves: a report, its figures as JSON, and the same on the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from manyhands.cli.command_options import write_json

__all__ = ["leave_findings", "progress_line", "status_line"]

_WIDTH = 110  # of a table in a file or a pipe


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


@contextmanager
def progress_line(words: Callable[[Any], str]) -> Iterator[Callable[[Any], None]]:
    """The same of progress, which has `seconds_left`: its words, and the time left where it is known."""
    with status_line() as say:

        def report(progress: Any) -> None:
            left = progress.seconds_left
            say(words(progress) + ("" if left is None else f" · about {left:.0f} s left"))

        yield report


def leave_findings(
    out: Path,
    json_file: Path | None,
    tables: Sequence[Table],
    sentences: Sequence[str],
    figures: Mapping[str, Any],
    page: Callable[[str, Mapping[str, str]], str],
) -> None:
    """Write report and figures into `out`, the figures also where asked for; print the tables and what they show.

    `page` makes the report of the command and the facts of the machine, which are among the figures, too.
    """
    from manyhands.data.store.atomic import write_atomically
    from manyhands.lab.compare.compare_report import machine

    command, facts = shlex.join(["manyhands", *sys.argv[1:]]), machine()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.html"
    write_atomically(path, [page(command, facts).encode()])
    for file in (out / "figures.json", json_file):
        write_json(file, {**figures, "command": command, "machine": facts})
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for table in tables:
        console.print(table, highlight=False)
    console.print(" ".join(sentences), highlight=False, markup=False)
    console.print(f"report  {path}", highlight=False, markup=False, soft_wrap=True)
