"""`manyhands launch SCRIPT`: your own training loop on several processes of this host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from manyhands.cli.command_options import AllowOverload, command_elsewhere
from manyhands.cli.runs import ended_by_signal, start_own_workers

__all__ = ["launch_command"]


def launch_command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The script, which calls mh.join().", metavar="SCRIPT")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="The script's own arguments; after -- if they look like ours.", metavar="[ARGUMENTS]..."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes on this host.")] = 2,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="How: mirrored, central, local, or allreduce, with settings.", show_default="mirrored"
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, or cuda: one GPU per worker in turn.", show_default="cpu")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Keep the run's events in this new directory, for timeline, explain and watch."),
    ] = None,
    allow_overload: AllowOverload = False,
    watchdog: Annotated[
        float,
        typer.Option(
            help="Seconds without progress after which the worker that holds up the run is named; 0: never."
        ),
    ] = 60.0,
) -> None:
    """Run your own training script on several workers; see `mh.join()`."""
    _refuse_unknown_option(context, str(script))
    start_own_workers()
    from manyhands.interop.own_loop.launch_script import (
        launch,  # here, so that help texts do not wait for torch
    )
    from manyhands.observe.draw.time_table import end_table

    events = f"the events up to now are in {out}, and " if out is not None else ""
    kept = f"all workers have stopped; {events}what the script saved itself is kept"
    with ended_by_signal(lambda: f"{kept}; start again with: {command_elsewhere(sys.argv)}"):
        summary = launch(
            script,
            arguments or [],
            workers=workers,
            strategy=strategy,
            device=device,
            watchdog_s=watchdog,
            allow_overload=allow_overload,
            out=out,
        )
    for note in summary["notes"]:
        print(f"manyhands: {note}", file=sys.stderr)
    if not summary["joined"]:
        print("manyhands: not every worker called mh.join(), so it trained by itself", file=sys.stderr)
    if any(row["steps"] for row in summary["per_worker"]):
        Console(stderr=True).print(end_table(summary))


def _refuse_unknown_option(context: typer.Context, script: str) -> None:
    """Options that are not ours go to the script; one before the script would be taken for the script itself."""
    if not script.startswith("-"):
        return
    from manyhands.errors import UserError, nearest

    ours = [name for one in context.command.params for name in one.opts if name.startswith("--")]
    option = script.partition("=")[0]
    raise UserError(
        f"launch has no option {option}; {nearest(option, ours)}; the script's own options stand after the script"
    )
