"""What several commands need: a command made from an options dataclass, where files go, and how to type it again."""

from __future__ import annotations

import inspect
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

if TYPE_CHECKING:
    from manyhands.workloads.task_options import Option
    from manyhands.workloads.tasks.builtin import BuiltinTask

__all__ = [
    "AllowOverload",
    "add_command",
    "add_task_command",
    "add_workload_command",
    "check_writable",
    "command_elsewhere",
    "command_to_resume",
    "fresh_directory",
    "half",
    "own_command",
    "print_next",
    "write_json",
]

Asked = TypeVar("Asked")

AllowOverload = Annotated[
    bool,
    typer.Option("--allow-overload", help="Start workers even if they do not seem to fit on this host."),
]


def add_command(app: typer.Typer, name: str, options: type[Asked], run: Callable[[Asked], None]) -> None:
    """Offer `name`, with one option for each field of the dataclass `options`; the help text is that of `run`."""

    def command(**values: Any) -> None:
        run(options(**values))

    _offer(app, name, command, option_parameters(options), run.__doc__)


def add_task_command(
    app: typer.Typer,
    entry: BuiltinTask[Any],
    common: type[Asked],
    run: Callable[[BuiltinTask[Any], dict[str, Any], Asked], None],
    help_text: str,
    parse: Callable[[Option, str], Any] = lambda option, text: option.parse(text),
) -> None:
    """Offer the task's name as a command: `run` gets its own options that were given, as `parse` reads them."""

    def command(given: dict[str, Any], shared: Asked) -> None:
        run(entry, given, shared)

    add_workload_command(app, entry.name, entry.options_type, common, command, help_text, parse)


def add_workload_command(
    app: typer.Typer,
    name: str,
    own_type: type,
    common: type[Asked],
    run: Callable[[dict[str, Any], Asked], None],
    help_text: str,
    parse: Callable[[Option, str], Any] = lambda option, text: option.parse(text),
) -> None:
    """Offer a workload's name as a command, with its own options before the `common` ones.

    `run` gets the own options that were given, and the common ones. An option that is both has the workload's default,
    and its value is for both.
    """
    from manyhands.workloads.task_options import options_of

    own = {one.name: one for one in options_of(own_type) if not one.hidden}
    shared = [
        one.replace(default=own[one.name].default) if one.name in own else one
        for one in option_parameters(common)
    ]
    both = {one.name for one in shared}

    def command(**values: Any) -> None:
        asked = common(**{name: values[name] for name in both})
        given = {name: values[name] for name in both if name in own}
        for name, option in own.items():
            if name not in both and values[name] not in (None, False):
                given[name] = _given(option, values[name], parse)
        run(given, asked)

    # What has to be given comes first in the help, then what is read.
    first = sorted(
        (one for one in own.values() if one.name not in both),
        key=lambda one: (not one.required, one.metavar != "FILE"),
    )
    _offer(app, name, command, [*map(_own_parameter, first), *shared], help_text)


def _given(option: Option, value: Any, parse: Callable[[Option, str], Any]) -> Any:
    if value is True:  # a flag
        return not option.default
    return tuple(parse(option, one) for one in value) if option.many else parse(option, value)


def option_parameters(options: type) -> list[inspect.Parameter]:
    """The fields of an options dataclass as parameters of a command."""
    kinds = get_type_hints(options, include_extras=True)
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kinds[one.name],
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
        )
        for one in fields(options)
    ]


def _offer(
    app: typer.Typer,
    name: str,
    command: Callable[..., None],
    parameters: Sequence[inspect.Parameter],
    help_text: str | None,
) -> None:
    """Add a command whose signature, which Typer reads, is made of these parameters."""
    command.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = help_text
    app.command(name)(command)


def _own_parameter(option: Option) -> inspect.Parameter:
    """A workload's own option; its text is parsed by the workload, which knows what is allowed."""
    flag = option.flag or f"--{option.name.replace('_', '-')}"
    help_text = f"{option.help[0].upper()}{option.help[1:]}."
    kind: Any
    if option.kind is bool and option.flag:
        kind, default = Annotated[bool, typer.Option(flag, help=help_text)], False
    else:
        shown = "required" if option.required else "none" if option.default is None else str(option.default)
        about = typer.Option(
            flag,
            help=help_text,
            metavar=option.metavar or option.kind.__name__.upper(),
            show_default=option.shown or shown,
        )
        kind, default = (
            (Annotated[list[str] | None, about] if option.many else Annotated[str | None, about]),
            None,
        )
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Refuse a file that could not be written now rather than after the work."""
    from manyhands.errors import UserError

    if path is not None and not path.absolute().parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}; make it first")


def write_json(json_file: Path | None, value: Mapping[str, Any]) -> None:
    """Write a summary where one was asked for, whole or not at all; WriteFailed names a disk that does not take it."""
    from manyhands.data.store.atomic import render_json, write_atomically

    if json_file is None:
        return
    content = render_json(value, json_file.name, indent=2)
    if json_file.exists() and not json_file.is_file():  # a pipe or a terminal
        json_file.write_bytes(content)
    else:
        write_atomically(json_file, [content])


def fresh_directory(name: str) -> Path:
    """runs/NAME-TIME, with a number behind it where that is taken."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def half(usual: int | None) -> int | None:
    """Half of a usual length, for commands that make several runs, or slow ones; None stays None."""
    return None if usual is None else max(1, usual // 2)


def print_next(**commands: Sequence[object]) -> None:
    """The last lines of a command: what can be done with what it made, as commands to type; each by its words."""
    lines = [
        f"  {shlex.join(['manyhands', *map(str, words)])}   # {what.replace('_', ' ')}"
        for what, words in commands.items()
    ]
    print("\n".join(["next", *lines]))


def own_command(arguments: Sequence[str], *more: str) -> str:
    """The command line that this process was started with, to be typed again, with what is not in it yet of `more`."""
    given = list(arguments[1:])
    program = ["manyhands"] if Path(arguments[0]).name == "manyhands" else [sys.executable, "-m", "manyhands"]
    return shlex.join([*program, *given, *(word for word in more if word not in given)])


def command_elsewhere(arguments: Sequence[str]) -> str:
    """The same without `--out`: where a command refuses a directory that is not empty, and this one has filled it."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            kept += [word, *words]
        elif word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return own_command(kept)


def command_to_resume(arguments: Sequence[str], out: Path) -> str:
    """The same for a run that is kept in `out`, to go on with."""
    has_out = any(word == "--out" or word.startswith("--out=") for word in arguments)
    return own_command(arguments, *([] if has_out else ["--out", str(out)]), "--resume")
