"""What workers tell in any order, put in order; and a loop of one's own refuses what it cannot run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equality import OPTIMIZERS, make_task
from manyhands.engine.options import Options
from manyhands.engine.request import Length, Request
from manyhands.engine.run import RowsInOrder, overlap_summary
from manyhands.errors import UserError
from manyhands.interop.own_loop.connect import choose
from manyhands.strategies.hogwild.strategy import Hogwild
from manyhands.strategy import Strategy


def step(number: int) -> dict[str, Any]:
    return {"step": number, "loss": 1.0 / number}


def evaluation(number: int) -> dict[str, Any]:
    return {"step": number, "metrics": {"evaluation_loss": 0.5}}


@given(st.permutations(range(1, 13)), st.lists(st.integers(1, 4), min_size=12, max_size=12))
def test_rows_come_out_in_order_whatever_the_order_they_came_in(order: list[int], sizes: list[int]) -> None:
    rows = RowsInOrder(steps_done=0)
    report = [
        row
        for number in order
        for row in ([step(number)] if number % 5 else [evaluation(number), step(number)])
    ]
    out: list[dict[str, Any]] = []
    for size in sizes:
        portion, report = report[:size], report[size:]
        out += rows.add(portion)
        seen = [row["step"] for row in out if "loss" in row]
        assert seen == list(range(1, len(seen) + 1))
    out += rows.add(report)
    assert rows.rest() == []
    expected = [row for n in range(1, 13) for row in ([step(n)] if n % 5 else [step(n), evaluation(n)])]
    assert out == expected


def test_rows_behind_a_step_that_never_came_are_kept_for_the_end() -> None:
    rows = RowsInOrder(steps_done=4)
    assert rows.add([step(7), evaluation(4), step(5)]) == [evaluation(4), step(5)]
    assert rows.rest() == [step(7)]


def test_overlaps_of_all_workers_add_up() -> None:
    assert overlap_summary([{"0": 3, "2": 1}, {"1": 4}]) == {
        "mean": 6 / 8,
        "max": 2,
        "histogram": {"0": 3, "1": 4, "2": 1},
    }
    assert overlap_summary([]) == {"mean": 0.0, "max": 0, "histogram": {}}


@pytest.mark.parametrize("text", ["hogwild hands=threads", "ps push=parameters", "federated"])
def test_a_loop_of_ones_own_names_what_it_can_run(text: str) -> None:
    with pytest.raises(UserError, match=rf"strategy={text} does not support .* use another strategy"):
        choose(Strategy.parse(text), [range(2)])


def test_a_gpu_is_refused_with_what_to_use() -> None:
    task = make_task(OPTIMIZERS["sgd"])
    with pytest.raises(UserError, match=r"device=cuda: hogwild .* strategy=mirrored for GPUs"):
        Request.make(task, Hogwild(), 2, Length(steps=3), 0, Options(), "cuda")
