"""A command is an options dataclass and a function that takes it; what the function writes, and what to type next.

Heavy imports are inside the functions of all commands, so that help texts do not wait for torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from manyhands.cli.program import spare_the_compiler
from manyhands.errors import UserError
from manyhands.workloads.registry import offered

if TYPE_CHECKING:
    from manyhands.workloads.task_options import Option


def option(
    default: Any, help_text: str, *flags: str, shown: str | bool = True, writes: bool = False, **about: Any
) -> Any:
    """A field of an options dataclass; `default` is `...` where it is required, `about` as for `typer.Option`.

    `shown` is the default in words. `writes` says that the option names a file to write: without a folder for it, the
    command does not begin.
    """
    return _field(default, typer.Option(*flags, help=help_text, show_default=shown, **about), writes)


def argument(default: Any, help_text: str | None = None, **about: Any) -> Any:
    """The same for what is given without a name."""
    return _field(default, typer.Argument(help=help_text, **about), False)


def json_option(help_text: str = "Write the figures to this file.") -> Any:
    return option(None, help_text, "--json", writes=True)


def _field(default: Any, about: Any, writes: bool) -> Any:
    metadata = {"about": about, "writes": writes}
    return dataclasses.field(default=MISSING if default is ... else default, metadata=metadata)


Seed = Annotated[int, typer.Option(help="Fixes weights, data order and all other randomness.")]
AllowOverload = Annotated[
    bool, typer.Option("--allow-overload", help="Start workers even if this host seems too small for them.")
]


def from_options(run: Callable[[Any], None]) -> Callable[..., None]:
    """The command that `run` is, with an option for each field of the dataclass that it takes, and its help text."""
    (options,) = (kind for name, kind in get_type_hints(run).items() if name != "return")

    def command(*places: Any, **values: Any) -> None:
        asked = options(*places, **values)
        _check(asked)
        run(asked)

    return _signed(command, _parameters(options), run.__doc__)


class _WholeSentences(TyperGroup):
    """A list of commands whose sentences are not cut short."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, self.commands[name].help or "") for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, text.partition("\n\n")[0]) for name, text in rows])


def command_group(**about: Any) -> typer.Typer:
    return typer.Typer(**{"cls": _WholeSentences, "no_args_is_help": True, "rich_markup_mode": None, **about})


def task_commands(
    run: Callable[[Any, dict[str, Any], Any], None],
    help_text: str,
    parse: Callable[[Option, str], Any] = lambda option, text: option.parse(text),
    **about: Any,
) -> typer.Typer:
    """A command for each built-in task, whose `name` and `help` may stand in `help_text`.

    `run` gets the task, its own options as `parse` reads them, and the dataclass of those that every task has.
    """

    def begin(entry: Any, given: dict[str, Any], common: Any) -> None:
        spare_the_compiler()
        run(entry, given, common)

    app = command_group(**about)
    *_, common = (kind for name, kind in get_type_hints(run).items() if name != "return")
    for entry in offered("task"):
        said = help_text.format(name=entry.name, help=entry.help)
        add_workload_command(app, entry.name, entry.options_type, common, partial(begin, entry), said, parse)
    return app


def add_workload_command(
    app: typer.Typer,
    name: str,
    own_type: type,
    common: type,
    run: Callable[[dict[str, Any], Any], None],
    help_text: str,
    parse: Callable[[Option, str], Any] = lambda option, text: option.parse(text),
) -> None:
    """Offer a workload's name as a command, with its own options before the `common` ones.

    `run` gets the own options that were given, and the common ones. An option that is both has the workload's default.
    """
    from manyhands.workloads.task_options import options_of

    own = {one.name: one for one in options_of(own_type) if not one.hidden}
    shared = [
        one.replace(default=own[one.name].default) if one.name in own else one for one in _parameters(common)
    ]
    both = {one.name for one in shared}

    def command(**values: Any) -> None:
        asked = common(**{name: values[name] for name in both})
        _check(asked)
        given = {name: values[name] for name in both if name in own}
        for name, option in own.items():
            value = values[name]
            if name in both or value in (None, False):
                continue
            if value is True:  # a flag
                given[name] = not option.default
            elif option.many:
                given[name] = tuple(parse(option, one) for one in value)
            else:
                given[name] = parse(option, value)
        run(given, asked)

    # What has to be given comes first in the help, then what is read.
    first = sorted(
        (one for one in own.values() if one.name not in both),
        key=lambda one: (not one.required, one.metavar != "FILE"),
    )
    app.command(name)(_signed(command, [*map(_own_parameter, first), *shared], help_text))


def _check(asked: Any) -> None:
    """UserError before any work: for a file that could not be written, and for a run to continue that is not named."""
    for one in dataclasses.fields(asked):
        path = getattr(asked, one.name)
        if one.metadata.get("writes") and path is not None:
            about = one.metadata["about"]
            check_writable(path, about.default if isinstance(about.default, str) else f"--{one.name}")
    if getattr(asked, "resume", False) and asked.out is None:
        raise UserError("--resume needs --out, the directory of the run to continue")


def check_writable(path: Path | None, option: str = "--json") -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}; create it first")


def _parameters(options: type) -> list[inspect.Parameter]:
    """The fields of an options dataclass as parameters of a command; a field is made by `option` or annotated."""
    kinds = get_type_hints(options, include_extras=True)
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[kinds[one.name], one.metadata["about"]] if one.metadata else kinds[one.name],
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
        )
        for one in dataclasses.fields(options)
    ]


def _signed(
    command: Callable[..., None], parameters: Sequence[inspect.Parameter], help_text: str | None
) -> Callable[..., None]:
    """With the signature that Typer reads."""
    command.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = help_text
    return command


def _own_parameter(option: Option) -> inspect.Parameter:
    """A workload's own option; its text is parsed by the workload, which knows what is allowed."""
    flag = option.flag or f"--{option.name.replace('_', '-')}"
    help_text = f"{option.help[0].upper()}{option.help[1:]}."
    kind: Any
    default: bool | None = None
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
        kind = Annotated[list[str] | None, about] if option.many else Annotated[str | None, about]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


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


def own_words(entry: Any, given: Mapping[str, Any]) -> list[str]:
    """The options of a task that were given, as words of another command for it."""
    words: list[str] = []
    for one in entry.options:
        if one.name in given:
            flag, value = one.flag or f"--{one.name.replace('_', '-')}", given[one.name]
            is_switch = one.kind is bool and one.flag
            words += [flag] if is_switch else [f"{flag}={each}" for each in (value if one.many else (value,))]
    return words


def half_length(entry: Any, asked: Any) -> dict[str, int | None]:
    """Steps and epochs as asked for, or half of what the task usually has: for many runs, and for slow ones."""
    if asked.steps is not None or asked.epochs is not None:
        return {"steps": asked.steps, "epochs": asked.epochs}
    usual = {"steps": entry.steps, "epochs": entry.epochs}
    return {name: None if value is None else max(1, value // 2) for name, value in usual.items()}


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


def command_anywhere(arguments: Sequence[str]) -> str:
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
    has_out = any(word == "--out" or word.startswith("--out=") for word in arguments)
    return own_command(arguments, *([] if has_out else ["--out", str(out)]), "--resume")
