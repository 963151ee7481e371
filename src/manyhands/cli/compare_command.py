"""`manyhands compare TASK`: one task under several strategies, as a table, a paragraph and a report.

`compare sparse` shows HOGWILD! against update density, on examples that are made for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from manyhands.cli import command_options
from manyhands.cli.command_options import AllowOverload, Seed, from_options, json_option, option, print_next
from manyhands.cli.program import spare_the_compiler
from manyhands.cli.runs import leave_findings, progress_line, start_own_workers
from manyhands.errors import UserError
from manyhands.lab.compare.comparison import DEFAULT_STRATEGIES, Target, Trial, parse_strategies
from manyhands.lab.sweep.trials import parse_values
from manyhands.workloads.builtin_task import BuiltinTask
from manyhands.workloads.compiled_workload import CompiledWorkload
from manyhands.workloads.registry import TASK_NAMES, offered
from manyhands.workloads.task_options import chosen

if TYPE_CHECKING:
    from manyhands.engine.kernel_task import AnyTask
    from manyhands.lab.compare.run_comparison import Comparison, Score
    from manyhands.lab.compare.update_density import DensityRow
    from manyhands.workloads.logreg.synthetic import SparseProblem


@dataclass(frozen=True, kw_only=True)
class _CompareOptions:
    strategies: str = option(DEFAULT_STRATEGIES, "Strategies to compare, separated by semicolons.")
    workers: int = option(2, "Processes on this host.")
    repeats: int = option(2, "Runs of each strategy, interleaved.")
    target: str | None = option(
        None, "Measure the time to this metric, such as accuracy=0.95.", shown="what the better half reaches"
    )
    slow: str | None = option(None, "Slow down a worker: worker=1,factor=5[,probability=0.1][,from=400].")
    bandwidth: str | None = option(
        None, "Limit TCP to this rate, such as 1Gbit; shared memory is not limited."
    )
    price: str | None = option(None, "Price per process and hour, by kind: worker=10,helper=1[,server=2].")
    device: str = option("cpu", "cpu, cuda, or cpu,cuda: every strategy on both.")
    seed: Seed = 0
    allow_overload: AllowOverload = False
    out: Path | None = option(None, "Directory for all runs.", shown="runs/compare-TASK-TIME")
    json: Path | None = json_option()


@dataclass(frozen=True, kw_only=True)
class _TaskOptions(_CompareOptions):
    steps: int | None = option(None, "Global batches per run.")
    epochs: int | None = option(None, "Passes over the data, instead of --steps.", shown="half of train's")
    rounds: int | None = option(None, "Rounds per run, for strategies that count rounds.")
    faults: bool = option(
        False,
        "Strike runs of each strategy: kills, a pause, a slow worker, a cut link, a full disk; and say what each cost.",
        "--faults",
    )
    elastic: bool = option(
        False, "Have a worker join and another leave a run of each strategy that allows it.", "--elastic"
    )


def _compare(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _TaskOptions) -> None:
    length = {**command_options.half_length(entry, common), "rounds": common.rounds}
    if common.faults or common.elastic:
        _score(entry, task_options, common, length)
        return
    _run(entry.name, lambda _: nullcontext((entry.build(**task_options), None)), common, length)


def _compare_workload(workload: CompiledWorkload[Any], given: dict[str, Any], asked: _CompareOptions) -> None:
    spare_the_compiler()
    options: Any = chosen(workload.name, workload.compared_type, given)

    @contextmanager
    def build(out: Path) -> Iterator[tuple[AnyTask, Score | None]]:
        from manyhands.lab.compare.run_comparison import Score

        with workload.compared(options, out) as made:
            score = Score(names=made.scores, of=made.score) if made.score is not None else None
            yield made.task, score

    _run(workload.name, build, asked, {})


def _run(
    name: str,
    build: Callable[[Path], AbstractContextManager[tuple[AnyTask, Score | None]]],
    common: _CompareOptions,
    length: Mapping[str, int | None],
) -> None:
    """Compare strategies on the task that `build` makes and scores; an empty `length`: as the task says."""
    from manyhands.engine.options import Slowdown
    from manyhands.lab.compare.bandwidth import Rate, enter, inside
    from manyhands.lab.compare.figures import Prices
    from manyhands.lab.compare.findings import paragraph
    from manyhands.lab.compare.run_comparison import CompareSettings, compare
    from manyhands.places.local.signals import ending

    parse_strategies(common.strategies)
    rate = Rate.parse(common.bandwidth) if common.bandwidth is not None else None
    settings = CompareSettings(
        workers=common.workers,
        **length,
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
    out = common.out or command_options.fresh_directory(f"compare-{name}")
    with ending() as end, build(out) as (task, score), progress_line() as report:
        found = compare(task, common.strategies, out=out, settings=settings, on_progress=report, score=score)
    for note in found.left_out:
        print(f"manyhands: {note}", file=sys.stderr)
    sentences = paragraph(found.figures, settings.slow, str(rate) if rate is not None else None)
    _leave(found, sentences, name, out, common.json)
    if found.interrupted:
        print(
            f"manyhands: ended by {end.name}, interrupted; the figures are those of the runs that had ended; a "
            f"comparison cannot be resumed, start again with: {command_options.command_anywhere(sys.argv)}",
            file=sys.stderr,
        )
        raise typer.Exit(end.status)
    _print_next(found, name, out)
    if found.failed:
        raise typer.Exit(1)


_NOT_SCORED = {"repeats": 2, "slow": None, "bandwidth": None, "price": None, "device": "cpu"}


def _score(
    entry: BuiltinTask[Any],
    task_options: dict[str, Any],
    common: _TaskOptions,
    length: Mapping[str, int | None],
) -> None:
    """What faults, joins and leaves cost each strategy, each in a run of its own."""
    from manyhands.cli.command_process import child_command
    from manyhands.cli.runs import ended_by_signal
    from manyhands.lab.compare.compare_report import measures_table
    from manyhands.lab.compare.run_comparison import CompareSettings, requests_of
    from manyhands.lab.faults import score_page
    from manyhands.lab.faults.scorecard import FaultsAsked, score
    from manyhands.lab.sweep.run_sweep import usable_cores
    from manyhands.observe.draw.time_table import words_table

    flags = " ".join(f"--{name}" for name in ("faults", "elastic") if getattr(common, name))
    for name, usual in _NOT_SCORED.items():
        if getattr(common, name) != usual:
            raise UserError(f"--{name} does not go with {flags}, where each run is made once; leave it out")
    strategies = parse_strategies(common.strategies)
    settings = CompareSettings(
        workers=common.workers,
        steps=length["steps"],
        epochs=length["epochs"],
        rounds=length["rounds"],
        seed=common.seed,
        target=Target.parse(common.target) if common.target is not None else None,
        allow_overload=common.allow_overload,
    )
    requests, _ = requests_of(entry.build(**task_options), strategies, settings)
    out = common.out or command_options.fresh_directory(f"faults-{entry.name}")
    cores = usable_cores()
    asked = FaultsAsked(
        words=["train", entry.name, *command_options.own_words(entry, task_options)],
        strategies=strategies,
        requests=requests,
        workers=common.workers,
        seed=common.seed,
        out=out,
        launch=lambda words: child_command(cores, words),
        faults=common.faults,
        elastic=common.elastic,
        target=settings.target,
    )
    with ended_by_signal(), progress_line() as report:
        found = score(asked, report)
    sentences = score_page.score_sentences(found)
    title = f"{entry.name} under faults" if common.faults else f"{entry.name} with workers that come and go"
    leave_findings(
        out,
        common.json,
        [measures_table(found.alone), *(words_table(*one) for one in score_page.tables(found, title))],
        sentences,
        {"task": entry.name, "workers": common.workers, **found.to_dict()},
        lambda command, facts: score_page.score_page(found, sentences, title, command, facts),
    )
    if found.interrupted or found.problems:
        raise typer.Exit(1)


def _leave(found: Comparison, sentences: list[str], task: str, out: Path, json_file: Path | None) -> None:
    from manyhands.lab.compare.compare_report import measures_table, promises_table, report, scores_table

    figures, title = found.figures, f"{task} under {len(found.figures.rows)} strategies"
    scores = [scores_table(figures)] if figures.scores else []
    leave_findings(
        out,
        json_file,
        [measures_table(figures), *scores, promises_table(figures)],
        sentences,
        {"task": task, **figures.to_dict(), "paragraph": sentences, "notes": found.notes},
        lambda command, facts: report(figures, sentences, title, command, facts, found.notes),
    )


def _print_next(found: Comparison, task: str, out: Path) -> None:
    """What to look at next: the fastest run, and how far more workers would go; nothing where no run ended."""
    ended = [row for row in found.figures.rows if row.runs and row.samples_per_s is not None]
    if not ended:
        return
    best = max(ended, key=lambda row: row.samples_per_s.median if row.samples_per_s else 0.0)
    folder = out / Trial(place=best.runs[0].place, repeat=best.runs[0].repeat).folder(best.strategy)
    commands: dict[str, tuple[object, ...]] = {
        "where_the_time_of_the_fastest_goes": ("explain", folder),
        "its_page": ("show", folder),
    }
    if task in TASK_NAMES:
        commands["how_far_more_workers_help"] = ("scaling", task)
    print_next(**commands)


_MOST_EXAMPLES = 200_000


@dataclass(frozen=True, kw_only=True)
class _SparseOptions:
    density: str = option("0.002,0.02,0.2", "Shares of all features in an example, separated by commas.")
    features: int = option(1000, "Number of features.")
    nonzeros: int = option(2_000_000, "Feature values in all examples together: the work of a pass.")
    strategies: str = option(
        "single; hogwild; hogwild order=locked", "Strategies; the others are compared to the first."
    )
    workers: int = option(2, "Workers of strategies with several.")
    repeats: int = option(1, "Runs of each strategy, interleaved.")
    passes: int = option(5, "Passes over the examples.")
    learner: str = option("adagrad", "Learning rule: sgd, adagrad or ftrl.")
    seed: int = option(0, "Fixes the examples and all other randomness.")
    allow_overload: AllowOverload = False
    out: Path | None = option(None, "Directory for all runs.", shown="runs/compare-sparse-TIME")
    json: Path | None = json_option()


def _compare_sparse(asked: _SparseOptions) -> None:
    """Compare strategies on sparse problems of several densities: HOGWILD! against update density."""
    from manyhands.data.store.atomic import make_output, require_empty
    from manyhands.lab.compare.update_density import density_rows
    from manyhands.native.warming import prepare
    from manyhands.places.local.signals import ending
    from manyhands.workloads.logreg.synthetic import shared_chance

    parse_strategies(asked.strategies)
    problems = _problems(asked)
    out = asked.out or command_options.fresh_directory("compare-sparse")
    require_empty(out)
    make_output(out)
    prepare("logreg")
    found, failed = {}, False
    with ending() as end:
        for problem in problems:
            done = _one(asked, problem, out)
            if done.interrupted:
                again = command_options.command_anywhere(sys.argv)
                print(f"manyhands: ended by {end.name}; start again with: {again}", file=sys.stderr)
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


def _problems(asked: _SparseOptions) -> list[SparseProblem]:
    from manyhands.workloads.logreg.synthetic import SparseProblem

    problems: dict[str, SparseProblem] = {}
    for text in parse_values(asked.density, ","):
        try:
            density = float(text)
        except ValueError:
            raise UserError(f"--density {text!r} is not a number; write several as 0.002,0.02,0.2") from None
        problem = SparseProblem(features=asked.features, examples=2, density=density, seed=asked.seed)
        examples = max(2, min(_MOST_EXAMPLES, asked.nonzeros // problem.nonzeros))
        name = f"{density:g}"  # of its files, too
        if name in problems:
            raise UserError(f"--density has {name} twice; leave one of them out")
        problems[name] = replace(problem, examples=examples)
    return list(problems.values())


def _one(asked: _SparseOptions, problem: SparseProblem, out: Path) -> Comparison:
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
        workers=asked.workers, seed=asked.seed, repeats=asked.repeats, allow_overload=asked.allow_overload
    )
    before = f"density {problem.density:g} · "
    with Spool() as spool, progress_line(before) as report:
        write_examples(problem, path)
        parsed = parse_examples(Examples(RowFile(str(path), Reading())), 0, spool)
        task = LogregTask.of(parsed, options)
        return compare(task, asked.strategies, out=out / path.stem, settings=settings, on_progress=report)


def _leave_sparse(asked: _SparseOptions, rows: list[DensityRow], out: Path) -> None:
    from manyhands.lab.compare import update_density as density
    from manyhands.observe.draw.time_table import words_table

    found, workers = density.density_sentences(rows), f"{asked.workers} worker{'s' * (asked.workers != 1)}"
    title = f"Update density · {asked.features:,} features · {workers}"
    about = {"features": asked.features, "workers": asked.workers, "repeats": asked.repeats}
    leave_findings(
        out,
        asked.json,
        [words_table(title, density.DENSITY_HEAD, density.density_cells(rows))],
        found,
        {**about, "rows": [asdict(row) for row in rows], "told": found},
        lambda command, facts: density.density_page(title, rows, found, command, facts),
    )
    largest = max(out.glob("*.libsvm"), key=lambda path: path.stat().st_size)
    hogwild = ("--strategy", "hogwild", "--no-bias")
    print_next(
        one_of_the_problems_alone=("train", "logreg", *hogwild, "--train", largest),
        other_densities=("compare", "sparse", "--density", "0.001,0.01,0.1,1"),
    )


compare_app = command_options.task_commands(
    _compare, "Compare strategies on {help}.", callback=start_own_workers
)
for _workload in offered("training"):
    command_options.add_workload_command(
        compare_app,
        _workload.name,
        _workload.compared_type,
        _CompareOptions,
        partial(_compare_workload, _workload),
        _workload.compare_help,
    )
compare_app.command("sparse")(from_options(_compare_sparse))
