"""Checks that a schedule is right: every work item once, after what it needs, within the stated memory.

The check reads the table alone and does not depend on how it was made. It also proves freedom from deadlock. Stages
execute their work items in order, send without waiting, and wait for what they receive; since every need is met at an
earlier tick, the remaining item with the lowest tick can always be executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from manyhands.strategies.common.collectives.schedule import ScheduleError
from manyhands.strategies.pipeline.schedule_table import Pass, Schedule, StageWork
from manyhands.strategies.pipeline.schedules import MOST_HELD

__all__ = ["check", "held_during", "most_held"]


def check(schedule: Schedule, most_held: Callable[[Schedule, int], int] | None = None) -> None:
    """Return if the schedule is right, else raise ScheduleError with a sentence that names the work item.

    `most_held` gives how many micro-batches' activations of one part a stage may hold. By default this is the bound
    stated for the schedule's name, or all of them for an unknown name.
    """
    try:
        _check_places(schedule)
        done = _taken(schedule)
        _check_all_there(schedule, done)
        _check_needs(schedule, done)
        _check_held(schedule, most_held or MOST_HELD.get(schedule.name, _all))
    except ScheduleError as error:
        sizes = f"{schedule.stages} stages and {schedule.microbatches} micro-batches"
        raise ScheduleError(f"{schedule.name} of {sizes}: {error}") from None


def held_during(schedule: Schedule, *, by_part: bool = False) -> Iterator[tuple[StageWork, int]]:
    """Yield every work item by tick, with the number of (micro-batch, chunk) whose activations its stage then holds.

    Activations are held from forward until backward, or until the weight gradient where the schedule splits it off.
    With `by_part` the number counts the micro-batches held for the item's part of the chain.
    """
    release = Pass.WEIGHTS if schedule.splits_backward else Pass.BACKWARD
    held = [0] * schedule.parts
    for turn in schedule.turns:
        holder = schedule.part(turn) if by_part else turn.stage
        held[holder] += turn.work is Pass.FORWARD
        yield turn, held[holder]
        held[holder] -= turn.work is release


def most_held(schedule: Schedule, *, by_part: bool = False) -> tuple[int, ...]:
    """The peak number of held activations of each stage, or with `by_part` of each part of the chain."""
    most = [0] * (schedule.parts if by_part else schedule.stages)
    for turn, held in held_during(schedule, by_part=by_part):
        holder = schedule.part(turn) if by_part else turn.stage
        most[holder] = max(most[holder], held)
    return tuple(most)


_Done = dict[Pass, list[int]]
"""The tick at which each (part, micro-batch) had each kind of work; -1 for never."""


def _all(schedule: Schedule, _stage: int) -> int:
    return schedule.microbatches * schedule.chunks


def _check_places(schedule: Schedule) -> None:
    """Every item belongs to this schedule, items are sorted by tick and stage, and no stage has two at one tick."""
    works = set(_works(schedule))
    before: StageWork | None = None
    for turn in schedule.turns:
        inside = (
            0 <= turn.stage < schedule.stages
            and 0 <= turn.microbatch < schedule.microbatches
            and 0 <= turn.chunk < schedule.chunks
            and turn.tick >= 0
            and turn.work in works
        )
        if not inside:
            raise ScheduleError(f"there is no {_named(turn)}")
        if before is not None and (before.tick, before.stage) >= (turn.tick, turn.stage):
            if (before.tick, before.stage) == (turn.tick, turn.stage):
                raise ScheduleError(f"{_named(turn)} is at the same time as {_named(before)}")
            raise ScheduleError(
                f"{_named(turn)} stands behind {_named(before)}; turns stand by tick, then by stage"
            )
        before = turn


def _taken(schedule: Schedule) -> _Done:
    """The ticks of all work items; ScheduleError where an item occurs twice."""
    count = schedule.microbatches
    done: _Done = {work: [-1] * (schedule.parts * count) for work in Pass}
    for turn in schedule.turns:
        cell = schedule.part(turn) * count + turn.microbatch
        ticks = done[turn.work]
        if ticks[cell] >= 0:
            raise ScheduleError(f"{_named(turn)} was done before, at tick {ticks[cell]}")
        ticks[cell] = turn.tick
    return done


def _check_all_there(schedule: Schedule, done: _Done) -> None:
    for work in _works(schedule):
        if -1 in done[work]:
            part, microbatch = divmod(done[work].index(-1), schedule.microbatches)
            chunk, stage = divmod(part, schedule.stages)
            missing = StageWork(tick=0, stage=stage, microbatch=microbatch, work=work, chunk=chunk)
            raise ScheduleError(f"{_named(missing, when=False)} is missing")


def _check_needs(schedule: Schedule, done: _Done) -> None:
    """Everything that an item needs was done at an earlier tick."""
    count, parts = schedule.microbatches, schedule.parts
    forward, backward = done[Pass.FORWARD], done[Pass.BACKWARD]
    for turn in schedule.turns:
        part = schedule.part(turn)
        cell = part * count + turn.microbatch
        if turn.work is Pass.FORWARD:
            if part and forward[cell - count] >= turn.tick:
                raise _too_early(turn, "the output of the part before", forward[cell - count])
            if schedule.over_time and turn.microbatch and forward[cell - 1] >= turn.tick:
                raise _too_early(turn, "its own state after the slice before", forward[cell - 1])
        elif turn.work is Pass.BACKWARD:
            if forward[cell] >= turn.tick:
                raise _too_early(turn, "its own forward", forward[cell])
            if part + 1 < parts and backward[cell + count] >= turn.tick:
                raise _too_early(turn, "the gradient of the part after", backward[cell + count])
            if schedule.over_time and turn.microbatch + 1 < count and backward[cell + 1] >= turn.tick:
                raise _too_early(turn, "the gradient of its state from the slice after", backward[cell + 1])
        elif backward[cell] >= turn.tick:
            raise _too_early(turn, "its own backward", backward[cell])


def _check_held(schedule: Schedule, most_held: Callable[[Schedule, int], int]) -> None:
    most = [most_held(schedule, stage) for stage in range(schedule.stages)]
    for turn, held in held_during(schedule):
        if held > most[turn.stage]:
            allowed = f"at most {most[turn.stage]} are allowed"
            raise ScheduleError(
                f"{_named(turn)} makes the activations that the stage holds {held}; {allowed}"
            )


def _works(schedule: Schedule) -> tuple[Pass, ...]:
    split = (Pass.WEIGHTS,) if schedule.splits_backward else ()
    return Pass.FORWARD, Pass.BACKWARD, *split


def _too_early(turn: StageWork, need: str, tick: int) -> ScheduleError:
    return ScheduleError(f"{_named(turn)} needs {need}, which is there after tick {tick}")


def _named(turn: StageWork, *, when: bool = True) -> str:
    at = f" at tick {turn.tick}" if when else ""
    chunk = f", chunk {turn.chunk}," if turn.chunk else ""
    return f"{turn.work.value} of micro-batch {turn.microbatch}{chunk} on stage {turn.stage}{at}"
