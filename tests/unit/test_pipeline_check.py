"""The checker refuses every wrong table, with a sentence that names the turn."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from manyhands.strategies.common.collectives.schedule import ScheduleError
from manyhands.strategies.pipeline.schedule_cost import check, held_during
from manyhands.strategies.pipeline.schedules import (
    MOST_HELD,
    SCHEDULES,
    PartTimes,
    Pass,
    Schedule,
    StageWork,
    play,
)

EVERY = pytest.mark.parametrize("name", SCHEDULES)


def table(*turns: tuple[int, int, int, Pass], stages: int, microbatches: int, **facts: bool) -> Schedule:
    """A table by hand, of (tick, stage, micro-batch, work)."""
    return Schedule(
        name="by hand",
        stages=stages,
        microbatches=microbatches,
        work_items=tuple(
            StageWork(tick=t, stage=s, microbatch=m, work=w)
            for t, s, m, w in sorted(turns, key=lambda t: t[:2])
        ),
        **facts,
    )


def with_turns(schedule: Schedule, turns: list[StageWork]) -> Schedule:
    """The schedule with other turns, in the order that a table has."""
    return replace(schedule, work_items=tuple(sorted(turns, key=lambda turn: (turn.tick, turn.stage))))


F, B, W = Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHTS
TWO = ((0, 0, 0, F), (1, 1, 0, F), (2, 1, 0, B), (3, 0, 0, B))


def test_a_table_by_hand_is_right() -> None:
    check(table(*TWO, stages=2, microbatches=1))
    check(table(*TWO, (4, 1, 0, W), (7, 0, 0, W), stages=2, microbatches=1, splits_backward=True))
    ticks = ((0, 0, 0, F), (1, 0, 1, F), (2, 0, 1, B), (3, 0, 0, B))
    check(table(*ticks, stages=1, microbatches=2, over_time=True))


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (
            ((0, 0, 0, F), (0, 1, 0, F), (2, 1, 0, B), (3, 0, 0, B)),
            "forward of micro-batch 0 on stage 1 at tick 0 needs the output of the previous part, which is available "
            "after tick 0",
        ),
        (
            ((0, 0, 0, F), (1, 1, 0, F), (2, 1, 0, B), (2, 0, 0, B)),
            "backward of micro-batch 0 on stage 0 at tick 2 needs the gradient of the next part",
        ),
        (
            ((0, 0, 0, F), (2, 1, 0, F), (1, 1, 0, B), (3, 0, 0, B)),
            "backward of micro-batch 0 on stage 1 at tick 1 needs its own forward",
        ),
        (TWO[:3], "backward of micro-batch 0 on stage 0 is missing"),
        ((*TWO, (5, 1, 0, F)), "forward of micro-batch 0 on stage 1 at tick 5 was already done at tick 1"),
        ((*TWO, (5, 2, 0, F)), "there is no forward of micro-batch 0 on stage 2"),
        ((*TWO, (5, 1, 1, F)), "there is no forward of micro-batch 1 on stage 1"),
        ((*TWO, (5, 1, 0, W)), "there is no weight gradient of micro-batch 0 on stage 1"),
        ((*TWO, (-1, 1, 0, F)), "there is no forward of micro-batch 0 on stage 1 at tick -1"),
    ],
)
def test_what_is_wrong_is_named(turns: tuple[tuple[int, int, int, Pass], ...], said: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        check(table(*turns, stages=2, microbatches=1))
    assert str(raised.value).startswith("by hand of 2 stages and 1 micro-batches: ")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("turns", "facts", "said"),
    [
        (
            ((0, 0, 1, F), (1, 0, 0, F), (2, 0, 1, B), (3, 0, 0, B)),
            {"over_time": True},
            "forward of micro-batch 1 on stage 0 at tick 0 needs its own state after the previous slice",
        ),
        (
            ((0, 0, 0, F), (1, 0, 1, F), (2, 0, 0, B), (3, 0, 1, B)),
            {"over_time": True},
            "backward of micro-batch 0 on stage 0 at tick 2 needs the gradient of its state from the next slice",
        ),
        (
            ((0, 0, 0, F), (1, 0, 1, F), (2, 0, 0, W), (3, 0, 0, B), (4, 0, 1, B), (5, 0, 1, W)),
            {"splits_backward": True},
            "weight gradient of micro-batch 0 on stage 0 at tick 2 needs its own backward",
        ),
        (
            ((0, 0, 0, F), (1, 0, 1, F), (3, 0, 0, B), (4, 0, 1, B), (5, 0, 1, W)),
            {"splits_backward": True},
            "weight gradient of micro-batch 0 on stage 0 is missing",
        ),
        (
            ((0, 0, 0, F), (0, 0, 1, F), (2, 0, 0, B), (3, 0, 1, B)),
            {},
            "forward of micro-batch 1 on stage 0 at tick 0 overlaps forward of micro-batch 0",
        ),
    ],
)
def test_facts_of_a_schedule_are_needs(
    turns: tuple[tuple[int, int, int, Pass], ...], facts: dict[str, bool], said: str
) -> None:
    with pytest.raises(ScheduleError, match=said):
        check(table(*turns, stages=1, microbatches=2, **facts))


def test_turns_stand_by_tick() -> None:
    right = SCHEDULES["1f1b"](2, 2)
    with pytest.raises(ScheduleError, match="follows"):
        check(replace(right, work_items=right.work_items[::-1]))


@pytest.mark.parametrize(
    ("claimed", "name"), [("1f1b", "gpipe"), ("naive", "1f1b"), ("1f1b", "zb-h1"), ("naive", "wavefront")]
)
def test_more_activations_than_stated_are_refused(claimed: str, name: str) -> None:
    right = SCHEDULES[name](4, 8)
    with pytest.raises(
        ScheduleError, match=r"forward of micro-batch \d on stage \d at tick \d+ makes the activations"
    ):
        check(replace(right, name=claimed))
    check(replace(right, name="a name of its own"))
    with pytest.raises(ScheduleError, match="at most 1 are allowed"):
        check(replace(right, name="a name of its own"), lambda _schedule, _stage: 1)


@EVERY
def test_one_activation_less_than_the_peak_is_too_few(name: str) -> None:
    right = SCHEDULES[name](4, 8)
    most_held = MOST_HELD[name]
    for stage in range(4):
        with pytest.raises(ScheduleError, match=f"on stage {stage} at tick"):
            check(right, lambda schedule, one, short=stage: most_held(schedule, one) - (one == short))


def test_what_is_held_goes_up_and_down() -> None:
    held = [
        (turn.work.name[0], held) for turn, held in held_during(SCHEDULES["1f1b"](2, 3)) if turn.stage == 0
    ]
    assert held == [("F", 1), ("F", 2), ("B", 2), ("F", 2), ("B", 2), ("B", 1)]
    held = [
        (turn.work.name[0], held) for turn, held in held_during(SCHEDULES["zb-h1"](2, 2)) if turn.stage == 1
    ]
    assert held == [("F", 1), ("B", 1), ("F", 2), ("B", 2), ("W", 2), ("W", 1)]


@EVERY
def test_a_turn_less_or_twice_is_refused(name: str) -> None:
    right = SCHEDULES[name](3, 6)
    turns, end = list(right.work_items), right.work_items[-1].tick + 1
    for index, turn in enumerate(turns):
        with pytest.raises(
            ScheduleError, match=rf"{turn.work.value} of micro-batch {turn.microbatch}.* is missing"
        ):
            check(with_turns(right, turns[:index] + turns[index + 1 :]))
        with pytest.raises(
            ScheduleError, match=rf"{turn.work.value} of micro-batch {turn.microbatch}.*at tick {end} was"
        ):
            check(with_turns(right, [*turns, replace(turn, tick=end)]))


@EVERY
def test_a_turn_before_its_need_is_refused(name: str) -> None:
    """Every turn but the very first is moved to the front, where nothing has been done."""
    right = SCHEDULES[name](3, 6)
    first, *others = [replace(turn, tick=turn.tick + 1) for turn in right.work_items]
    for turn in others:
        if turn.work is F and right.part(turn) == 0 and not (right.over_time and turn.microbatch):
            continue  # the input is there from the beginning
        moved = [one for one in others if one is not turn]
        with pytest.raises(
            ScheduleError, match=f"{turn.work.value} of micro-batch {turn.microbatch}.*at tick 0 needs"
        ):
            check(with_turns(right, [first, *moved, replace(turn, tick=0)]))


@EVERY
def test_two_turns_swapped_are_refused_unless_they_may_be(name: str) -> None:
    """Swap any two turns of a stage; a table that passes must be one that can be played as it stands."""
    right = SCHEDULES[name](3, 3)
    refused = 0
    for stage in range(3):
        own = right.of_stage(stage)
        for index, one in enumerate(own):
            for other in own[index + 1 :]:
                rest = [turn for turn in right.work_items if turn not in (one, other)]
                mutant = with_turns(
                    right, [*rest, replace(one, tick=other.tick), replace(other, tick=one.tick)]
                )
                if is_right(mutant):
                    check(mutant, lambda _schedule, _stage: 99)
                else:
                    refused += 1
                    with pytest.raises(ScheduleError, match=" needs "):
                        check(mutant, lambda _schedule, _stage: 99)
    assert refused > 20


@EVERY
def test_random_ticks_are_judged_as_by_the_rules_written_out(name: str) -> None:
    right, rng = SCHEDULES[name](2, 2), random.Random(7)
    verdicts = set()
    for _ in range(200):
        turns = list(right.work_items)
        for _ in range(rng.randint(1, 2)):
            index = rng.randrange(len(turns))
            turns[index] = replace(turns[index], tick=max(0, turns[index].tick + rng.choice((-2, -1, 1, 2))))
        mutant = with_turns(right, turns)
        good = is_right(mutant)
        verdicts.add(good)
        if good:
            check(mutant, lambda _schedule, _stage: 99)
        else:
            with pytest.raises(ScheduleError):
                check(mutant, lambda _schedule, _stage: 99)
    assert verdicts == {True, False}


def is_right(schedule: Schedule) -> bool:
    """The same rules once more, as pairs of turns."""
    places = [(turn.tick, turn.stage) for turn in schedule.work_items]
    if len(set(places)) < len(places):
        return False
    at = {(turn.work, schedule.part(turn), turn.microbatch): turn.tick for turn in schedule.work_items}
    for (work, part, microbatch), tick in at.items():
        needs = {
            F: [(F, part - 1, microbatch)] + [(F, part, microbatch - 1)] * schedule.over_time,
            B: [(F, part, microbatch), (B, part + 1, microbatch)]
            + [(B, part, microbatch + 1)] * schedule.over_time,
            W: [(B, part, microbatch)],
        }[work]
        if any(at.get(need, -1) >= tick for need in needs):
            return False
    return True


def test_stages_that_wait_for_each_other_are_named() -> None:
    shape = Schedule(name="by hand", stages=2, microbatches=1, work_items=())
    ones = PartTimes(forward=(1, 1), backward=(1, 1), weights=(1, 1), send=(0, 0))
    orders = [[(B, 0, 0), (F, 0, 0)], [(F, 0, 0), (B, 0, 0)]]
    with pytest.raises(ScheduleError, match="backward of micro-batch 0, chunk 0 on stage 0 waits for input"):
        play(shape, orders, ones)


@pytest.mark.parametrize("order", [[(F, 1, 0), (F, 0, 0)], [(F, 0, 0), (F, 1, 0), (B, 0, 0), (B, 1, 0)]])
def test_slices_of_time_wait_for_each_other(order: list[tuple[Pass, int, int]]) -> None:
    shape = Schedule(name="by hand", stages=1, microbatches=2, work_items=())
    one = PartTimes(forward=(1,), backward=(1,), weights=(1,), send=(0,))
    assert play(shape, [order], one)
    with pytest.raises(ScheduleError, match=r"no stage can continue; (forward of micro-batch 1|backward)"):
        play(replace(shape, over_time=True), [order], one)
