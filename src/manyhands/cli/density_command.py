"""`manyhands compare sparse`: HOGWILD! against update density, on examples that are made for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.command_options import (
    AllowOverload,
    add_command,
    check_writable,
    command_elsewhere,
    fresh_directory,
    print_next,
)
from manyhands.cli.compare_command import show_progress
from manyhands.cli.leaving import Findings, leave_findings
from manyhands.errors import UserError
from manyhands.lab.compare.comparison import parse_strategies
from manyhands.lab.sweep.trials import parse_values

if TYPE_CHECKING:
    from manyhands.lab.compare.run_comparison import Comparison
    from manyhands.lab.compare.update_density import DensityRow
    from manyhands.workloads.logreg.synthetic import SparseProblem

__all__ = ["add_sparse"]

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


def add_sparse(compare_app: typer.Typer) -> None:
    """Offer `compare sparse`."""
    add_command(compare_app, "sparse", _CompareSparse, _compare)


def _compare(asked: _CompareSparse) -> None:
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
    _leave(asked, density_rows(found), out)
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
    """All strategies at one density."""
    from manyhands.data.row_files import Reading, RowFile
    from manyhands.lab.compare.run_comparison import CompareSettings, compare
    from manyhands.workloads.logreg.examples import Examples
    from manyhands.workloads.logreg.options import LogregOptions
    from manyhands.workloads.logreg.spool import Spool
    from manyhands.workloads.logreg.synthetic import write_examples
    from manyhands.workloads.logreg.task import LogregTask
    from manyhands.workloads.logreg.training import parse_examples

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


def _leave(asked: _CompareSparse, rows: list[DensityRow], out: Path) -> None:
    from manyhands.lab.compare.update_density import (
        DENSITY_HEAD,
        density_cells,
        density_page,
        density_sentences,
    )

    told = density_sentences(rows)
    title = (
        f"Update density · {asked.features:,} features · {asked.workers} worker{'s' * (asked.workers != 1)}"
    )
    about = {"features": asked.features, "workers": asked.workers, "repeats": asked.repeats}
    found = Findings(
        title=title,
        head=DENSITY_HEAD,
        cells=density_cells(rows),
        told=told,
        figures={**about, "rows": [row.to_dict() for row in rows]},
        page=lambda command, facts: density_page(title, rows, told, command, facts),
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
