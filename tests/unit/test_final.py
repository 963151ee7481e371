"""One run, one final loss: whoever is asked, it is that of the step with the greatest number."""

import dataclasses

import numpy as np
import pytest

from manyhands.lab.compare.figures import Measured, Point
from manyhands.observe.analyse.run_view import Gather
from manyhands.observe.draw.notebook import facts_of, loss_curve
from manyhands.observe.record.checked_values import final_loss, final_metrics
from manyhands.observe.record.events import NOBODY, RECORD, EventKind

LOSSES = {1: 2.0, 3: 1.25, 4: 0.5, 2: 1.5}
"""By step, in the order in which they arrived: two workers that do not wait for each other."""

ROWS = [
    *({"step": step, "loss": loss, "at_s": 0.1 * n} for n, (step, loss) in enumerate(LOSSES.items(), 1)),
    {"step": 4, "metrics": {"accuracy": 0.9}, "at_s": 0.5},
    {"step": 2, "metrics": {"accuracy": 0.7}, "at_s": 0.6},
]


def gathered() -> Gather:
    """The same run by its events: worker 0 took batches 0 and 1, worker 1 batches 2 and 3."""
    gather = Gather(task="digits", strategy="ps consistency=async", steps_asked=4, workers=2)
    records = np.zeros(4, RECORD)
    records["kind"], records["peer"], records["count"] = EventKind.STEP, NOBODY, 8
    records["role"], records["step"] = [0, 1, 1, 0], [0, 2, 3, 1]
    records["value"] = [LOSSES[step + 1] for step in records["step"]]
    records["start_ns"], records["duration_ns"] = 10**9 * np.arange(1, 5), 10**9
    for role in (0, 1):
        gather.meet(role, f"worker-{role}")
    gather.add_events(records)
    return gather


def test_the_order_in_which_rows_arrive_does_not_matter() -> None:
    for rows in (ROWS, ROWS[::-1], ROWS[3:] + ROWS[:3]):
        assert final_loss(rows) == 0.5
        assert final_metrics(rows) == {"accuracy": 0.9}


def test_of_a_step_that_is_told_twice_the_newer_row_counts_and_what_is_not_told_never() -> None:
    rows = [{"step": 1, "loss": 2.0}, {"step": 1, "loss": 1.0}, {"step": 2, "loss": None}]
    assert final_loss(rows) == 1.0
    assert final_loss([]) is None
    assert final_metrics(rows) == {}


@pytest.mark.parametrize("ended", [False, True])
def test_the_page_and_the_terminal_show_the_loss_of_the_last_step(ended: bool) -> None:
    gather = gathered()
    gather.add_rows(ROWS)
    if ended:
        gather.summary = {"samples_per_s": 1.0}
    view = gather.view(6 * 10**9)
    assert (view.loss, view.final) == (0.5, {"accuracy": 0.9})


def test_a_notebook_shows_the_loss_of_the_last_step() -> None:
    steps = [row for row in ROWS if "loss" in row]
    assert dict(facts_of({}, steps))["loss"] == "2 → 0.5"
    assert "from 2 to 0.5" in loss_curve(steps)


def test_a_comparison_shows_the_loss_of_the_last_step() -> None:
    points = [
        Point(step=row["step"], at_s=row["at_s"], values=row.get("metrics") or {"loss": row["loss"]})
        for row in ROWS
    ]
    empty = {field.name: 0 for field in dataclasses.fields(Measured)}
    run = Measured(**empty | {"losses": tuple(points[:4]), "evaluations": tuple(points[4:])})  # type: ignore[arg-type]
    assert run.final == {"loss": 0.5, "accuracy": 0.9}
