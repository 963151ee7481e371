"""`manyhands explain RUN`: where the time of the median step goes, who is slow since when, and the ideal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from manyhands.cli.commands import check_writable, write_json

if TYPE_CHECKING:
    from manyhands.analyse.explain import Explanation

__all__ = ["explain_command"]

_COLUMNS = {
    "compute": "compute_ms",
    "exchange": "exchange_ms",
    "waiting": "wait_ms",
    "applying": "apply_ms",
    "input": "input_ms",
    "other": "other_ms",
}


def explain_command(
    run: Annotated[Path, typer.Argument(help="The run's directory.")],
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file as JSON, too.")] = None,
) -> None:
    """Say why a run is as fast as it is, from its events."""
    # Imported here so that help texts do not wait for torch.
    from manyhands.analyse.explain import explain
    from manyhands.analyse.narrate import paragraph
    from manyhands.record.plain import text
    from manyhands.record.recorded import read_run_events
    from manyhands.store.rundir import RunDirectory
    from manyhands.strategy import Strategy

    check_writable(json)
    directory = RunDirectory.open(run, lock=False)
    strategy = Strategy.parse(str(directory.config.get("strategy")))
    events = read_run_events(directory.events_path)
    found = explain(events.roles, synchronous=strategy.stepwise)
    for note in events.notes:
        print(f"manyhands: {note}", file=sys.stderr)
    words = paragraph(found, str(strategy))
    _print(found, f"{text(str(directory.config.get('task')))} · {strategy}", words)
    write_json(json, {"strategy": str(strategy), **found.to_dict(), "paragraph": words})


def _print(found: Explanation, title: str, words: str) -> None:
    from manyhands.analyse.narrate import PART_WORDS

    out = Console(highlight=False)
    of_whom = "the critical path" if found.synchronous else "the mean worker"
    out.print(f"{title} · {len(found.workers)} workers · {found.steps} steps", soft_wrap=True)
    split = Table(box=None, pad_edge=False)
    split.add_column(f"median step of {of_whom}")
    split.add_column("ms", justify="right")
    split.add_column("share", justify="right")
    whole = found.parts.step_ms
    for field, word in PART_WORDS.items():
        part = getattr(found.parts, field)
        split.add_row(word, f"{part:.2f}", f"{100 * part / whole if whole else 0:.0f} %")
    split.add_row("in all", f"{whole:.2f}", "")
    split.add_row("ideal", f"{found.ideal_ms:.2f}", "")
    split.add_row("evaluation, per step", f"{found.evaluate_ms:.2f}", "")
    split.add_row("checkpoints, per step", f"{found.checkpoint_ms:.2f}", "")
    out.print(split)
    workers = Table(box=None, pad_edge=False)
    columns = ("worker", "steps", "step, ms", *_COLUMNS, "came last")
    for column in columns:
        workers.add_column(column, justify="right")
    for path in found.workers:
        parts = path.parts
        times = (parts.step_ms, *(getattr(parts, field) for field in _COLUMNS.values()))
        last = f"{100 * path.last_share:.0f} %" if found.synchronous else ""
        workers.add_row(str(path.worker), str(path.steps), *(f"{time:.2f}" for time in times), last)
    out.print()
    out.print(workers)
    out.print()
    out.print(words)
