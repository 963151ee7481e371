"""Commands that are imported when they are run: most need torch, and nobody waits for it to read a list of commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from manyhands.cli.early import check_counts, check_training, given_options
from manyhands.errors import UserError
from manyhands.strategy import Strategy
from manyhands.workloads.registry import find

__all__ = ["LazyCommand", "add_lazily", "forks_workers", "group_of"]

_PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "markdown",
}


@dataclass(frozen=True, kw_only=True)
class LazyCommand:
    """One command of the list: where it is, and what the list says of it, which is its own first line of help."""

    home: str
    """`module:name` of a function, or of a `typer.Typer` with commands of its own."""

    help: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How the arguments of a function are taken, for `typer`."""

    counts: tuple[str, ...] = ()
    """Its options that are integers of at least 1: looked at before anything is imported."""

    trains: bool = False
    """Whether it may start workers: what they are forked from then starts before anything is imported."""


def add_lazily(app: typer.Typer, commands: Mapping[str, LazyCommand]) -> None:
    """List `commands`; `app` is made with `cls=group_of(commands)`."""
    for name, command in commands.items():
        app.command(name, help=command.help)(_listed)


def group_of(commands: Mapping[str, LazyCommand]) -> type[TyperGroup]:
    """The class of a group that puts a command in its place in the list as soon as it is asked for."""

    class LazyCommands(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if args and args[0] in commands:
                command = commands[args[0]]
                if len(args) > 1 and "--help" not in args:
                    check_counts(args[1:], command.counts)
                    if args[0] == "train":
                        check_training(args[1:])
                    if command.trains:
                        _prepare(args[1:])
                self.add_command(_made(args[0], command), args[0])
            return super().resolve_command(ctx, args)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            """Whole sentences, over several lines where they are long."""
            rows = [(name, self.commands[name].help or "") for name in self.list_commands(ctx)]
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    return LazyCommands


def forks_workers(words: Sequence[str]) -> bool:
    """Whether a command with these words will have workers in processes, as far as can be seen before it is parsed."""
    given = given_options(words)
    if not words or "--help" in words or "cluster" in given:
        return False
    workload = find(words[0])
    if "strategy" in given:
        try:
            compiled = workload is not None and bool(workload.training)
            return Strategy.parse(given["strategy"]).forks_workers(compiled=compiled)
        except UserError:  # which the command will say
            return False
    return workload is None or workload.forks_workers


def _listed() -> None:
    """In the place of a command until it is asked for."""


def _prepare(words: Sequence[str]) -> None:
    """Before anything else is imported: kernels, if any are missing, and then what workers are forked from."""
    forks = forks_workers(words)
    workload = find(words[0])
    own = [words[0]] if workload is not None and workload.kernels else []
    import_module("manyhands.native.warming").prepare(*own, *(["fit"] if forks or not own else []))
    if forks:
        import_module("manyhands.places.local.template").warm()


def _made(name: str, command: LazyCommand) -> Any:
    found = _found(command.home)
    if isinstance(found, typer.Typer):
        return _with_flags(get_group(found))
    alone = typer.Typer(**_PLAIN)
    alone.command(name, context_settings=dict(command.settings))(found)
    return _with_flags(get_command(alone))


def _with_flags(command: Any) -> Any:
    """The help shows flags as flags: nobody may write `--resume true`."""
    for option in command.params:
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
    _helped(command)
    for inner in getattr(command, "commands", {}).values():
        _with_flags(inner)
    return command


def _helped(command: Any) -> None:
    """The same for `--help` itself, which is made when it is first asked for."""
    made = command.get_help_option

    def without_value(ctx: Any) -> Any:
        option = made(ctx)
        if option is not None:
            option.metavar = ""
        return option

    command.get_help_option = without_value


@cache
def _found(home: str) -> Callable[..., None] | typer.Typer:
    module, _, name = home.partition(":")
    found: Callable[..., None] | typer.Typer = getattr(import_module(module), name)
    return found
