"""`manyhands`: every command, and how errors become exit statuses.

0 done · 1 something failed while running · 2 what was asked for makes no sense · 128 + n ended by signal n
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from manyhands.cli.later import Later, add_later, group_of
from manyhands.cli.usage import UsageError, is_help, usage_sentence
from manyhands.errors import ManyhandsError, UserError, limits_named
from manyhands.version import __version__

__all__ = ["COMMANDS", "app", "main"]

_LENGTHS = ("workers", "steps", "epochs", "rounds")

COMMANDS = {
    "train": Later(
        home="manyhands.cli.trainable:train_app",
        help="Train a built-in task.",
        counts=_LENGTHS,
        trains=True,
    ),
    "glove": Later(home="manyhands.cli.glove:glove_app", help="Ask trained word vectors."),
    "bench": Later(home="manyhands.cli.bench:bench_app", help="Measure, side by side with peers."),
    "compare": Later(
        home="manyhands.cli.trainable:compare_app",
        help="Train a built-in task under several strategies, side by side.",
        counts=_LENGTHS,
        trains=True,
    ),
    "sweep": Later(
        home="manyhands.cli.sweep:sweep_app",
        help="Train a built-in task with every combination of some settings, over the cores there are.",
    ),
    "scaling": Later(
        home="manyhands.cli.scaling:scaling_app",
        help="Say how much faster more workers are: a curve with its knee, beside Amdahl's fit and a forecast.",
        counts=("steps", "epochs"),
    ),
    "simulate": Later(
        home="manyhands.cli.simulate:simulate_app",
        help="Train a built-in task on parameter servers in virtual time, with more workers than there are cores.",
        counts=_LENGTHS,
    ),
    "memory": Later(
        home="manyhands.cli.memory:memory_app",
        help="Say what training needs in memory on each worker, before anything is trained.",
        counts=("workers",),
    ),
    "schedule": Later(
        home="manyhands.cli.schedule:schedule_command",
        help="Draw a schedule of a pipeline or an all-reduce, and say what it costs.",
    ),
    "audit": Later(
        home="manyhands.cli.audit:audit_command",
        help="Check from a run's records that every batch was applied once and that no read was staler than allowed.",
    ),
    "replay": Later(
        home="manyhands.cli.replay:replay_command",
        help="Execute the recorded order of a run again: the same weights, or the first update that differs.",
    ),
    "timeline": Later(
        home="manyhands.cli.timeline:timeline_command",
        help="Draw who computed, exchanged and waited for whom: a trace for ui.perfetto.dev, or one SVG.",
    ),
    "explain": Later(
        home="manyhands.cli.explain:explain_command",
        help="Say why a run is as fast as it is, from its events.",
    ),
    "watch": Later(
        home="manyhands.cli.watch:watch_command",
        help="Show a run as a page in the browser, live while it goes on or as it was when it ended.",
    ),
    "report": Later(
        home="manyhands.cli.watch:report_command",
        help="Write what the live page shows of a run into one file that needs nothing else.",
    ),
    "tensorboard": Later(
        home="manyhands.cli.tensorboard:tensorboard_command",
        help="Write event files for TensorBoard: loss, metrics, speed, where each worker's time goes, staleness.",
    ),
    "graph": Later(
        home="manyhands.cli.graph:graph_app",
        help="Draw the model of a built-in task as a graph: its modules, what they pass on, and where it is cut.",
        counts=("workers",),
    ),
    "export": Later(
        home="manyhands.cli.export:export_command",
        help="Write a run's newest weights as one file, and say what its precision costs.",
    ),
    "predict": Later(
        home="manyhands.cli.predict:predict_command",
        help="Print what a trained model answers for every input, one a line.",
    ),
    "generate": Later(
        home="manyhands.cli.predict:generate_command",
        help="Let a trained language model write on after a prompt.",
    ),
    "serve": Later(
        home="manyhands.cli.serve:serve_command",
        help="Serve a trained model over HTTP, by several processes, with a page of its latency and throughput.",
        trains=True,
    ),
    "launch": Later(
        home="manyhands.cli.launch:launch_command",
        help="Run your own training script on several workers; see `mh.join()`.",
        settings={"ignore_unknown_options": True},
        trains=True,
    ),
    "federated": Later(
        home="manyhands.cli.federated:federated_app",
        help="Federated rounds with real devices, over HTTPS.",
    ),
    "role": Later(
        home="manyhands.cli.role:role_command",
        help="Be one role of a cluster specification: a worker, a server, or the chief that leads.",
    ),
    "certificates": Later(
        home="manyhands.cli.certificates:certificates_command",
        help="Make a short-lived authority and a certificate for each host of a run, which know each other by it.",
    ),
    "tour": Later(
        home="manyhands.cli.tour:tour_command",
        help="Nine short lessons, from one process to federated parties: list them, or run one step by step.",
    ),
    "doctor": Later(
        home="manyhands.cli.doctor:doctor_command",
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
add_later(app, COMMANDS)


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
