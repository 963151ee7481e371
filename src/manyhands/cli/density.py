"""`manyhands compare sparse`: HOGWILD! against update density, on examples that are made for it."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.commands import (
    AllowOverload,
    add_command,
    check_writable,
    command_elsewhere,
    fresh_directory,
    print_next,
    write_json,
)
from manyhands.cli.compare import show_progress
from manyhands.cli.status_line import table_console
from manyhands.compare.plan import parse_strategies
from manyhands.errors import UserError
from manyhands.sweep.plan import parse_values

if TYPE_CHECKING:
    from manyhands.compare.density import DensityRow
    from manyhands.compare.run import Comparison
    from manyhands.regression.synthetic import SparseProblem

__all__ = ["add_sparse"]

_REPORT = "report.html"
_WIDTH = 110  # of the table in a file or a pipe
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
    from manyhands.cluster.signals import ending
    from manyhands.compare.density import density_rows
    from manyhands.compiled.warming import prepare
    from manyhands.regression.synthetic import shared_chance

    check_writable(asked.json)
    parse_strategies(asked.strategies)
    problems = _problems(asked)
    out = asked.out or fresh_directory("compare-sparse")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty; choose another")
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
    from manyhands.regression.synthetic import SparseProblem

    problems = []
    for text in parse_values(asked.density, ","):
        try:
            density = float(text)
        except ValueError:
            raise UserError(f"--density {text!r} is no number; list several as in 0.002,0.02,0.2") from None
        problem = SparseProblem(features=asked.features, examples=2, density=density, seed=asked.seed)
        examples = max(2, min(_MOST_EXAMPLES, asked.nonzeros // problem.nonzeros))
        problems.append(
            SparseProblem(features=asked.features, examples=examples, density=density, seed=asked.seed)
        )
    return problems


def _one(asked: _CompareSparse, problem: SparseProblem, out: Path) -> Comparison:
    """All strategies at one density."""
    from manyhands.compare.run import CompareSettings, compare
    from manyhands.data.row_files import Reading, RowFile
    from manyhands.regression.examples import Examples
    from manyhands.regression.options import LogregOptions
    from manyhands.regression.spool import Spool
    from manyhands.regression.synthetic import write_examples
    from manyhands.regression.task import LogregTask
    from manyhands.regression.training import parse_examples

    out.mkdir(parents=True, exist_ok=True)
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
    from manyhands.compare.density import DENSITY_HEAD, density_cells, density_page, density_sentences
    from manyhands.compare.machine import machine
    from manyhands.draw.table import words_table
    from manyhands.store.atomic import write_atomically

    told, command = density_sentences(rows), shlex.join(["manyhands", *sys.argv[1:]])
    title = (
        f"Update density · {asked.features:,} features · {asked.workers} worker{'s' * (asked.workers != 1)}"
    )
    page = density_page(title, rows, told, command, machine())
    write_atomically(out / _REPORT, [page.encode()])
    figures = {
        "features": asked.features,
        "workers": asked.workers,
        "repeats": asked.repeats,
        "command": command,
        "machine": machine(),
        "rows": [row.to_dict() for row in rows],
        "told": told,
    }
    write_json(out / "figures.json", figures)
    write_json(asked.json, figures)
    console = table_console(_WIDTH)
    console.print(words_table(title, DENSITY_HEAD, density_cells(rows)), highlight=False)
    console.print(" ".join(told), highlight=False, markup=False)
    console.print(f"report  {out / _REPORT}", highlight=False, markup=False, soft_wrap=True)
    largest = max(out.glob("*.libsvm"), key=lambda path: path.stat().st_size)
    print_next(
        one_of_the_problems_alone=f"train logreg --train {largest} --strategy hogwild --no-bias",
        other_densities="compare sparse --density 0.001,0.01,0.1,1",
    )
