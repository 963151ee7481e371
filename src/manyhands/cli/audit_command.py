"""`manyhands audit RUN`: what the records of a parameter-server run prove, recomputed from every row."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from manyhands.strategies.ps.audit_files import AuditedRun

__all__ = ["audit_command"]

_EXIT = {"complete": 0, "restored": 0, "broken": 1, "incomplete": 3}
"""By verdict; 2 says that there is nothing to audit."""


def audit_command(run: Annotated[Path, typer.Argument(help="The run's directory.")]) -> None:
    """Check from a run's records that every batch was applied once and that no read was staler than allowed.

    The last word is the verdict: complete, restored (and how much that lost), incomplete, or broken. Exit status: 0
    for the first two, 3 for incomplete, 1 for broken.
    """
    # Imported here so that help texts do not wait for torch.
    from manyhands.strategies.ps.audit_files import audit_run

    audited = audit_run(run)
    found = audited.found
    for note in audited.notes:
        print(f"manyhands: {note}", file=sys.stderr)
    _print(audited)
    sentences = [violation.sentence for violation in found.violations] or list(found.missing)
    if sentences:
        more = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
        print(f"manyhands: {sentences[0]}{more}", file=sys.stderr)
    if _EXIT[found.verdict.value]:
        raise typer.Exit(_EXIT[found.verdict.value])


def _print(audited: AuditedRun) -> None:
    table = Table(box=None, pad_edge=False)
    columns = (
        "shard",
        "batches",
        "steps",
        "updates",
        "stale, mean",
        "max",
        "late",
        "skipped",
        "lost",
        "restored",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for shard in audited.found.shards:
        total = sum(value * count for value, count in shard.staleness.items())
        numbers = [
            f"{shard.shard}",
            f"{shard.batches}",
            f"{shard.versions}",
            f"{shard.applied}",
            f"{total / shard.applied if shard.applied else 0:.2f}",
            f"{max(shard.staleness, default=0)}",
            *(f"{count}" for count in (shard.late, shard.skipped, shard.lost, shard.restores)),
        ]
        table.add_row(*numbers)
    out = Console()
    out.print(table, highlight=False)
    lag = audited.strategy.consistency.lag
    bound = "no bound on reads" if lag is None else f"reads lag by at most {lag} clocks"
    out.print(f"{audited.strategy} · {bound} · {audited.found.words}", highlight=False, soft_wrap=True)
