"""`manyhands`: every command, and how errors become exit statuses.

0 done · 1 something failed while running · 2 what was asked for makes no sense · 128 + n ended by signal n

A command line that cannot be understood, as one sentence: the option, what was given, and what to write instead.

What reads the command line says it over four lines, and of values in the words of a library underneath.
"""

from __future__ import annotations

import difflib
import re
import sys
from typing import Annotated, Any

import typer

from manyhands.cli.lazy_commands import LazyCommand, add_lazily, group_of
from manyhands.errors import ManyhandsError, UserError, first_line, limits_named, printable
from manyhands.native.version import __version__

__all__ = ["COMMANDS", "UsageError", "app", "is_help", "main", "usage_sentence"]

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The base of all that is wrong with a command line, which typer does not export."""

_KINDS = {"int": "an integer", "float": "a number", "bool": "true or false"}


def is_help(error: Exception) -> bool:
    """Whether it is no error, but the help that a group of commands shows where none is named."""
    return type(error).__name__ == "NoArgsIsHelpError"


def usage_sentence(error: Any) -> str:
    """What is wrong, what to write instead, and where all options are listed."""
    ctx = getattr(error, "ctx", None)
    if type(error).__name__ == "NoSuchOption":
        said = _unknown_option(error.option_name, ctx)
    else:
        said = _bad_value(error) or _said(error)
    return said if ctx is None else f"{said} (see {ctx.command_path} --help)"


def _said(error: Any) -> str:
    """What typer says of it, beginning small, as the rest of our sentences do."""
    text = first_line(ValueError(error.format_message()))
    return printable(text[:1].lower() + text[1:])


def _bad_value(error: Any) -> str | None:
    """Of a value of the wrong kind: the option, the kind and the value; None for any other error."""
    found = getattr(error.__cause__, "errors", None)
    option = getattr(error, "param", None)
    if found is None or option is None:
        return None
    first = found()[0]
    name = option.opts[0] if option.param_type_name == "option" else option.human_readable_name
    kind = _KINDS.get(str(first["type"]).partition("_")[0])
    if kind is not None:
        return f"{name} must be {kind}; got {printable(str(first['input']))!r}"
    said = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    return f"{name}: {printable(said)}"


def _unknown_option(word: str, ctx: Any) -> str:
    said = f"no such option {printable(word)}"
    if ctx is None:
        return said
    commands = list(getattr(ctx.command, "commands", {}))
    if commands and ctx.parent is not None:  # options belong to the commands of a group
        return f"{said} of `{ctx.info_name}` itself; name one of {', '.join(commands)} before it"
    options = [option for option in ctx.command.params if option.param_type_name == "option"]
    for option in options:  # `--svg` for `--format svg`
        choices = re.search(r"[\w-]+(\|[\w-]+)+", (option.get_help_record(ctx) or ("",))[0])
        if choices is not None and word.lstrip("-") in choices[0].split("|"):
            return f"{said}; did you mean {option.opts[0]} {word.lstrip('-')}?"
    names = [name for option in options for name in option.opts]
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"{said}; did you mean {close[0]}?" if close else said


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
