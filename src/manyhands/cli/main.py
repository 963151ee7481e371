"""`manyhands`: every command, and how errors become exit statuses.

0 done · 1 something failed while running · 2 what was asked for makes no sense · 128 + n ended by signal n
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from manyhands.cli.lazy_commands import LazyCommand, add_lazily, group_of
from manyhands.cli.usage import UsageError, is_help, usage_sentence
from manyhands.errors import ManyhandsError, UserError, limits_named
from manyhands.native.version import __version__

__all__ = ["COMMANDS", "app", "main"]

_LENGTHS = ("workers", "steps", "epochs", "rounds")

COMMANDS = {
    "train": LazyCommand(
        home="manyhands.cli.train_command:train_app",
        help="Train a built-in task.",
        counts=_LENGTHS,
        trains=True,
    ),
    "glove": LazyCommand(home="manyhands.cli.glove_command:glove_app", help="Ask trained word vectors."),
    "bench": LazyCommand(
        home="manyhands.cli.bench_command:bench_app", help="Measure, side by side with peers."
    ),
    "compare": LazyCommand(
        home="manyhands.cli.compare_command:compare_app",
        help="Train a built-in task under several strategies, side by side.",
        counts=_LENGTHS,
        trains=True,
    ),
    "sweep": LazyCommand(
        home="manyhands.cli.sweep_command:sweep_app",
        help="Train a built-in task with every combination of some settings, over the cores there are.",
    ),
    "scaling": LazyCommand(
        home="manyhands.cli.scaling_command:scaling_app",
        help="Say how much faster more workers are: a curve with its knee, beside Amdahl's fit and a forecast.",
        counts=("steps", "epochs"),
    ),
    "simulate": LazyCommand(
        home="manyhands.cli.simulate_command:simulate_app",
        help="Train a built-in task on parameter servers in virtual time, with more workers than there are cores.",
        counts=_LENGTHS,
    ),
    "memory": LazyCommand(
        home="manyhands.cli.memory_command:memory_app",
        help="Say what training needs in memory on each worker, before anything is trained.",
        counts=("workers",),
    ),
    "schedule": LazyCommand(
        home="manyhands.cli.schedule_command:schedule_command",
        help="Draw a schedule of a pipeline or an all-reduce, and say what it costs.",
    ),
    "audit": LazyCommand(
        home="manyhands.cli.audit_command:audit_command",
        help="Check from a run's records that every batch was applied once and that no read was staler than allowed.",
    ),
    "replay": LazyCommand(
        home="manyhands.cli.replay_command:replay_command",
        help="Execute the recorded order of a run again: the same weights, or the first update that differs.",
    ),
    "timeline": LazyCommand(
        home="manyhands.cli.timeline_command:timeline_command",
        help="Draw who computed, exchanged and waited for whom: a trace for ui.perfetto.dev, or one SVG.",
    ),
    "explain": LazyCommand(
        home="manyhands.cli.explain_command:explain_command",
        help="Say why a run is as fast as it is, from its events.",
    ),
    "watch": LazyCommand(
        home="manyhands.cli.watch_command:watch_command",
        help="Show a run as a page in the browser, live while it goes on or as it was when it ended.",
    ),
    "report": LazyCommand(
        home="manyhands.cli.watch_command:report_command",
        help="Write what the live page shows of a run into one file that needs nothing else.",
    ),
    "tensorboard": LazyCommand(
        home="manyhands.cli.tensorboard_command:tensorboard_command",
        help="Write event files for TensorBoard: loss, metrics, speed, where each worker's time goes, staleness.",
    ),
    "graph": LazyCommand(
        home="manyhands.cli.graph_command:graph_app",
        help="Draw the model of a built-in task as a graph: its modules, what they pass on, and where it is cut.",
        counts=("workers",),
    ),
    "export": LazyCommand(
        home="manyhands.cli.export_command:export_command",
        help="Write a run's newest weights as one file, and say what its precision costs.",
    ),
    "predict": LazyCommand(
        home="manyhands.cli.predict_command:predict_command",
        help="Print what a trained model answers for every input, one a line.",
    ),
    "generate": LazyCommand(
        home="manyhands.cli.predict_command:generate_command",
        help="Let a trained language model write on after a prompt.",
    ),
    "serve": LazyCommand(
        home="manyhands.cli.serve_command:serve_command",
        help="Serve a trained model over HTTP, by several processes, with a page of its latency and throughput.",
        trains=True,
    ),
    "launch": LazyCommand(
        home="manyhands.cli.launch_command:launch_command",
        help="Run your own training script on several workers; see `mh.join()`.",
        settings={"ignore_unknown_options": True},
        trains=True,
    ),
    "federated": LazyCommand(
        home="manyhands.cli.federated_command:federated_app",
        help="Federated rounds with real devices, over HTTPS.",
    ),
    "role": LazyCommand(
        home="manyhands.cli.role_command:role_command",
        help="Be one role of a cluster specification: a worker, a server, or the chief that leads.",
    ),
    "certificates": LazyCommand(
        home="manyhands.cli.certificates_command:certificates_command",
        help="Make a short-lived authority and a certificate for each host of a run, which know each other by it.",
    ),
    "tour": LazyCommand(
        home="manyhands.cli.tour_command:tour_command",
        help="Nine short lessons, from one process to federated parties: list them, or run one step by step.",
    ),
    "doctor": LazyCommand(
        home="manyhands.cli.doctor_command:doctor_command",
        help="What this machine has for training, what is missing, and how to get it.",
    ),
}

app = typer.Typer(
    name="manyhands",
    cls=group_of(COMMANDS),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # a plain list: half of the time to show it would go into importing what draws boxes
)
add_lazily(app, COMMANDS)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True, metavar=""
        ),
    ] = False,
) -> None:
    """Many machines train one model."""


def main() -> None:
    """Run the command line, and turn errors into exit statuses; `process.program` is the console script."""
    try:
        with limits_named():
            status = app(standalone_mode=False)
        if isinstance(status, int):  # what a command left with, instead of returning
            sys.exit(status)
    except UsageError as error:
        if is_help(error):
            error.show()  # type: ignore[attr-defined]
        else:
            print(f"manyhands: {usage_sentence(error)}", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        print("manyhands: aborted", file=sys.stderr)
        sys.exit(1)
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
