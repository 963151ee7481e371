"""HOGWILD! against density: examples as scikit-learn reads them, chances as scipy has them, and what is said."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
from sklearn.datasets import load_svmlight_file
from typer.testing import CliRunner

from compared import measured
from manyhands.cli.main import app
from manyhands.errors import UserError
from manyhands.lab.compare.comparison import parse_strategies
from manyhands.lab.compare.figures import Figures, figures
from manyhands.lab.compare.update_density import density_cells, density_page, density_rows, density_sentences
from manyhands.workloads.logreg.options import LogregOptions
from manyhands.workloads.logreg.synthetic import SparseProblem, shared_chance, write_examples
from manyhands.workloads.logreg.task import LogregTask


@pytest.mark.parametrize(
    ("features", "nonzeros"), [(1000, 2), (1000, 20), (50, 25), (50, 26), (10, 10), (7, 1)]
)
def test_the_chance_to_share_is_the_hypergeometric_one(features: int, nonzeros: int) -> None:
    none = scipy.stats.hypergeom(features, nonzeros, nonzeros).pmf(0)
    assert shared_chance(features, nonzeros) == pytest.approx(1 - none, rel=1e-9)


def test_examples_have_the_density_that_was_asked_for(tmp_path: Path) -> None:
    problem = SparseProblem(features=80, examples=5000, density=0.05, seed=3)
    write_examples(problem, tmp_path / "a")
    table, labels = load_svmlight_file(str(tmp_path / "a"), n_features=80)
    assert table.shape == (5000, 80)
    assert set(np.diff(table.indptr)) == {4}
    assert set(table.data) == {1.0, -1.0}
    assert 0.2 < (labels > 0).mean() < 0.8
    assert np.asarray((table != 0).mean(0)).min() > 0.03, "every feature is drawn alike"
    pairs = np.random.default_rng(0).integers(0, 5000, (4000, 2))
    shared = (
        np.asarray(abs(table[pairs[:, 0]]).multiply(abs(table[pairs[:, 1]])).sum(1))[
            pairs[:, 0] != pairs[:, 1]
        ]
        > 0
    )
    assert shared.mean() == pytest.approx(shared_chance(80, 4), abs=0.03)
    write_examples(problem, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    "change", [{"density": 0.0}, {"density": 1.5}, {"features": 0}, {"examples": 1}, {"seed": -1}]
)
def test_problems_that_make_no_sense_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(change))):
        SparseProblem(**{"features": 10, "examples": 5, "density": 0.5, **change})  # type: ignore[arg-type]


def compared(*runs: tuple[float, float]) -> Figures:
    """By strategy: the seconds of a step, and the loss of the last pass."""
    strategies = [(one, 2) for one in parse_strategies("single; hogwild")]
    found = [measured(n, step_s=step_s).scored({"pass_loss": loss}) for n, (step_s, loss) in enumerate(runs)]
    return figures(strategies, found, None, 5)


def test_rows_are_beside_the_first_strategy_at_the_same_density() -> None:
    found = {0.2: (1.0, compared((0.1, 0.5), (0.2, 0.6))), 0.01: (0.05, compared((0.1, 0.4), (0.05, 0.4)))}
    rows = density_rows(found)
    assert [(row.density, row.strategy) for row in rows] == [
        (0.01, "single"),
        (0.01, "hogwild"),
        (0.2, "single"),
        (0.2, "hogwild"),
    ]
    assert [row.speedup for row in rows] == pytest.approx([1, 2, 1, 0.5])
    assert [row.excess for row in rows] == pytest.approx([0, 0, 0, 0.1])
    assert density_cells(rows)[1] == ["hogwild", "0.01", "5.0 %", "200", "2.00", "0.4000", "+0.0000"]
    (report,) = density_sentences(rows)
    assert "hogwild is 2.00 times as fast as single where two examples share a feature in 5.0 %" in report
    assert "0.50 times where they do in 100 %; its loss differs by +0.0000 and +0.1000." in report
    page = density_page("<t>", rows, [report], "c", {})
    assert "&lt;t&gt;" in page
    assert page.count("<figure") == 2
    assert "density, log scale" in page


def test_densities_are_evenly_spaced_by_their_powers_of_ten() -> None:
    rows = density_rows({10.0**-n: (1.0, compared((0.1, 0.5), (0.1, 0.5))) for n in range(4)})
    drawn = re.findall(r'<path class="curve[^"]*"[^>]* d="M([^"]+)"', density_page("t", rows, [], "c", {}))
    assert drawn
    for path in drawn:
        xs = [float(point.split(",")[0]) for point in path.split()]
        assert np.diff(xs) == pytest.approx([np.diff(xs)[0]] * 3, abs=0.2)


def test_without_the_first_strategy_there_is_nothing_to_stand_beside() -> None:
    strategies = [(one, 2) for one in parse_strategies("single; hogwild")]
    alone = figures(strategies, [measured(1).scored({"pass_loss": 0.5})], None, 5)
    assert density_rows({0.1: (0.5, alone), 0.2: (0.6, compared((0.1, 0.5), (0.1, 0.5)))})[0].density == 0.2


@pytest.mark.parametrize("nonzeros", [1, 10, 100, 1000])
def test_at_every_density_a_pass_has_steps_for_all_workers(nonzeros: int) -> None:
    examples = min(200_000, 2_000_000 // nonzeros)
    parsed = SimpleNamespace(examples=examples, entries=examples * nonzeros, scale=1.0)
    task = LogregTask.of(parsed, LogregOptions())  # type: ignore[arg-type]
    assert examples / task.batch_size > 14


def test_what_did_not_run_has_no_row() -> None:
    strategies = [(one, 2) for one in parse_strategies("single; hogwild")]
    nothing = figures(strategies, [], None, 5)
    assert density_rows({0.1: (0.5, nothing)}) == []
    assert "Nothing to compare" in density_sentences([])[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--density", "0.02,0.2,0.020"], "--density has 0.02 twice; leave one of them out"),
        (["--density", "0.02,0.0200000001"], "--density has 0.02 twice; leave one of them out"),
        (["--density", "much"], "--density 'much' is not a number"),
        (["--seed", "-1"], "seed=-1 must be an integer of at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    words: list[str], sentence: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["compare", "sparse", *words, "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, UserError), done.exception
    assert sentence in str(done.exception)
    assert not list(tmp_path.iterdir())
