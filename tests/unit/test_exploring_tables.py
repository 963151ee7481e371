"""The tables of a scaling curve and of update density, from results that were never measured."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from compared import measured
from manyhands.lab.compare.comparison import parse_strategies
from manyhands.lab.compare.figures import figures
from manyhands.lab.compare.update_density import density_rows, density_sentences
from manyhands.lab.scaling.scaling_curve import scaling_curve, scaling_sentences

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = {"cores": "2 usable of 2", "system": "Linux x"}


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, which reads results from the test's own folder."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import render_exploring
    import results_read

    monkeypatch.setattr(results_read, "RESULTS", tmp_path)
    return render_exploring


def test_what_is_not_measured_says_by_which_command_it_is(tables: Any) -> None:
    assert "scaling digits --workers 1,2,4,8" in tables.scaling_speed()
    assert "--json benchmarks/results/density.json" in tables.density_speed()


def test_a_scaling_curve_is_a_row_for_each_number_of_workers(tables: Any, tmp_path: Path) -> None:
    curve = scaling_curve({1: [100], 2: [160, 170, 150], 4: [80]}, {1: 1, 2: 2, 4: 2}, {2: 0.1}, cores=2)
    result = {"task": "digits", "strategy": "mirrored", "repeats": 3, "machine": MACHINE}
    result |= {**curve.to_dict(), "told": scaling_sentences(curve)}
    (tmp_path / "scaling.json").write_text(json.dumps(result))
    text = tables.scaling_speed()
    assert "**digits, `mirrored`, 2 cores (Linux x), median of 3**" in text
    assert "| 2 | 160 | 150 to 170 | 1.60 | 80 % | 1.60 | 2.00 | 10 % |" in text
    assert "| 4 | 80 | 80 to 80 | 0.80 | 20 % | 2.29 | 2.00 | 0 % |" in text
    assert "The knee is at 2 workers" in text


def test_density_is_a_row_and_each_strategy_a_column(tables: Any, tmp_path: Path) -> None:
    strategies = [(one, 2) for one in parse_strategies("single; hogwild")]
    runs = [measured(n, step_s=0.1 / (n + 1)).scored({"pass_loss": 0.5 + n}) for n in range(2)]
    both, one = (figures(strategies, runs[:count], None, 5) for count in (2, 1))
    rows = density_rows({0.001: (0.001, both), 1.0: (1.0, one)})
    result = {"features": 1000, "workers": 2, "repeats": 3, "machine": MACHINE, "command": "manyhands c"}
    result |= {"rows": [asdict(row) for row in rows], "told": density_sentences(rows)}
    (tmp_path / "density.json").write_text(json.dumps(result))
    text = tables.density_speed()
    assert "loss above its loss, by `manyhands c`\n" in text
    assert "| 0.001 | 0.1 % | 100, 1.00×, +0.0000 | 200, 2.00×, +1.0000 |" in text
    assert "| 1 | 100.0 % | 100, 1.00×, +0.0000 | failed |" in text
