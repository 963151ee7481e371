"""What the records of a parameter-server run prove: `manyhands audit RUN` and `manyhands replay RUN`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from manyhands.cli.command_options import argument, from_options, option
from manyhands.cli.program import spare_the_compiler
from manyhands.errors import format_bytes

if TYPE_CHECKING:
    from manyhands.strategies.ps.audit import AuditedRun

__all__ = ["audit_command", "replay_command"]

_EXIT = {"complete": 0, "restored": 0, "broken": 1, "incomplete": 3}
"""By verdict; 2 says that there is nothing to audit."""
_COLUMNS = (
    *("shard", "batches", "steps", "updates", "stale, mean"),
    *("max", "late", "skipped", "lost", "restored"),
)


def audit_command(run: Annotated[Path, typer.Argument(help="The run's directory.")]) -> None:
    """The last word is the verdict: complete, restored (and how much that lost), incomplete, or broken.

    Exit status: 0 for the first two, 3 for incomplete, 1 for broken.
    """
    from manyhands.strategies.ps.audit import audit_run

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
    from manyhands.observe.draw.time_table import plain_table

    rows = []
    for shard in audited.found.shards:
        total = sum(value * count for value, count in shard.staleness.items())
        mean = f"{total / shard.applied if shard.applied else 0:.2f}"
        most = max(shard.staleness, default=0)
        counts = (shard.late, shard.skipped, shard.lost, shard.restores)
        row = (shard.shard, shard.batches, shard.versions, shard.applied, mean, most, *counts)
        rows.append([str(cell) for cell in row])
    out = Console(highlight=False)
    out.print(plain_table(_COLUMNS, rows, words=0))
    lag = audited.strategy.consistency.lag
    bound = "no bound on reads" if lag is None else f"reads lag by at most {lag} clocks"
    out.print(f"{audited.strategy} · {bound} · {audited.found.words}", soft_wrap=True)


@dataclass(frozen=True)
class _ReplayOptions:
    run: Path = argument(..., "The run's directory.")
    until: int | None = option(None, "Stop where every shard has applied so many global batches.")
    save: Path | None = option(None, "Write the weights to this safetensors file.", writes=True)


@from_options
def replay_command(asked: _ReplayOptions) -> None:
    from manyhands.data.store.atomic import write_atomically
    from manyhands.data.store.tensorfile import encode_tensors
    from manyhands.strategies.ps.replay import replay

    spare_the_compiler()
    began = time.monotonic()
    done = replay(asked.run, until=asked.until)
    for note in done.notes:
        print(f"manyhands: {note}", file=sys.stderr)
    print(
        f"{done.updates} updates again in {time.monotonic() - began:.1f} s, {done.steps} batches at every shard, "
        f"{format_bytes(done.extra_bytes)} of copies"
    )
    values = ({} if done.loss is None else {"loss": done.loss}) | (done.metrics or {})
    own = ({} if done.run_loss is None else {"loss": done.run_loss}) | done.run_metrics
    beside = {name: f" (in the run {value:.4f})" for name, value in own.items()}
    print("  ".join(f"{name} {value:.4f}{beside.get(name, '')}" for name, value in values.items()))
    if asked.save is not None:
        write_atomically(asked.save, encode_tensors(done.model.state_dict()))
        print(f"weights in {asked.save}")
    same = "every gradient is the recorded one"
    wrong = ""
    if done.first_difference is not None:
        wrong = done.first_difference.sentence
    elif done.same_bytes is False:
        wrong = f"{same}, and yet the weights at the end are not those of the run"
    if wrong:
        print(f"manyhands: {wrong}", file=sys.stderr)
        raise typer.Exit(1)
    nothing_to_compare = "; there are no final weights to compare with here"
    print(same + (", and the weights are the same bytes" if done.same_bytes else nothing_to_compare))
