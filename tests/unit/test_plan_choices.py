"""What choosing by predictions costs, on rows whose best plans are known."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

CHOICES = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "plan_choices.py"))
again, choices, regret_of = CHOICES["again"], CHOICES["choices"], CHOICES["regret_of"]


def row(
    strategy: str, memory: int, predicted: list[float], seen: list[float | None], workers: int = 4
) -> dict[str, Any]:
    return {
        "strategy": strategy, "workers": workers, "memory": memory, "predicted_rounds_ms": predicted,
        "seen_rounds_ms": seen,
    }  # fmt: skip


ROWS = [
    row("single", 100, [5.0, 5.0], [4.0, 4.0], workers=1),
    row("mirrored", 100, [3.0, 5.0], [3.0, 3.0]),
    row("central", 60, [4.0, 4.0], [2.0, 2.4]),
    row("sharded", 30, [9.0, 9.0], [8.0, 8.0]),
    row("hogwild", 100, [1.0, 1.0], [2.0, 1.0]),
]


def test_a_choice_by_trials_is_judged_by_the_other_rounds_and_one_without_by_all() -> None:
    equal = [one for one in choices(ROWS) if one["constraint"] == "equal"]
    assert [one["taken"]["predicted"] for one in equal] == ["mirrored", "central"]
    assert equal[0]["regret"]["predicted"] == pytest.approx(3.0 / 2.2 - 1, abs=1e-4)
    assert equal[1]["regret"]["predicted"] == 0
    assert equal[0]["regret"]["single"] == pytest.approx(4.0 / 2.2 - 1, abs=1e-4)
    slow, fast = row("single", 100, [1, 1], [4, 4], 1), row("mirrored", 100, [2, 2], [3, 5])
    tried = [one["regret"]["tried"] for one in choices([slow, fast]) if one["constraint"] == "equal"]
    assert tried == [pytest.approx(5 / 4 - 1), pytest.approx(4 / 3 - 1, abs=1e-4)]  # lucky, then unlucky


def test_plans_far_from_the_best_of_every_case_run_once() -> None:
    rows = [{**one, "predicted": one["predicted_rounds_ms"][0]} for one in ROWS]
    rows += [
        {**row("ps", 100, [], []), "predicted": 9.0},
        {**row("ps servers=2", 100, [], []), "predicted": 9.1},
        {**row("ps servers=4", 100, [], []), "predicted": 8.9},
    ]
    first = {one["strategy"]: 2.0 for one in rows} | {
        "sharded": 8.0,
        "ps servers=2": 2.6,
        "ps servers=4": 2.6,
    }
    assert again(rows, first) == ["single", "mirrored", "central", "hogwild", "ps", "ps servers=4"]


def test_a_plan_that_ran_once_is_judged_by_that() -> None:
    once = [*ROWS, row("local", 100, [0.5, 0.5], [9.0, None])]
    found = [one for one in choices(once) if one["constraint"] == "none"]
    assert [one["taken"]["predicted"] for one in found] == ["local", "local"]
    assert {one["regret"]["predicted"] for one in found} == {9.0 / 1.5 - 1}


def test_every_case_leaves_other_plans_and_at_least_two() -> None:
    found = [one for one in choices(ROWS) if one["round"] == 0]
    assert len({one["constraint"] for one in found}) == len(found)
    assert all(one["plans"] >= 2 for one in found)
    names = {one["constraint"]: one["plans"] for one in found}
    assert names["equal"] == 4
    assert names["none"] == 5
    assert names["equal, 70% of the memory"] == 2
    assert "sync" not in names  # the same plans as those that are equal
    assert "none, 70% of the memory" not in names
    assert "equal, 35% of the memory" not in names  # sharded alone


def test_a_rule_without_a_choice_counts_against_it() -> None:
    small = [one for one in choices(ROWS) if one["constraint"] == "equal, 70% of the memory"]
    assert regret_of(small, "mirrored", 0.1)["within_5_percent"] == 0
    assert regret_of(small, "predicted", 0.1) == {"within_5_percent": 1, "within_noise": 1, "worst": 0}
