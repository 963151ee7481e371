"""`manyhands train NAME` of a workload with a training of its own: where its run is kept, and how it ends.

What is trained and printed is the workload's: see `workloads/compiled_workload.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyhands.cli.command_options import (
    AllowOverload,
    add_workload_command,
    command_to_resume,
    fresh_directory,
    json_option,
    option,
    own_command,
    print_next,
    write_json,
)
from manyhands.cli.runs import (
    RunOptions,
    ended_by_signal,
    leave_report,
    live_page,
    live_tensorboard,
    start_own_workers,
)
from manyhands.workloads.compiled_workload import CompiledWorkload, TableRows
from manyhands.workloads.registry import offered
from manyhands.workloads.task_options import chosen

if TYPE_CHECKING:
    from manyhands.engine.interrupted_run import Keeping

__all__ = ["add_trainings", "print_rows"]


@dataclass(frozen=True, kw_only=True)
class _KeptRun(RunOptions):
    """The options that every such training has."""

    out: Path | None = option(
        None, "Where the files of the run go.", metavar="DIR", show_default="runs/TASK-TIME"
    )
    allow_overload: AllowOverload = False
    json_file: Path | None = json_option("Write the summary to this file.")


def add_trainings(app: typer.Typer) -> None:
    """Offer `train` of every workload that has a training of its own."""
    for workload in offered("training"):
        run = partial(_train, workload)
        add_workload_command(app, workload.name, workload.options_type, _KeptRun, run, workload.help)


def _train(workload: CompiledWorkload[Any], given: dict[str, Any], asked: _KeptRun) -> None:
    start_own_workers()
    from manyhands.data.store.atomic import write_json as write_file
    from manyhands.data.store.rundir import RunDirectory
    from manyhands.observe.draw.bars import Bars

    options = chosen(workload.name, workload.options_type, given)
    out = asked.out or fresh_directory(workload.name)
    keep, model = _keeping(asked, out, workload.files), out / workload.files[0]

    def kept() -> str:
        result = f"what there is of a result is in {model}" if model.exists() else "there is no result yet"
        again = f"start again with: {own_command(sys.argv)}"
        how = f"continue with: {keep.options.resume_command}" if RunDirectory.is_one(out) else again
        return f"{result}; {how}"

    with (
        ended_by_signal(kept) as end,
        live_page(asked, out, workload.name, options.strategy, options.workers),
        live_tensorboard(asked, out),
        Bars() as bars,
    ):
        ended = workload.train(options, keep, bars)
    if ended.is_summary_of_run and not ended.interrupted:
        write_file(out / "summary.json", ended.summary)
    write_json(asked.json_file, ended.summary)
    for part in ended.shown:
        print_rows(part)
    for note in ended.notes:
        print(f"manyhands: {note}", file=sys.stderr)
    if ended.interrupted:
        how = f"continue with: {keep.options.resume_command}"
        print(f"manyhands: ended by {end.name}; {ended.interrupted}; {how}", file=sys.stderr)
        raise typer.Exit(end.status)
    leave_report(out)
    print_next(**ended.next)


def _keeping(asked: _KeptRun, out: Path, own_files: tuple[str, ...]) -> Keeping:
    """Where the run is kept; UserError where it cannot be, before anything is read."""
    from manyhands.data.store.rundir import ON_COMMAND_LINE, RunDirectory, require_free
    from manyhands.engine.interrupted_run import Keeping
    from manyhands.engine.options import Options

    if asked.resume:
        RunDirectory.open(out, lock=False)
    else:
        require_free(out, frozenset(own_files), ON_COMMAND_LINE)
    options = Options(
        checkpoint_every=asked.checkpoint_every,
        watchdog_s=asked.watchdog,
        resume_command=command_to_resume(sys.argv, out),
        tells_interruption=False,  # this command does, and says what there is of a result
        own_files=frozenset(own_files),
    )
    return Keeping(out=out, resume=asked.resume, options=options)


def print_rows(part: str | TableRows) -> None:
    """A line, or a table; as they are, for a word may look like markup."""
    console = Console(highlight=False)
    if isinstance(part, str):
        console.print(part, markup=False, soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(part.head):
        is_number = part.numbers and number > 0
        table.add_column(Text(heading), justify="right" if is_number else "left", overflow="fold")
    for row in part.rows:
        table.add_row(*map(Text, row))
    console.print(table)
