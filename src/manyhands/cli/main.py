"""`manyhands`: every command, and how errors become exit statuses.

0 done · 1 something failed while running · 2 what was asked for makes no sense · 128 + n ended by signal n

A command line that cannot be understood gets one sentence: the option, what was given, and what to write instead.
"""

from __future__ import annotations

import difflib
import re
import sys
from typing import Annotated, Any

import typer

from manyhands.cli.lazy_commands import LazyCommand, lazy_app
from manyhands.errors import ManyhandsError, UserError, first_line, limits_named, printable
from manyhands.native.version import __version__

__all__ = ["COMMANDS", "UsageError", "app", "main", "usage_sentence"]

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The base of all that is wrong with a command line, which typer does not export."""

_KINDS = {"int": "an integer", "float": "a number", "bool": "true or false"}


def usage_sentence(error: Any) -> str:
    """What is wrong, what to write instead, and where all options are listed."""
    ctx = getattr(error, "ctx", None)
    is_unknown = type(error).__name__ == "NoSuchOption"
    said = _unknown_option(error.option_name, ctx) if is_unknown else _bad_value(error)
    return said if ctx is None else f"{said} (see {ctx.command_path} --help)"


def _bad_value(error: Any) -> str:
    """Of a value of the wrong kind: the option, the kind and the value; else what typer says, beginning small."""
    found = getattr(error.__cause__, "errors", None)
    option = getattr(error, "param", None)
    if found is None or option is None:
        text = first_line(ValueError(error.format_message()))
        return printable(text[:1].lower() + text[1:])
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
    "train": LazyCommand("train_command:train_app", "Train a built-in task.", counts=_LENGTHS, trains=True),
    "glove": LazyCommand("glove_command:glove_app", "Ask trained word vectors."),
    "bench": LazyCommand("bench_command:bench_app", "Measure, side by side with peers."),
    "compare": LazyCommand(
        "compare_command:compare_app",
        "Train a built-in task under several strategies, side by side.",
        counts=_LENGTHS,
        trains=True,
    ),
    "sweep": LazyCommand(
        "sweep_command:sweep_app",
        "Train a built-in task with every combination of some settings, over the cores there are.",
    ),
    "scaling": LazyCommand(
        "scaling_command:scaling_app",
        "Say how much faster more workers are: a curve with its knee, beside Amdahl's fit and a forecast.",
        counts=("steps", "epochs"),
    ),
    "simulate": LazyCommand(
        "simulate_command:simulate_app",
        "Train a built-in task on parameter servers in virtual time, with more workers than there are cores.",
        counts=_LENGTHS,
    ),
    "memory": LazyCommand(
        "memory_command:memory_app",
        "Say what training needs in memory on each worker, before anything is trained.",
        counts=("workers",),
    ),
    "schedule": LazyCommand(
        "schedule_command:schedule_command",
        "Draw a schedule of a pipeline or an all-reduce, and say what it costs.",
    ),
    "audit": LazyCommand(
        "trust_commands:audit_command",
        "Check from a run's records that every batch was applied once and that no read was staler than allowed.",
    ),
    "replay": LazyCommand(
        "trust_commands:replay_command",
        "Execute the recorded order of a run again: the same weights, or the first update that differs.",
    ),
    "timeline": LazyCommand(
        "look_commands:timeline_command",
        "Draw who computed, exchanged and waited for whom: a trace for ui.perfetto.dev, or one SVG.",
    ),
    "explain": LazyCommand(
        "look_commands:explain_command", "Say why a run is as fast as it is, from its events."
    ),
    "watch": LazyCommand(
        "look_commands:watch_command",
        "Show a run as a page in the browser, live while it goes on or as it was when it ended.",
    ),
    "report": LazyCommand(
        "look_commands:report_command",
        "Write what the live page shows of a run into one file that needs nothing else.",
    ),
    "tensorboard": LazyCommand(
        "look_commands:tensorboard_command",
        "Write event files for TensorBoard: loss, metrics, speed, where each worker's time goes, staleness.",
    ),
    "graph": LazyCommand(
        "graph_command:graph_app",
        "Draw the model of a built-in task as a graph: its modules, what they pass on, and where it is cut.",
        counts=("workers",),
    ),
    "export": LazyCommand(
        "use_commands:export_command",
        "Write a run's newest weights as one file, and say what its precision costs.",
    ),
    "predict": LazyCommand(
        "use_commands:predict_command", "Print what a trained model answers for every input, one a line."
    ),
    "generate": LazyCommand(
        "use_commands:generate_command", "Let a trained language model write on after a prompt."
    ),
    "serve": LazyCommand(
        "use_commands:serve_command",
        "Serve a trained model over HTTP, by several processes, with a page of its latency and throughput.",
        trains=True,
    ),
    "launch": LazyCommand(
        "machine_commands:launch_command",
        "Run your own training script on several workers; see `mh.join()`.",
        settings={"ignore_unknown_options": True},
        trains=True,
    ),
    "federated": LazyCommand(
        "federated_command:federated_app", "Federated rounds with real devices, over HTTPS."
    ),
    "role": LazyCommand(
        "machine_commands:role_command",
        "Be one role of a cluster specification: a worker, a server, or the chief that leads.",
    ),
    "certificates": LazyCommand(
        "machine_commands:certificates_command",
        "Make a short-lived authority and a certificate for each host of a run, which know each other by it.",
    ),
    "tour": LazyCommand(
        "tour_command:tour_command",
        "Nine short lessons, from one process to federated parties: list them, or run one step by step.",
    ),
    "doctor": LazyCommand(
        "machine_commands:doctor_command",
        "What this machine has for training, what is missing, and how to get it.",
    ),
}

app = lazy_app(
    COMMANDS,
    name="manyhands",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # a plain list: half of the time to show it would go into importing what draws boxes
)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


_VERSION = typer.Option(
    "--version", help="Print the version.", callback=_print_version, is_eager=True, metavar=""
)


@app.callback()
def options(_version: Annotated[bool, _VERSION] = False) -> None:
    """Many machines train one model."""


def main() -> None:
    """Run the command line, and turn errors into exit statuses; `process.program` is the console script."""
    try:
        with limits_named():
            status = app(standalone_mode=False)
        if isinstance(status, int):  # what a command left with, instead of returning
            sys.exit(status)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # what a group shows where no command is named
            error.show()  # type: ignore[attr-defined]
        else:
            print(f"manyhands: {usage_sentence(error)}", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        print("manyhands: aborted", file=sys.stderr)
        sys.exit(1)
    except ManyhandsError as error:
        print(f"manyhands: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        print("manyhands: interrupted", file=sys.stderr)
        sys.exit(130)
