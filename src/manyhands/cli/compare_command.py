"""`manyhands compare TASK`: one task under several strategies, as a table, a paragraph and a report.

`compare sparse` shows HOGWILD! against update density, on examples that are made for it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.command_options import (
    AllowOverload,
    add_command,
    add_task_command,
    add_workload_command,
    check_writable,
    command_elsewhere,
    fresh_directory,
    half,
    print_next,
    write_json,
)
from manyhands.cli.leaving import Findings, leave_findings, status_line, table_console, time_left
from manyhands.cli.program import spare_the_compiler
from manyhands.cli.runs import start_own_workers
from manyhands.errors import UserError
from manyhands.lab.compare.comparison import DEFAULT_STRATEGIES, Target, Trial, parse_strategies
from manyhands.lab.sweep.trials import parse_values
from manyhands.workloads.compiled_workload import CompiledWorkload
from manyhands.workloads.registry import TASK_NAMES, offered
from manyhands.workloads.task_options import chosen
from manyhands.workloads.tasks.builtin import BuiltinTask

if TYPE_CHECKING:
    from manyhands.engine.kernel_task import AnyTask
    from manyhands.lab.compare.findings import Conditions
    from manyhands.lab.compare.run_comparison import Comparison, Progress, Score, Tell
    from manyhands.lab.compare.update_density import DensityRow
    from manyhands.workloads.logreg.synthetic import SparseProblem

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


def _compare(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _Common) -> None:
    steps, epochs = common.steps, common.epochs
    if steps is None and epochs is None:
        steps, epochs = half(entry.steps), half(entry.epochs)

    @contextmanager
    def build(_out: Path) -> Iterator[tuple[AnyTask, None]]:
        yield entry.build(**task_options), None

    run_comparison(entry.name, build, common, {"steps": steps, "epochs": epochs, "rounds": common.rounds})


def run_comparison(
    name: str,
    build: Callable[[Path], AbstractContextManager[tuple[AnyTask, Score | None]]],
    common: Compared,
    length: Mapping[str, int | None] | None = None,
) -> None:
    """Compare strategies on the task that `build` makes, with what it needs beside the directory that it is given.

    The score that comes with it is measured of each trained model. `length` is in steps or epochs, and in rounds;
    nothing: as the task says.
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
    with ending() as end, build(out) as (task, score), show_progress() as tell:
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
    if task in TASK_NAMES:
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


def _compare_workload(workload: CompiledWorkload[Any], given: dict[str, Any], asked: Compared) -> None:
    options: Any = chosen(workload.name, workload.compared_type, given)

    @contextmanager
    def build(out: Path) -> Iterator[tuple[AnyTask, Score | None]]:
        from manyhands.lab.compare.run_comparison import Score

        with workload.compared(options, out) as made:
            score = Score(names=made.scores, of=made.score) if made.score is not None else None
            yield made.task, score

    run_comparison(workload.name, build, asked)


_MOST_EXAMPLES = 200_000


@dataclass(frozen=True, kw_only=True)
class _CompareSparse:
    """The options of `compare sparse`."""

    density: Annotated[
        str, typer.Option(help="Shares of the features that an example has, separated by commas.")
    ] = "0.002,0.02,0.2"
    features: Annotated[int, typer.Option(help="Features in all.")] = 1000
    nonzeros: Annotated[int, typer.Option(help="Features of all examples together: the work of a pass.")] = (
        2_000_000
    )
    strategies: Annotated[
        str, typer.Option(help="What to compare with the first, separated by semicolons.")
    ] = "single; hogwild; hogwild order=locked"
    workers: Annotated[int, typer.Option(help="Workers of those that have several.")] = 2
    repeats: Annotated[int, typer.Option(help="Runs of each strategy, interleaved.")] = 1
    passes: Annotated[int, typer.Option(help="Passes over the examples.")] = 5
    learner: Annotated[str, typer.Option(help="sgd, adagrad or ftrl.")] = "adagrad"
    seed: Annotated[int, typer.Option(help="Fixes the examples and everything random.")] = 0
    allow_overload: AllowOverload = False
    out: Annotated[
        Path | None, typer.Option(help="Directory of all runs.", show_default="runs/compare-sparse-TIME")
    ] = None
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None


def _compare_sparse(asked: _CompareSparse) -> None:
    """Compare strategies on sparse problems of several densities: HOGWILD! against update density."""
    # Imported here so that help texts do not wait for torch.
    from manyhands.data.store.atomic import make_output, require_empty
    from manyhands.lab.compare.update_density import density_rows
    from manyhands.native.warming import prepare
    from manyhands.places.local.signals import ending
    from manyhands.workloads.logreg.synthetic import shared_chance

    check_writable(asked.json)
    parse_strategies(asked.strategies)
    problems = _problems(asked)
    out = asked.out or fresh_directory("compare-sparse")
    require_empty(out)
    make_output(out)
    prepare("logreg")
    found, failed = {}, False
    with ending() as end:
        for problem in problems:
            done = _one(asked, problem, out)
            if done.interrupted:
                again = command_elsewhere(sys.argv)
                print(f"manyhands: ended by {end.name}; begin again with: {again}", file=sys.stderr)
                raise typer.Exit(end.status)
            failed = failed or done.failed
            shared = shared_chance(problem.features, problem.nonzeros)
            found[problem.density] = (shared, done.figures)
            for row in done.figures.rows:
                for sentence in row.failures:
                    print(f"manyhands: {row.name} at {problem.density:g} failed: {sentence}", file=sys.stderr)
    _leave_sparse(asked, density_rows(found), out)
    if failed:
        raise typer.Exit(1)


def _problems(asked: _CompareSparse) -> list[SparseProblem]:
    from manyhands.workloads.logreg.synthetic import SparseProblem

    problems: dict[str, SparseProblem] = {}
    for text in parse_values(asked.density, ","):
        try:
            density = float(text)
        except ValueError:
            raise UserError(f"--density {text!r} is no number; list several as in 0.002,0.02,0.2") from None
        problem = SparseProblem(features=asked.features, examples=2, density=density, seed=asked.seed)
        examples = max(2, min(_MOST_EXAMPLES, asked.nonzeros // problem.nonzeros))
        name = f"{density:g}"  # of its files, too
        if name in problems:
            raise UserError(f"--density has {name} twice; leave one of them out")
        problems[name] = replace(problem, examples=examples)
    return list(problems.values())


def _one(asked: _CompareSparse, problem: SparseProblem, out: Path) -> Comparison:
    from manyhands.data.row_files import Reading, RowFile
    from manyhands.lab.compare.run_comparison import CompareSettings, compare
    from manyhands.workloads.logreg.examples import Examples, Spool, parse_examples
    from manyhands.workloads.logreg.options import LogregOptions
    from manyhands.workloads.logreg.synthetic import write_examples
    from manyhands.workloads.logreg.task import LogregTask

    path = out / f"density-{problem.density:g}.libsvm"
    options = LogregOptions(
        learner=asked.learner,
        passes=asked.passes,
        bias=False,  # every example would share it, whatever the density
        seed=asked.seed,
        allow_overload=asked.allow_overload,
    )
    settings = CompareSettings(
        workers=asked.workers,
        seed=asked.seed,
        repeats=asked.repeats,
        allow_overload=asked.allow_overload,
    )
    with Spool() as spool, show_progress(f"density {problem.density:g} · ") as tell:
        write_examples(problem, path)
        parsed = parse_examples(Examples(RowFile(str(path), Reading())), 0, spool)
        task = LogregTask.of(parsed, options)
        return compare(task, asked.strategies, out=out / path.stem, settings=settings, tell=tell)


def _leave_sparse(asked: _CompareSparse, rows: list[DensityRow], out: Path) -> None:
    from manyhands.lab.compare.update_density import (
        DENSITY_HEAD,
        density_cells,
        density_page,
        density_sentences,
    )

    findings = density_sentences(rows)
    title = (
        f"Update density · {asked.features:,} features · {asked.workers} worker{'s' * (asked.workers != 1)}"
    )
    about = {"features": asked.features, "workers": asked.workers, "repeats": asked.repeats}
    found = Findings(
        title=title,
        head=DENSITY_HEAD,
        cells=density_cells(rows),
        findings=findings,
        figures={**about, "rows": [row.to_dict() for row in rows]},
        page=lambda command, facts: density_page(title, rows, findings, command, facts),
    )
    leave_findings(found, out, asked.json)
    largest = max(out.glob("*.libsvm"), key=lambda path: path.stat().st_size)
    print_next(
        one_of_the_problems_alone=(
            "train",
            "logreg",
            "--strategy",
            "hogwild",
            "--no-bias",
            "--train",
            largest,
        ),
        other_densities=("compare", "sparse", "--density", "0.001,0.01,0.1,1"),
    )


for _entry in offered("task"):
    add_task_command(compare_app, _entry, _Common, _compare, f"Compare strategies on {_entry.help}.")
for _workload in offered("training"):
    add_workload_command(
        compare_app,
        _workload.name,
        _workload.compared_type,
        Compared,
        partial(_compare_workload, _workload),
        _workload.compare_help,
    )
add_command(compare_app, "sparse", _CompareSparse, _compare_sparse)
