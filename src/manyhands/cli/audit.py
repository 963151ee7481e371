"""`manyhands audit RUN`: what the logs of a parameter-server run prove, recomputed from every row."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from manyhands.server.audit import Audit
    from manyhands.server.strategy import Ps

__all__ = ["audit_command"]


def audit_command(run: Annotated[Path, typer.Argument(help="The run's directory.")]) -> None:
    """Check from a run's logs that every update was applied once and that no read was staler than allowed."""
    # Imported here so that help texts do not wait for torch.
    from manyhands.errors import DataError, UserError
    from manyhands.server.audit import audit
    from manyhands.server.strategy import Ps
    from manyhands.server.updates import read_logs, read_record
    from manyhands.store.rundir import RunDirectory
    from manyhands.strategy import Strategy

    strategy = Strategy.parse(str(RunDirectory.open(run, lock=False).config.get("strategy")))
    if not isinstance(strategy, Ps):
        raise UserError(f"{run} is a run of {strategy}; only ps applies updates that can be audited")
    record, logs = read_record(run), read_logs(run)
    for shard in range(strategy.servers):
        if shard not in logs.files:
            raise DataError(f"{run} has no log of shard {shard} of {strategy.servers}: its file is gone")
    found = audit(logs.files, strategy.consistency, record.steps)
    for note in logs.notes:
        print(f"manyhands: {note}", file=sys.stderr)
    _print(found, strategy)
    if not found.clean:
        first, others = found.violations[0], len(found.violations) - 1
        more = f" (and {others} more)" if others else ""
        print(f"manyhands: {first.sentence}{more}", file=sys.stderr)
        raise typer.Exit(1)


def _print(found: Audit, strategy: Ps) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("shard", "steps", "updates", "stale, mean", "max", "late", "skipped", "lost", "restored"):
        table.add_column(column, justify="right")
    for shard in found.shards:
        total = sum(value * count for value, count in shard.staleness.items())
        numbers = [
            f"{shard.shard}",
            f"{shard.versions}",
            f"{shard.applied}",
            f"{total / shard.applied if shard.applied else 0:.2f}",
            f"{max(shard.staleness, default=0)}",
            *(f"{count}" for count in (shard.late, shard.skipped, shard.lost, shard.restores)),
        ]
        table.add_row(*numbers)
    out = Console()
    out.print(table, highlight=False)
    lag = strategy.consistency.lag
    bound = "no bound on reads" if lag is None else f"reads lag by at most {lag} clocks"
    verdict = "every update applied once, nothing broken" if found.clean else "broken"
    out.print(f"{strategy} · {bound} · {verdict}", highlight=False, soft_wrap=True)
