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

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The base of all that is wrong with a command line, which typer does not export."""

_KINDS = {"int": "an integer", "float": "a number", "bool": "true or false"}


def usage_sentence(error: Any) -> str:
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

GROUPS = {
    "Train": {
        "train": LazyCommand(
            "train_command:train_app", "Train a built-in task.", counts=_LENGTHS, trains=True
        ),
        "launch": LazyCommand(
            "machine_commands:launch_command",
            "Run your own training script on several workers; see `mh.join()`.",
            settings={"ignore_unknown_options": True},
            trains=True,
        ),
    },
    "Prepare": {
        "tokenize": LazyCommand(
            "tokenize_command:tokenize_command",
            "Turn text into files of tokens, with a tokenizer of your own or a new one.",
        ),
    },
    "Look": {
        "show": LazyCommand(
            "look_commands:show_command",
            "Show a run: as a live page, a file, a trace or picture of which worker waited, or for TensorBoard.",
        ),
        "explain": LazyCommand(
            "look_commands:explain_command", "Explain from its events what limits the speed of a run."
        ),
    },
    "Trust": {
        "audit": LazyCommand(
            "look_commands:audit_command",
            "Check from a run's records that every batch was applied once and that no read was staler than allowed.",
        ),
        "replay": LazyCommand(
            "look_commands:replay_command",
            "Repeat a run in its recorded order: the same weights, or the first update that differs.",
        ),
        "doctor": LazyCommand(
            "machine_commands:doctor_command",
            "List what this machine has for training, what is missing, and how to get it.",
        ),
    },
    "Foresee": {
        "plan": LazyCommand(
            "plan_command:plan_app",
            "Predict the time of every strategy on these machines or on others, and choose.",
            counts=("steps",),
        ),
        "simulate": LazyCommand(
            "forecast_commands:simulate_app",
            "Train a built-in task on parameter servers in virtual time, with more workers than cores.",
            counts=_LENGTHS,
        ),
        "schedule": LazyCommand(
            "schedule_command:schedule_command",
            "Draw the schedule of a pipeline or an all-reduce, with its cost.",
        ),
        "memory": LazyCommand(
            "model_commands:memory_app",
            "Estimate the memory that training needs on each worker.",
            counts=("workers",),
        ),
        "graph": LazyCommand(
            "model_commands:graph_app",
            "Draw the model of a built-in task as a graph: modules, the data between them, and where it is split.",
            counts=("workers",),
        ),
        "scaling": LazyCommand(
            "forecast_commands:scaling_app",
            "Measure the speed-up by more workers, with its knee, Amdahl's fit and a forecast.",
            counts=("steps", "epochs"),
        ),
    },
    "Use": {
        "predict": LazyCommand(
            "use_commands:predict_command",
            "Print the prediction of a trained model for every input, one per line.",
        ),
        "generate": LazyCommand(
            "use_commands:generate_command", "Continue a prompt with a trained language model."
        ),
        "glove": LazyCommand("glove_command:glove_app", "Query and evaluate trained word vectors."),
        "export": LazyCommand(
            "use_commands:export_command",
            "Write a run's newest weights to one file, and measure the cost of its precision.",
        ),
        "serve": LazyCommand(
            "use_commands:serve_command",
            "Serve a trained model over HTTP from several processes, with a page of latency and throughput.",
            trains=True,
        ),
    },
    "Compare": {
        "compare": LazyCommand(
            "compare_command:compare_app",
            "Train a built-in task under several strategies, side by side.",
            counts=_LENGTHS,
            trains=True,
        ),
        "sweep": LazyCommand(
            "sweep_command:sweep_app",
            "Train a built-in task with every combination of some settings, on all cores.",
        ),
        "study": LazyCommand(
            "study_command:study_app",
            "Answer a question about distributed training by an experiment: list the questions, or run one.",
        ),
        "bench": LazyCommand("bench_command:bench_app", "Benchmark against other libraries."),
    },
    "Machines": {
        "role": LazyCommand(
            "machine_commands:role_command",
            "Run one role of a cluster specification: a worker, a server, or the chief.",
        ),
        "certificates": LazyCommand(
            "machine_commands:certificates_command",
            "Make a short-lived authority and a certificate for each host of a run.",
        ),
        "federated": LazyCommand(
            "federated_command:federated_app", "Run federated rounds with real devices over HTTPS."
        ),
    },
    "Learn": {
        "tour": LazyCommand(
            "tour_command:tour_command",
            "List or run nine short lessons, from one process to federated parties.",
        ),
    },
}
"""The commands by what one wants to do, in the order in which a newcomer meets them."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

app = lazy_app(
    GROUPS,
    name="manyhands",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command(hidden=True)
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
            print(error.ctx.get_help())  # type: ignore[attr-defined]
            sys.exit(0 if error.ctx.parent is None else 2)  # type: ignore[attr-defined]
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
