"""Every schedule is valid for every size, looks as its paper draws it, and can be executed without a deadlock."""

from __future__ import annotations

from collections import deque
from itertools import product

import pytest

from manyhands.errors import UserError
from manyhands.strategies.pipeline.schedule_cost import check
from manyhands.strategies.pipeline.schedules import MOST_HELD, SCHEDULES, Pass, Schedule, interleaved

STAGES = range(1, 17)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 8, 13, 16, 17, 32, 33, 64)
"""With all stages up to 16; `tests/soak/test_pipeline_soak.py` has every number up to 64."""

EVERY = pytest.mark.parametrize("name", SCHEDULES)


def fits(name: str, stages: int, microbatches: int) -> bool:
    return name != "interleaved" or microbatches % stages == 0


def letters(schedule: Schedule) -> list[str]:
    """A line for each stage: `F0` and so on at every tick, `..` where it waits."""
    ticks = max(turn.tick for turn in schedule.work_items) + 1
    lines = [["..."[: 1 + schedule.chunks]] * ticks for _ in range(schedule.stages)]
    for turn in schedule.work_items:
        chunk = "ab"[turn.chunk] if schedule.chunks > 1 else ""
        lines[turn.stage][turn.tick] = f"{turn.work.name[0]}{turn.microbatch}{chunk}"
    return [" ".join(line) for line in lines]


@EVERY
def test_valid_for_every_size(name: str) -> None:
    for stages, microbatches in product(STAGES, MICROBATCHES):
        if fits(name, stages, microbatches):
            schedule = SCHEDULES[name](stages, microbatches)
            assert (schedule.name, schedule.stages, schedule.microbatches) == (name, stages, microbatches)
            check(schedule)


@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_interleaved_with_other_numbers_of_chunks(chunks: int) -> None:
    for stages, rounds in product((1, 2, 3, 5, 8), (1, 2, 5)):
        check(interleaved(stages, stages * rounds, chunks))


def test_every_schedule_states_what_it_holds() -> None:
    assert list(MOST_HELD) == list(SCHEDULES)


@EVERY
def test_the_stated_bound_is_reached(name: str) -> None:
    """A bound that no run reaches says nothing; ours are the peaks themselves."""
    for stages, microbatches in product((1, 2, 4, 7), (1, 2, 4, 7, 28)):
        if fits(name, stages, microbatches):
            schedule = SCHEDULES[name](stages, microbatches)
            for stage in range(stages):
                assert peak_of(schedule, stage) == MOST_HELD[name](schedule, stage)


def peak_of(schedule: Schedule, stage: int) -> int:
    """The most that is held at once, by walking one stage's own turns."""
    held: set[tuple[int, int]] = set()
    peak = 0
    for turn in schedule.of_stage(stage):
        key = (turn.microbatch, turn.chunk)
        if turn.work is Pass.FORWARD:
            held.add(key)
            peak = max(peak, len(held))
        elif turn.work is (Pass.WEIGHTS if schedule.splits_backward else Pass.BACKWARD):
            held.remove(key)
    return peak


@EVERY
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 16])
def test_no_deadlock_with_buffered_sends_and_blocking_receives(name: str, stages: int) -> None:
    for microbatches in (1, 2, 3, 4, 8, 16, 48):
        if fits(name, stages, microbatches):
            execute(SCHEDULES[name](stages, microbatches))


def execute(schedule: Schedule) -> None:
    """Take every stage's turns in order, without their ticks; one queue a direction between two neighbours.

    A receive takes what is first in its queue, which must be the message that the turn is about: so a link that keeps
    the order of messages needs no tags.
    """
    last = schedule.parts - 1
    outputs: list[deque[tuple[int, int]]] = [deque() for _ in range(schedule.stages)]
    gradients: list[deque[tuple[int, int]]] = [deque() for _ in range(schedule.stages)]
    turns = [deque(schedule.of_stage(stage)) for stage in range(schedule.stages)]
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(turns):
            while own:
                turn = own[0]
                part = schedule.part(turn)
                if turn.work is Pass.FORWARD and part > 0:
                    inbox = outputs[stage]
                elif turn.work is Pass.BACKWARD and part < last:
                    inbox = gradients[stage]
                else:
                    inbox = deque([(part, turn.microbatch)])
                if not inbox:
                    break
                assert inbox.popleft() == (part, turn.microbatch)
                if turn.work is Pass.FORWARD and part < last:
                    outputs[(stage + 1) % schedule.stages].append((part + 1, turn.microbatch))
                if turn.work is Pass.BACKWARD and part > 0:
                    gradients[(stage - 1) % schedule.stages].append((part - 1, turn.microbatch))
                own.popleft()
                moved = True
    assert not any(turns)
    assert not any(outputs)
    assert not any(gradients)


def test_naive_has_one_stage_at_work() -> None:
    assert letters(SCHEDULES["naive"](3, 2)) == [
        "F0 .. .. .. .. B0 F1 .. .. .. .. B1",
        ".. F0 .. .. B0 .. .. F1 .. .. B1 ..",
        ".. .. F0 B0 .. .. .. .. F1 B1 .. ..",
    ]


def test_gpipe_goes_all_forward_then_all_backward() -> None:
    assert letters(SCHEDULES["gpipe"](3, 4)) == [
        "F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3",
        ".. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..",
        ".. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..",
    ]


def test_1f1b_alternates() -> None:
    assert letters(SCHEDULES["1f1b"](4, 6)) == [
        "F0 F1 F2 F3 .. .. .. B0 F4 B1 F5 B2 .. B3 .. B4 .. B5",
        ".. F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 .. B4 .. B5 ..",
        ".. .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 F5 B4 .. B5 .. ..",
        ".. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .. .. ..",
    ]


def test_interleaved_goes_through_chunks_in_rounds() -> None:
    assert letters(interleaved(2, 4)) == [
        "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a ... B2b ... B3b B2a B3a",
        "... F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a ...",
    ]


def test_zb_h1_fills_the_end_with_weight_gradients() -> None:
    assert letters(SCHEDULES["zb-h1"](3, 5)) == [
        "F0 F1 F2 .. .. B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4",
        ".. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4",
        ".. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4",
    ]


def test_wavefront_goes_back_in_time() -> None:
    assert letters(SCHEDULES["wavefront"](3, 4)) == [
        "F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0",
        ".. F0 F1 F2 F3 .. .. B3 B2 B1 B0 ..",
        ".. .. F0 F1 F2 F3 B3 B2 B1 B0 .. ..",
    ]
    assert SCHEDULES["wavefront"](3, 4).over_time


@EVERY
@pytest.mark.parametrize(("stages", "microbatches"), [(0, 4), (-1, 4), (4, 0)])
def test_sizes_below_one_are_refused(name: str, stages: int, microbatches: int) -> None:
    field = f"stages={stages}" if stages < 1 else f"microbatches={microbatches}"
    with pytest.raises(UserError, match=f"{field} must be an integer of at least 1"):
        SCHEDULES[name](stages, microbatches)


@pytest.mark.parametrize(("microbatches", "nearest"), [(6, "4 and 8"), (9, "8 and 12"), (3, "4")])
def test_interleaved_names_the_nearest_that_fit(microbatches: int, nearest: str) -> None:
    with pytest.raises(
        UserError, match=rf"microbatches={microbatches} does not fit stages=4.*nearest that fit: {nearest}$"
    ):
        interleaved(4, microbatches)
    with pytest.raises(UserError, match="chunks=0 must be an integer of at least 1"):
        interleaved(4, 4, 0)


@pytest.mark.parametrize(
    ("name", "theirs", "chunks"),
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("1f1b", "ScheduleInterleavedZeroBubble", 1),
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
    ],
)
def test_every_stage_does_its_work_in_the_order_that_torch_has(name: str, theirs: str, chunks: int) -> None:
    """torch.distributed.pipelining plans the same schedules as lists of actions, written by others.

    1F1B is its zero bubble less the weight gradients: the list of its 1F1B numbers the last rank's forwards from 1.
    """
    for stages, rounds in product((1, 2, 3, 4, 8), (1, 2, 4)):
        microbatches = stages * rounds
        schedule = (
            interleaved(stages, microbatches, chunks) if chunks > 1 else SCHEDULES[name](stages, microbatches)
        )
        planned = planned_by_torch(theirs, stages, microbatches, chunks)
        for stage in range(stages):
            ours = [(turn.work, schedule.part(turn), turn.microbatch) for turn in schedule.of_stage(stage)]
            assert ours == [
                one for one in planned[stage] if schedule.splits_backward or one[0] is not Pass.WEIGHTS
            ]


def planned_by_torch(
    kind: str, stages: int, microbatches: int, chunks: int
) -> list[list[tuple[Pass, int, int]]]:
    """Every rank's order of one of torch's schedules, which are planned without processes and models."""
    import torch.distributed.pipelining.schedules as torch_schedules

    made = object.__new__(getattr(torch_schedules, kind))
    made._n_microbatches, made._num_stages = microbatches, stages
    made.pp_group_size, made.n_local_stages, made.microbatches_per_round = stages, chunks, stages
    if hasattr(made, "_calculate_single_rank_operations"):
        planned = {rank: made._calculate_single_rank_operations(rank) for rank in range(stages)}
    else:
        planned = made._get_pipeline_order()
    works = {"F": Pass.FORWARD, "B": Pass.BACKWARD, "I": Pass.BACKWARD, "W": Pass.WEIGHTS}
    return [
        [
            (works[action.computation_type.value], action.stage_index, action.microbatch_index)
            for action in planned[rank]
            if action is not None and action.is_compute_op
        ]
        for rank in range(stages)
    ]
