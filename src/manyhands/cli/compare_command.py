"""`manyhands compare TASK`: one task under several strategies, as a table, a paragraph and a report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.command_options import (
    AllowOverload,
    add_task_command,
    check_writable,
    command_elsewhere,
    fresh_directory,
    half,
    option_parameters,
    print_next,
    write_json,
)
from manyhands.cli.environment import start_own_workers
from manyhands.cli.program import spare_the_compiler
from manyhands.cli.status_line import status_line, table_console, time_left
from manyhands.lab.compare.comparison import DEFAULT_STRATEGIES, Target, Trial, parse_strategies
from manyhands.lab.sweep.trials import parse_values
from manyhands.workloads.tasks import TASKS
from manyhands.workloads.tasks.builtin import BuiltinTask

if TYPE_CHECKING:
    from manyhands.engine.kernel_task import AnyTask
    from manyhands.lab.compare.findings import Conditions
    from manyhands.lab.compare.run_comparison import Comparison, Progress, Score, Tell

__all__ = ["Compared", "compare_app", "run_comparison", "show_progress"]

compare_app = typer.Typer(
    help="Train a built-in task under several strategies, side by side.",
    no_args_is_help=True,
    callback=start_own_workers,
)

_REPORT = "report.html"
_WIDTH = 100  # of the tables in a file or a pipe


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The options that every comparison has."""

    strategies: Annotated[str, typer.Option(help="What to compare, separated by semicolons.")] = (
        DEFAULT_STRATEGIES
    )
    workers: Annotated[int, typer.Option(help="Processes on this host.")] = 2
    repeats: Annotated[int, typer.Option(help="Runs of each strategy, interleaved.")] = 2
    target: Annotated[
        str | None,
        typer.Option(
            help="What to measure the time to, as in accuracy=0.95.",
            show_default="what the better half of the strategies ends with",
        ),
    ] = None
    slow: Annotated[
        str | None,
        typer.Option(help="Slow a worker on purpose: worker=1,factor=5[,probability=0.1][,from=400]."),
    ] = None
    bandwidth: Annotated[
        str | None,
        typer.Option(help="Hold TCP to this rate, as in 1Gbit; strategies that use memory are not touched."),
    ] = None
    price: Annotated[
        str | None,
        typer.Option(help="What a process costs in an hour, by kind: worker=10,helper=1[,server=2]."),
    ] = None
    device: Annotated[
        str,
        typer.Option(help="cpu, cuda, or both: every strategy on each, as in cpu,cuda; only what is there."),
    ] = "cpu"
    seed: Annotated[int, typer.Option(help="Fixes weights, data order and everything random.")] = 0
    allow_overload: AllowOverload = False
    out: Annotated[
        Path | None, typer.Option(help="Directory of all runs.", show_default="runs/compare-TASK-TIME")
    ] = None
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None


@dataclass(frozen=True, kw_only=True)
class _Common(Compared):
    """Those that every built-in task has besides."""

    steps: Annotated[int | None, typer.Option(help="Global batches of each run.")] = None
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the data, instead of --steps.", show_default="half of train's"),
    ] = None
    rounds: Annotated[int | None, typer.Option(help="Rounds of each run that is counted in them.")] = None


def _compare(entry: BuiltinTask[Any], task_options: dict[str, Any], shared: dict[str, Any]) -> None:
    common = _Common(**shared)
    steps, epochs = common.steps, common.epochs
    if steps is None and epochs is None:
        steps, epochs = half(entry.steps), half(entry.epochs)

    @contextmanager
    def build(_out: Path) -> Iterator[AnyTask]:
        yield entry.build(**task_options)

    run_comparison(entry.name, build, common, {"steps": steps, "epochs": epochs, "rounds": common.rounds})


def run_comparison(
    name: str,
    build: Callable[[Path], AbstractContextManager[AnyTask]],
    common: Compared,
    length: Mapping[str, int | None] | None = None,
    score: Score | None = None,
) -> None:
    """Compare strategies on the task that `build` makes, with what it needs beside the directory that it is given.

    `length` is in steps or epochs, and in rounds; nothing: as the task says. `score` is measured of each trained model.
    """
    # Imported here so that help texts do not wait for torch.
    from manyhands.engine.options import Slowdown
    from manyhands.lab.compare.bandwidth import Rate, enter, inside
    from manyhands.lab.compare.figures import Prices
    from manyhands.lab.compare.findings import Conditions
    from manyhands.lab.compare.run_comparison import CompareSettings, compare
    from manyhands.places.local.signals import ending

    spare_the_compiler()
    check_writable(common.json)
    parse_strategies(common.strategies)
    rate = Rate.parse(common.bandwidth) if common.bandwidth is not None else None
    settings = CompareSettings(
        workers=common.workers,
        **(length or {}),
        seed=common.seed,
        repeats=common.repeats,
        slow=Slowdown.parse(common.slow) if common.slow is not None else None,
        target=Target.parse(common.target) if common.target is not None else None,
        prices=Prices.parse(common.price) if common.price is not None else None,
        devices=tuple(dict.fromkeys(parse_values(common.device, ","))),
        allow_overload=common.allow_overload,
    )
    if rate is not None and not inside():
        enter(rate, [sys.executable, "-m", "manyhands", *sys.argv[1:]])
    out = common.out or fresh_directory(f"compare-{name}")
    with ending() as end, build(out) as task, show_progress() as tell:
        found = compare(task, common.strategies, out=out, settings=settings, tell=tell, score=score)
    conditions = Conditions(slow=settings.slow, bandwidth=str(rate) if rate is not None else None)
    for note in found.left_out:
        print(f"manyhands: {note}", file=sys.stderr)
    _leave(found, conditions, name, out, common.json)
    if found.interrupted:
        print(
            f"manyhands: ended by {end.name}, interrupted; the figures are those of the runs that had ended; a "
            f"comparison cannot be resumed, start again with: {command_elsewhere(sys.argv)}",
            file=sys.stderr,
        )
        raise typer.Exit(end.status)
    if found.failed:
        raise typer.Exit(1)


def _leave(found: Comparison, conditions: Conditions, task: str, out: Path, json_file: Path | None) -> None:
    """Write report and JSON, print the tables, the paragraph and the report's path."""
    from manyhands.data.store.atomic import write_atomically
    from manyhands.lab.compare.compare_report import (
        Made,
        machine,
        measures_table,
        promises_table,
        report,
        scores_table,
    )
    from manyhands.lab.compare.findings import paragraph

    sentences = paragraph(found.figures, conditions)
    made = Made(
        title=f"{task} under {len(found.figures.rows)} strategies",
        command=shlex.join(["manyhands", *sys.argv[1:]]),
        facts=machine(),
        notes=found.notes,
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / _REPORT
    write_atomically(path, [report(found.figures, sentences, made).encode()])
    figures = {
        "task": task,
        "command": made.command,
        "machine": made.facts,
        **found.figures.to_dict(),
        "paragraph": sentences,
        "notes": found.notes,
    }
    write_json(out / "figures.json", figures)
    write_json(json_file, figures)
    console = table_console(_WIDTH)
    console.print(measures_table(found.figures), highlight=False)
    if found.figures.scores:
        console.print(scores_table(found.figures), highlight=False)
    console.print(promises_table(found.figures), highlight=False)
    console.print(" ".join(sentences), highlight=False, markup=False)
    console.print(f"report  {path}", highlight=False, markup=False, soft_wrap=True)
    if not found.interrupted:
        _print_next(found, task, out)


def _print_next(found: Comparison, task: str, out: Path) -> None:
    """What to look at next: the fastest run, and how far more workers would go; nothing where no run ended."""
    ended = [row for row in found.figures.rows if row.runs and row.samples_per_s is not None]
    if not ended:
        return
    best = max(ended, key=lambda row: row.samples_per_s.median if row.samples_per_s else 0.0)
    folder = out / Trial(place=best.runs[0].place, repeat=best.runs[0].repeat).folder(best.strategy)
    commands: dict[str, tuple[object, ...]] = {
        "where_the_time_of_the_fastest_goes": ("explain", folder),
        "its_page": ("watch", folder),
    }
    if task in TASKS:
        commands["how_far_more_workers_help"] = ("scaling", task)
    print_next(**commands)


@contextmanager
def show_progress(before: str = "") -> Iterator[Tell]:
    """Shows which run is on; `before` begins the line."""
    with status_line() as say:

        def tell(progress: Progress) -> None:
            run = f"run {progress.done + 1} of {progress.runs} · {progress.strategy}"
            say(f"{before}{run}{time_left(progress.seconds_left)}")

        yield tell


for _entry in TASKS.values():
    add_task_command(
        compare_app, _entry, option_parameters(_Common), _compare, f"Compare strategies on {_entry.help}."
    )
