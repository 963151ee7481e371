"""Writes the report of a run: the content of the live page as one file beside its events."""

from __future__ import annotations

from pathlib import Path

from manyhands.data.store.atomic import write_atomically
from manyhands.observe.analyse.source import existing_run
from manyhands.observe.draw.page import report

__all__ = ["write_report"]


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write `report.html` into the run's directory, or `out`; UserError where there is no run."""
    path = out or run / "report.html"
    write_atomically(path, [report(existing_run(run).poll()).encode()])
    return path
