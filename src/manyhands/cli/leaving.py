"""What a command of many runs leaves: a report, its figures as JSON, and the same on the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from manyhands.cli.command_options import write_json

__all__ = ["Findings", "leave_findings", "status_line", "table_console", "time_left"]


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


_REPORT = "report.html"
_WIDTH = 110  # of the table in a file or a pipe


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What came out of all runs."""

    title: str
    head: Sequence[str]
    cells: Sequence[Sequence[str]]
    """The rows of the table."""
    findings: Sequence[str]
    """What the data show, in sentences."""
    figures: Mapping[str, Any]
    """The numbers, as JSON has them."""
    page: Callable[[str, Mapping[str, str]], str]
    """The report, made of the command and the facts of the machine."""


def leave_findings(found: Findings, out: Path, json_file: Path | None) -> None:
    """Write report and figures into `out`, the figures also where asked for, and print the table and what it shows."""
    from manyhands.data.store.atomic import write_atomically
    from manyhands.lab.compare.compare_report import machine
    from manyhands.observe.draw.time_table import words_table

    command, facts = shlex.join(["manyhands", *sys.argv[1:]]), machine()
    write_atomically(out / _REPORT, [found.page(command, facts).encode()])
    figures = {**found.figures, "command": command, "machine": facts, "told": list(found.findings)}
    write_json(out / "figures.json", figures)
    write_json(json_file, figures)
    console = table_console(_WIDTH)
    console.print(words_table(found.title, found.head, found.cells), highlight=False)
    console.print(" ".join(found.findings), highlight=False, markup=False)
    console.print(f"report  {out / _REPORT}", highlight=False, markup=False, soft_wrap=True)
