"""What a fault cost, from what was seen of the run: closed cases, and each promise against what happened."""

from __future__ import annotations

import pytest

from manyhands import Strategy
from manyhands.lab.faults.fault_costs import (
    FAULTS,
    PAUSE_S,
    Fault,
    StepSeen,
    StruckRun,
    broken_promise,
    fault_cost,
    faults_of,
)

WORKER, SERVER, ALL, STOPPED, SLOWER, CUT, FULL = FAULTS


def steps(first_s: float, each_s: float, *numbers: int) -> list[StepSeen]:
    return [StepSeen(at_s=first_s + place * each_s, step=step) for place, step in enumerate(numbers)]


def names(strategy: str, workers: int) -> list[str]:
    return [fault.name for fault in faults_of(Strategy.parse(strategy), workers)]


def test_faults_are_those_that_a_strategy_can_meet() -> None:
    assert names("single", 1) == [ALL.name, FULL.name]
    assert names("mirrored", 2) == [WORKER.name, ALL.name, STOPPED.name, SLOWER.name, FULL.name]
    assert names("ps", 2) == [fault.name for fault in FAULTS if fault is not CUT]
    assert names("ps link=tcp", 2) == [fault.name for fault in FAULTS]


def test_a_run_that_goes_on() -> None:
    seen = [*steps(0.0, 0.5, 1, 2, 3), *steps(3.0, 0.5, 4, 5)]
    cost = fault_cost(
        WORKER, StruckRun(struck_s=1.25, seen=seen, final={"loss": 1.5}, lost=2), {"loss": 1.0, "x": 0.0}
    )
    assert cost.went_on
    assert cost.still_s == pytest.approx(3.0 - 1.25)  # from the fault, not from the step before
    assert (cost.repeated, cost.lost, cost.changes) == (0, 2, {"loss": 0.5})


def test_a_run_that_is_continued_repeats_what_came_after_the_checkpoint() -> None:
    struck = StruckRun(
        struck_s=1.0,
        seen=steps(0.0, 0.5, 8, 9, 10),
        kept_step=6,
        continued=[*steps(4.0, 0.5, 7, 8, 9, 10, 11), StepSeen(at_s=6.5, step=12)],
        final={"loss": 1.0},
    )
    cost = fault_cost(WORKER, struck, {"loss": 1.0})
    assert not cost.went_on
    assert cost.ended_well
    assert cost.repeated == 4
    assert cost.still_s == pytest.approx(6.0 - 1.0)  # steps 7 to 10 had been done before
    assert cost.changes == {"loss": 0.0}


def test_a_slow_worker_is_told_by_the_steps_before_and_during() -> None:
    seen = [*steps(0.0, 0.1, *range(1, 12)), *steps(1.2, 0.3, *range(12, 20)), *steps(20.0, 0.1, 20, 21)]
    cost = fault_cost(SLOWER, StruckRun(struck_s=1.0, seen=seen, slow_s=PAUSE_S, final={"loss": 1.0}), {})
    assert cost.slower == pytest.approx(2.875, abs=0.2)
    assert cost.still_s is None
    none = fault_cost(SLOWER, StruckRun(struck_s=1.0, seen=steps(0.0, 0.1, 1, 2), slow_s=0.0), {})
    assert none.slower is None


@pytest.mark.parametrize(
    ("strategy", "fault", "went_on", "says"),
    [
        ("mirrored", WORKER, False, ""),  # which it does not promise
        ("ps", WORKER, False, "ps, worker killed: it promises to go on, and ended: lost worker 1"),
        ("ps", WORKER, True, ""),
        ("ps", SERVER, False, "ps, server killed: it promises to go on, and ended: lost worker 1"),
        ("ps", ALL, False, ""),
        ("ps link=tcp", CUT, False, ""),  # which nobody promises to outlive
        (
            "single",
            FULL,
            False,
            "single, disk full 2 s: every run goes on, and this one ended: lost worker 1",
        ),
        ("single", FULL, True, ""),
    ],
)
def test_a_promise_is_held_against_what_happened(
    strategy: str, fault: Fault, went_on: bool, says: str
) -> None:
    struck = StruckRun(
        struck_s=1.0,
        seen=steps(0.0, 0.5, 1, 2, 3),
        kept_step=None if went_on else 1,
        final={"loss": 1.0},
        sentence="" if went_on else "lost worker 1",
    )
    assert broken_promise(Strategy.parse(strategy), fault, fault_cost(fault, struck, {})) == says


def test_a_run_that_cannot_be_continued_breaks_its_promise() -> None:
    struck = StruckRun(
        struck_s=1.0, seen=steps(0.0, 0.5, 1, 2), kept_step=0, sentence="the checkpoint is damaged"
    )
    said = broken_promise(Strategy.parse("mirrored"), ALL, fault_cost(ALL, struck, {}))
    assert said == "mirrored, all killed: the run could not be continued: the checkpoint is damaged"
