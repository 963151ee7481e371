"""The page of a run: a view as HTML, the same on the live page and in a report.

A section is a function from the view to a `PageSection`, and a line in `SECTIONS`. All exist from the beginning and
keep their place, with a placeholder where there is no content yet, so that the layout is stable during a run. The
last two are the exception: how the run was started grows once, and what is missing shows only where something is.
"""

from __future__ import annotations

from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Final

from manyhands.data.store.atomic import write_atomically
from manyhands.observe.analyse.follow import existing_run
from manyhands.observe.analyse.view import RunView
from manyhands.observe.draw.paper import STYLE, document, section

PAGE_STYLE: Final = STYLE + files("manyhands.observe.draw").joinpath("page.css").read_text()

SECTIONS: Final[dict[str, str]] = {
    "now": "run_sections:now",
    "wrong": "run_sections:wrong",
    "loss": "run_sections:loss",
    "metrics": "run_sections:metrics",
    "acting": "acting_section:acting",
    "optimizer": "run_sections:optimizer",
    "model": "run_sections:model",
    "throughput": "run_sections:throughput",
    "workers": "run_sections:workers",
    "servers": "run_sections:servers",
    "waits": "run_sections:waits",
    "traffic": "run_sections:traffic",
    "parties": "run_sections:parties",
    "staleness": "run_sections:staleness",
    "members": "run_sections:members",
    "made": "run_sections:made",
    "notes": "run_sections:notes",
}
"""In page order: the section's id, and where its function is in this package.

The function returns None where a run has no such section.
"""


def title_of(view: RunView) -> str:
    return f"{view.task} · {view.strategy}" if view.task else "A run that has not started"


def report(view: RunView) -> str:
    return document(f"{title_of(view)} · report", sections(view).values(), style=PAGE_STYLE)


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write `report.html` into the run's directory, or `out`; UserError where there is no run."""
    path = out or run / "report.html"
    write_atomically(path, [report(existing_run(run).poll()).encode()])
    return path


def sections(view: RunView) -> dict[str, str]:
    """Return each section's HTML by id, in page order; equal views give equal text."""
    found = {}
    for key, target in SECTIONS.items():
        module, _, function = target.partition(":")
        made = getattr(import_module(f"manyhands.observe.draw.{module}"), function)(view)
        if made is not None:
            found[key] = section(key, *made)
    return found
