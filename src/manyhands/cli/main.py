"""`manyhands`: every command, and how errors become exit statuses.

0 done · 1 something failed while running · 2 what was asked for makes no sense · 128 + n ended by signal n
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.table import Table

from manyhands import __version__
from manyhands.cli.audit import audit_command
from manyhands.cli.bench import bench_app
from manyhands.cli.compare import compare_app
from manyhands.cli.explain import explain_command
from manyhands.cli.glove import add_glove, glove_app
from manyhands.cli.launch import launch_command
from manyhands.cli.regression import add_logreg, predict_command
from manyhands.cli.replay import replay_command
from manyhands.cli.tensorboard import tensorboard_command
from manyhands.cli.timeline import timeline_command
from manyhands.cli.train import train_app
from manyhands.cli.watch import report_command, watch_command
from manyhands.doctor import Verdict, examine
from manyhands.errors import ManyhandsError, UserError

__all__ = ["app", "main"]

app = typer.Typer(
    name="manyhands",
    help="Many machines train one model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
add_glove(train_app, compare_app)
add_logreg(train_app, compare_app)
app.add_typer(train_app, name="train")
app.add_typer(glove_app, name="glove")
app.add_typer(bench_app, name="bench")
app.add_typer(compare_app, name="compare")
app.command("audit")(audit_command)
app.command("replay")(replay_command)
app.command("timeline")(timeline_command)
app.command("explain")(explain_command)
app.command("watch")(watch_command)
app.command("report")(report_command)
app.command("tensorboard")(tensorboard_command)
app.command("predict")(predict_command)
app.command("launch", context_settings={"ignore_unknown_options": True})(launch_command)


@app.command()
def doctor() -> None:
    """What this machine has for training, what is missing, and how to get it."""
    signs = {Verdict.GOOD: "[green]✓[/]", Verdict.NOTE: "[yellow]·[/]", Verdict.BAD: "[red]✗[/]"}
    table = Table(box=None, show_header=False, pad_edge=False)
    findings = examine()
    for finding in findings:
        table.add_row(signs[finding.verdict], finding.subject, finding.found, f"[dim]{finding.advice}[/]")
    Console().print(table)
    if any(finding.verdict is Verdict.BAD for finding in findings):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run the command line; the console script and `python -m manyhands` both end here."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        _complain(error)
        sys.exit(2)
    except ManyhandsError as error:
        _complain(error)
        sys.exit(1)
    except KeyboardInterrupt:
        print("manyhands: interrupted", file=sys.stderr)
        sys.exit(130)


def _complain(error: ManyhandsError) -> None:
    print(f"manyhands: {error}", file=sys.stderr)
