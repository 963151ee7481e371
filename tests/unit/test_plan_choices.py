"""What choosing by predictions costs, on rows whose best plans are known."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

CHOICES = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "plan_choices.py"))
choices, regret_of = CHOICES["choices"], CHOICES["regret_of"]


def row(
    strategy: str, memory: int, predicted: list[float], seen: list[float], workers: int = 4
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


def test_a_choice_is_judged_by_the_other_rounds() -> None:
    equal = [one for one in choices(ROWS) if one["constraint"] == "equal"]
    assert [one["taken"]["predicted"] for one in equal] == ["mirrored", "central"]
    assert equal[0]["regret"]["predicted"] == pytest.approx(
        3.0 / 2.4 - 1
    )  # what round 1 saw, chosen by round 0
    assert equal[1]["regret"]["predicted"] == 0
    assert equal[0]["regret"]["tried"] == 0  # a trial sees that central is faster
    assert equal[0]["regret"]["single"] == pytest.approx(4.0 / 2.4 - 1, abs=1e-4)


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
