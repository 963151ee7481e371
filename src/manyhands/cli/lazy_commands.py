"""Commands that are imported when they are run: most need torch, and nobody waits for it to read a list of commands.

What the words of a command show before it is parsed, so that a mistake is not paid for with an import of torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from manyhands.errors import UserError, nearest
from manyhands.places.place import may_be_started_externally
from manyhands.strategy import Strategy, check_count
from manyhands.workloads.registry import find, names

_PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # one look for all help pages: plain, and quick to show
}


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """One command of the list: where it is, and the first sentence of its help."""

    target: str
    """`module:name`, below `manyhands.cli`, of a function, or of a `typer.Typer` with commands of its own."""
    help: str
    _: KW_ONLY
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How the arguments of a function are taken, for `typer`."""
    counts: tuple[str, ...] = ()
    """Its options that are integers of at least 1: looked at before anything is imported."""
    trains: bool = False
    """Whether it may start workers: what they are forked from then starts before anything is imported."""

    def load(self) -> Callable[..., None] | typer.Typer:
        module, _, name = self.target.partition(":")
        found: Callable[..., None] | typer.Typer = getattr(import_module(f"manyhands.cli.{module}"), name)
        return found

    def made(self, name: str) -> Any:
        found = self.load()
        if isinstance(found, typer.Typer):
            group = get_group(found)
            group.help = self.help
            return _with_flags(group)
        alone = typer.Typer(**_PLAIN)
        more = inspect.getdoc(found) or ""
        said = f"{self.help}\n\n{more}".rstrip()
        alone.command(name, help=said, context_settings=dict(self.settings))(found)
        return _with_flags(get_command(alone))


def lazy_app(groups: Mapping[str, Mapping[str, LazyCommand]], **about: Any) -> typer.Typer:
    """List the commands by group; each is put in its place in the list as soon as it is asked for."""
    commands = {name: command for group in groups.values() for name, command in group.items()}

    class LazyCommands(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if args and args[0] in commands:
                command = commands[args[0]]
                if len(args) > 1 and "--help" not in args:
                    check_counts(args[1:], command.counts)
                    if args[0] == "train":
                        check_training(args[1:])
                    if command.trains:
                        prepare_workers(args[1:])
                self.add_command(command.made(args[0]), args[0])
            return super().resolve_command(ctx, args)

        def format_commands(self, _ctx: Any, formatter: Any) -> None:
            for title, group in groups.items():
                with formatter.section(title):
                    formatter.write_dl([(name, command.help) for name, command in group.items()])

    app = typer.Typer(cls=LazyCommands, **about)
    for name, command in commands.items():
        app.command(name, help=command.help)(lambda: None)
    return app


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


def prepare_workers(words: Sequence[str]) -> None:
    """Before anything else is imported: kernels, if any are missing, and then what workers are forked from."""
    forks = forks_workers(words)
    workload = find(words[0])
    own = [words[0]] if workload is not None and workload.kernels else []
    import_module("manyhands.native.warming").prepare(*own, *(["fit"] if forks or not own else []))
    if forks:
        import_module("manyhands.places.local.template").warm()


def _with_flags(command: Any) -> Any:
    for option in command.params:
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
    made = command.get_help_option  # `--help` itself is made when it is first asked for

    def without_value(ctx: Any) -> Any:
        option = made(ctx)
        if option is not None:
            option.metavar = ""
        return option

    command.get_help_option = without_value
    for inner in getattr(command, "commands", {}).values():
        _with_flags(inner)
    return command


_WORKERS = 2
_MOST_USUAL_WORKERS = 64


def given_options(words: Sequence[str]) -> dict[str, str]:
    """The text of each option among `words`, without its dashes; the last one where an option is given twice."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            found[name] = text if equals else following
    return found


def check_counts(words: Sequence[str], names: Sequence[str]) -> None:
    """UserError for an option of these names that is not an integer of at least 1."""
    given = given_options(words)
    for name in names:
        if given.get(name):  # where its text is missing, the parser says so
            try:
                value: object = int(given[name])
            except ValueError:
                value = given[name]
            check_count(name, value)


def check_training(words: Sequence[str]) -> None:
    """UserError for a task that does not exist, and for a strategy that is wrong or cannot have so many workers."""
    task, given = words[0], given_options(words)
    workload = None if task.startswith("-") else find(task)
    if workload is None and not task.startswith("-"):
        instead = "train a Task of your own with mh.fit" if ":" in task else nearest(task, names())
        raise UserError(f"there is no task {task!r}; {instead}")
    if not given.get("strategy"):
        return
    strategy = Strategy.parse(given["strategy"])
    by_others = "cluster" in given or may_be_started_externally()
    compiled = workload is not None and bool(workload.training)
    if not compiled and not by_others and given.get("device", "cpu") == "cpu":
        workers = given.get("workers")
        strategy.check(int(workers) if workers else usual_workers(strategy), "cpu")


def usual_workers(strategy: Strategy) -> int:
    """Where nobody says how many: two, or the next number that the strategy takes; one where it is one process."""
    if strategy.most_workers is not None:
        return min(_WORKERS, strategy.most_workers)
    for count in range(_WORKERS, _MOST_USUAL_WORKERS + 1):
        try:
            strategy.check(count, "cpu")
        except UserError:
            continue
        return count
    return _WORKERS  # with which the error says what is wrong
