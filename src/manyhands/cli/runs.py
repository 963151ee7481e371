"""What every command that makes a run offers besides: to go on with it, to look at it, and its report."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from manyhands.workloads.tasks.builtin import TaskTable

__all__ = [
    "CheckpointEvery",
    "Dashboard",
    "DashboardPort",
    "Insecure",
    "Resume",
    "Tensorboard",
    "Tls",
    "Watchdog",
    "leave_report",
    "live_page",
    "live_tensorboard",
]

Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
CheckpointEvery = Annotated[int | None, typer.Option(help="Steps between checkpoints.")]
Watchdog = Annotated[
    float,
    typer.Option(
        help="Seconds without progress after which the worker that holds up the run is named; 0: never."
    ),
]
Tls = Annotated[
    Path | None,
    typer.Option(
        help="Between hosts: folder of this host's certificate (`manyhands certificates`); or MANYHANDS_TLS.",
        metavar="DIR",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Between hosts: send everything in the clear, on a network you trust."),
]
Dashboard = Annotated[bool, typer.Option("--dashboard", help="Show the run as a live page while it goes on.")]
DashboardPort = Annotated[int, typer.Option(help="Port of the live page on 127.0.0.1; 0 takes a free one.")]
Tensorboard = Annotated[
    Path | None, typer.Option(help="Write event files for TensorBoard to this directory.")
]


def live_page(
    shown: bool, out: Path, task: str, strategy: str, port: int, workers: int = 1
) -> AbstractContextManager[object]:
    """The run's page while it goes on, where one is asked for; it has room for so many workers from the beginning."""
    if not shown:
        return nullcontext()
    from manyhands.cli.watch_command import serving
    from manyhands.observe.analyse.follow import ComingRun
    from manyhands.serving.hosting import LOOPBACK

    farewell = f"The run has ended; manyhands watch {out} opens this page again."
    return serving(ComingRun(out, task, strategy, workers).poll, LOOPBACK, port, farewell)


def live_tensorboard(out: Path, directory: Path | None) -> AbstractContextManager[object]:
    """The event files for TensorBoard, where they are asked for."""
    from manyhands.observe.draw.tensorboard import LiveTensorboard

    return LiveTensorboard(out, directory) if directory is not None else nullcontext()


def leave_report(out: Path, table: TaskTable | None = None) -> None:
    """The run's report, and the picture of a task's table; a disk that takes neither fails no run that ended well."""
    from manyhands.errors import ManyhandsError
    from manyhands.observe.draw.page import write_report
    from manyhands.workloads.tasks.task_picture import write_picture

    try:
        print(f"report  {write_report(out)}")
        if table is not None and table.curves:
            print(f"picture  {write_picture(out, table)}")
    except ManyhandsError as error:
        print(f"manyhands: there is no report: {error}", file=sys.stderr)
