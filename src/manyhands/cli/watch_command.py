"""`manyhands watch RUN` and `manyhands report RUN`: a run as a live page, or as one file to keep."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.command_options import check_writable

if TYPE_CHECKING:
    from manyhands.observe.analyse.view import RunView

__all__ = ["report_command", "serving", "watch_command"]

_Run = Annotated[Path, typer.Argument(help="The run's directory.")]


def watch_command(
    run: _Run,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in, who need the token, too."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 0,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in this machine's browser.")
    ] = False,
) -> None:
    """Show a run as a page in the browser, live while it goes on or as it was when it ended."""
    # Imported here so that help texts do not wait for torch.
    from manyhands.observe.analyse.follow import existing_run
    from manyhands.places.local.signals import ending

    source = existing_run(run).poll
    source()  # what cannot be read is said now, and not in the browser
    farewell = f"manyhands watch has ended; manyhands watch {run} opens this page again"
    try:
        with ending(), serving(source, host, port, farewell) as url:
            if open_browser:
                import webbrowser

                webbrowser.open(url)
            print("Ctrl-C ends it", file=sys.stderr, flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        print("manyhands: the page is closed", file=sys.stderr)


def report_command(
    run: _Run,
    out: Annotated[Path | None, typer.Option(help="Write to this file; RUN/report.html otherwise.")] = None,
) -> None:
    """Write what the live page shows of a run into one file that needs nothing else."""
    from manyhands.observe.draw.page import write_report

    check_writable(out, "--out")
    print(f"report  {write_report(run, out)}")


@contextmanager
def serving(source: Callable[[], RunView], host: str, port: int, farewell: str) -> Iterator[str]:
    """The page of a run for as long as this lasts; its address is printed once, and given."""
    from manyhands.observe.draw.prometheus import metrics_text
    from manyhands.serving.hosting import Dashboard
    from manyhands.transport.security import is_loopback

    with Dashboard(source, metrics_text, host=host, port=port, farewell=farewell) as dashboard:
        print(f"page  {dashboard.url}", file=sys.stderr, flush=True)
        if not is_loopback(host):
            print(
                f"manyhands: {host} can be reached from other machines; whoever has the token can read the page, "
                "and what is sent is not encrypted",
                file=sys.stderr,
            )
        yield dashboard.url
