"""The report of a run: what the live page shows, in one file beside its events."""

from __future__ import annotations

from pathlib import Path

from manyhands.analyse.source import existing_run
from manyhands.draw.page import report
from manyhands.store.atomic import write_atomically

__all__ = ["write_report"]


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write `report.html` into the run's directory, or `out`; UserError where there is no run."""
    path = out or run / "report.html"
    write_atomically(path, [report(existing_run(run).poll()).encode()])
    return path
