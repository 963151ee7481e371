"""What the commands that train compiled workloads have in common: options, where a run is kept, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.command_options import AllowOverload, command_to_resume, own_command, write_json
from manyhands.cli.ended_by_signal import ended_by_signal
from manyhands.cli.runs import (
    CheckpointEvery,
    Dashboard,
    DashboardPort,
    Resume,
    Tensorboard,
    Watchdog,
    live_page,
    live_tensorboard,
)

if TYPE_CHECKING:
    from manyhands.engine.interrupted_run import Keeping
    from manyhands.observe.draw.bars import Bars
    from manyhands.places.local.signals import SignalEnding

__all__ = [
    "KeptRun",
    "Shown",
    "interrupted",
    "keeping",
    "keeping_unchecked",
    "leave_summary",
    "took",
    "watched",
]


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """The options that every such command ends with."""

    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the files of the run go.", show_default="runs/TASK-TIME"),
    ] = None
    resume: Resume = False
    checkpoint_every: CheckpointEvery = None
    watchdog: Watchdog = 60.0
    dashboard: Dashboard = False
    dashboard_port: DashboardPort = 0
    tensorboard: Tensorboard = None
    allow_overload: AllowOverload = False
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the summary to this file.")] = None


@dataclass(frozen=True)
class Shown:
    """What the page of a run says before its first event."""

    task: str
    strategy: str
    workers: int


def keeping(asked: KeptRun, out: Path, *own_files: str) -> Keeping:
    """Where the run is kept, with files of the command's own; UserError where it cannot be, before anything is read."""
    from manyhands.data.store.rundir import ON_COMMAND_LINE, RunDirectory, require_free

    keep = keeping_unchecked(asked, out, *own_files)
    if asked.resume:
        RunDirectory.open(out, lock=False)
    else:
        require_free(out, frozenset(own_files), ON_COMMAND_LINE)
    return keep


def keeping_unchecked(asked: KeptRun, out: Path, *own_files: str) -> Keeping:
    """The same for a training that looks at the directory itself."""
    from manyhands.engine.interrupted_run import Keeping
    from manyhands.engine.options import Options
    from manyhands.errors import UserError

    if asked.resume and asked.out is None:
        raise UserError("--resume needs --out, the directory of the run to go on with")
    options = Options(
        checkpoint_every=asked.checkpoint_every,
        watchdog_s=asked.watchdog,
        resume_command=command_to_resume(sys.argv, out),
        tells_interruption=False,  # the command does, and says what there is of a result
        own_files=frozenset(own_files),
    )
    return Keeping(out=out, resume=asked.resume, options=options)


@contextmanager
def watched(
    asked: KeptRun, keep: Keeping, shown: Shown, kept: Callable[[], str]
) -> Iterator[tuple[SignalEnding, Bars]]:
    """The page, the event files and the bars of a run; a signal that ends it leaves a sentence with what is `kept`."""
    from manyhands.data.store.rundir import RunDirectory
    from manyhands.observe.draw.bars import Bars

    out = keep.out
    page = live_page(asked.dashboard, out, shown.task, shown.strategy, asked.dashboard_port, shown.workers)

    def told() -> str:
        again = f"start again with: {own_command(sys.argv)}"
        how = f"go on with: {keep.options.resume_command}" if RunDirectory.is_one(out) else again
        return f"{kept()}; {how}"

    with (
        ended_by_signal(told) as end,
        page,
        live_tensorboard(out, asked.tensorboard),
        Bars() as bars,
    ):
        yield end, bars


def leave_summary(asked: KeptRun, out: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary beside the result, where the run came to its end, and where it was asked for."""
    from manyhands.data.store.atomic import write_json as write_file

    if not summary["interrupted"]:
        write_file(out / "summary.json", summary)
    write_json(asked.json_file, summary)


def took(summary: Mapping[str, Any]) -> str:
    """How long the work itself took, and all of the command with what had to come before it."""
    return f"{summary['train_seconds']:.2f} s ({summary['seconds']:.1f} s with reading and starting)"


def interrupted(keep: Keeping, end: SignalEnding, result: str) -> typer.Exit:
    """The end of a command that a signal ended with a result: a sentence that says what it is, and the status."""
    sentence = f"ended by {end.name}; {result}; go on with: {keep.options.resume_command}"
    print(f"manyhands: {sentence}", file=sys.stderr)
    return typer.Exit(end.status)
