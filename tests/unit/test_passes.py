"""The mean loss of a pass, from rows in any order."""

from __future__ import annotations

import random
from typing import Any

import pytest

from manyhands.engine.run import PassLosses
from manyhands.task import Passes


def rows_of(steps: int, **more: Any) -> list[dict[str, Any]]:
    return [{"step": step, "loss": float(step), "at_s": step / 10, **more} for step in range(1, steps + 1)]


def losses(rows: list[dict[str, Any]]) -> dict[int, float]:
    return {row["step"]: row["metrics"]["pass_loss"] for row in rows if "metrics" in row}


def test_a_pass_is_reported_after_its_last_row_and_once() -> None:
    passes = PassLosses(Passes(steps=3))
    rows = rows_of(7)
    found = passes.add(rows[:4]) + passes.add(rows[4:])
    assert [row["step"] for row in found] == [1, 2, 3, 3, 4, 5, 6, 6, 7]
    assert losses(found) == {3: 2.0, 6: 5.0}
    assert found[3]["at_s"] == 0.3


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_rows_does_not_matter(seed: int) -> None:
    rows = rows_of(9)
    random.Random(seed).shuffle(rows)
    assert losses(PassLosses(Passes(steps=3)).add(rows)) == {3: 2.0, 6: 5.0, 9: 8.0}


def test_rows_from_before_count_and_are_not_told_again() -> None:
    rows = rows_of(6)
    before = PassLosses(Passes(steps=3)).add(rows[:4])
    assert losses(PassLosses(Passes(steps=3), before).add(rows[4:])) == {6: 5.0}


def test_weights_are_those_of_the_rows_or_of_the_pass() -> None:
    by_row = PassLosses(Passes(steps=2)).add(
        [{"step": 1, "loss": 1.0, "weight": 3}, {"step": 2, "loss": 5.0, "weight": 1}]
    )
    assert losses(by_row) == {2: 2.0}
    short = PassLosses(Passes(steps=2, weight=4.0, last_weight=1.0)).add(rows_of(2))
    assert losses(short) == {2: (4 * 1 + 1 * 2) / 5}
    given = PassLosses(Passes(steps=2, weight=4.0, last_weight=4.0, total=6.0)).add(rows_of(2))
    assert losses(given) == {2: 12 / 6}


def test_a_loss_that_is_no_number_completes_no_pass() -> None:
    assert not losses(PassLosses(Passes(steps=2)).add([{"step": 1, "loss": None}, {"step": 2, "loss": 1.0}]))
