"""What a pipeline's schedule costs, and the check that it is right: every item once, after its needs, within memory.

The check reads the table alone and does not depend on how it was made. It also proves freedom from deadlock. Stages
execute their work items in order, send without waiting, and wait for what they receive; since every need is met at an
earlier tick, the remaining item with the lowest tick can always be executed.

For the cost (time and bubbles, the activations held at once, messages and bytes) the table is played through with the
time that every part takes, so stages may be uneven. A stage sends and continues: a message costs whoever waits for it,
and nobody else. What the formulas of papers say for equal stages follows, and is what the tests compare with; f, b and
w are the times of forward, of the input's gradient and of the weights' gradient for a whole stage, p the stages, m the
micro-batches, v the chunks of a stage:

| schedule | time of a bubble | as a part of the whole |
|---|---|---|
| naive | (p-1) m (f+b+w) | (p-1)/p |
| gpipe, 1f1b, wavefront | (p-1) (f+b+w) | (p-1)/(m+p-1) |
| interleaved | (p-1) (f+b+w)/v | (p-1)/(v m+p-1) |
| zb-h1, where m >= p | (p-1) e, where e = max(f+b-w, f, b) | (p-1) e / (m (f+b+w) + (p-1) e) |

The last follows from the two ends. The last stage begins after (p-1) f and has no gap until its last gradient is on
its way; then it has p weight gradients left. Meanwhile that gradient climbs to stage 0 in (p-1) b, where one weight
gradient follows. So the step takes m (f+b+w) + (p-1) (f+b-w). Where w > b the weight gradients of the last stage end
later, with (p-1) f; where w > f those of the stages in between hold gradients up, to (p-1) b. With f = b = w it is a
third of the bubble of 1f1b.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from manyhands.errors import UserError
from manyhands.strategies.common.collectives.schedule import ScheduleError
from manyhands.strategies.pipeline.schedules import MOST_HELD, PartTimes, Pass, Schedule, StageWork, play


def check(schedule: Schedule, most_held: Callable[[Schedule, int], int] | None = None) -> None:
    """Return if the schedule is right, else raise ScheduleError with a sentence that names the work item.

    `most_held` gives how many micro-batches' activations of one part a stage may hold. By default this is the bound
    stated for the schedule's name, or all of them for an unknown name.
    """
    try:
        _check_places(schedule)
        _check_needs(schedule, _checked_ticks(schedule))
        every = schedule.microbatches * schedule.chunks
        allowed = most_held or MOST_HELD.get(schedule.name, lambda *_: every)
        most = [allowed(schedule, stage) for stage in range(schedule.stages)]
        for item, held in held_during(schedule):
            if held > most[item.stage]:
                raise ScheduleError(
                    f"{_named(item)} makes the activations that the stage holds {held}; at most {most[item.stage]} are "
                    "allowed"
                )
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
    for item in schedule.work_items:
        holder = schedule.part(item) if by_part else item.stage
        held[holder] += item.work is Pass.FORWARD
        yield item, held[holder]
        held[holder] -= item.work is release


def most_held(schedule: Schedule, *, by_part: bool = False) -> tuple[int, ...]:
    """The peak number of held activations of each stage, or with `by_part` of each part of the chain."""
    most = [0] * (schedule.parts if by_part else schedule.stages)
    for item, held in held_during(schedule, by_part=by_part):
        holder = schedule.part(item) if by_part else item.stage
        most[holder] = max(most[holder], held)
    return tuple(most)


_Done = dict[Pass, list[int]]
"""The tick at which each (part, micro-batch) had each kind of work; -1 for never."""


def _check_places(schedule: Schedule) -> None:
    works = set(_works(schedule))
    before: StageWork | None = None
    for item in schedule.work_items:
        inside = (
            0 <= item.stage < schedule.stages
            and 0 <= item.microbatch < schedule.microbatches
            and 0 <= item.chunk < schedule.chunks
            and item.tick >= 0
            and item.work in works
        )
        if not inside:
            raise ScheduleError(f"there is no {_named(item)}")
        if before is not None and (before.tick, before.stage) >= (item.tick, item.stage):
            if (before.tick, before.stage) == (item.tick, item.stage):
                raise ScheduleError(f"{_named(item)} overlaps {_named(before)}")
            order = "items must be ordered by tick, then by stage"
            raise ScheduleError(f"{_named(item)} follows {_named(before)}; {order}")
        before = item


def _checked_ticks(schedule: Schedule) -> _Done:
    """When each item was done; ScheduleError for one that occurs twice, or not at all."""
    count = schedule.microbatches
    done: _Done = {work: [-1] * (schedule.parts * count) for work in Pass}
    for item in schedule.work_items:
        cell = schedule.part(item) * count + item.microbatch
        ticks = done[item.work]
        if ticks[cell] >= 0:
            raise ScheduleError(f"{_named(item)} was already done at tick {ticks[cell]}")
        ticks[cell] = item.tick
    for work in _works(schedule):
        if -1 in done[work]:
            part, microbatch = divmod(done[work].index(-1), schedule.microbatches)
            chunk, stage = divmod(part, schedule.stages)
            missing = StageWork(tick=0, stage=stage, microbatch=microbatch, work=work, chunk=chunk)
            raise ScheduleError(f"{_named(missing, when=False)} is missing")
    return done


def _check_needs(schedule: Schedule, done: _Done) -> None:
    count, parts = schedule.microbatches, schedule.parts
    forward, backward = done[Pass.FORWARD], done[Pass.BACKWARD]
    for item in schedule.work_items:
        part = schedule.part(item)
        cell = part * count + item.microbatch
        if item.work is Pass.FORWARD:
            if part and forward[cell - count] >= item.tick:
                raise _too_early(item, "the output of the previous part", forward[cell - count])
            if schedule.over_time and item.microbatch and forward[cell - 1] >= item.tick:
                raise _too_early(item, "its own state after the previous slice", forward[cell - 1])
        elif item.work is Pass.BACKWARD:
            if forward[cell] >= item.tick:
                raise _too_early(item, "its own forward", forward[cell])
            if part + 1 < parts and backward[cell + count] >= item.tick:
                raise _too_early(item, "the gradient of the next part", backward[cell + count])
            if schedule.over_time and item.microbatch + 1 < count and backward[cell + 1] >= item.tick:
                raise _too_early(item, "the gradient of its state from the next slice", backward[cell + 1])
        elif backward[cell] >= item.tick:
            raise _too_early(item, "its own backward", backward[cell])


def _works(schedule: Schedule) -> tuple[Pass, ...]:
    split = (Pass.WEIGHTS,) if schedule.splits_backward else ()
    return Pass.FORWARD, Pass.BACKWARD, *split


def _too_early(item: StageWork, need: str, tick: int) -> ScheduleError:
    return ScheduleError(f"{_named(item)} needs {need}, which is available after tick {tick}")


def _named(item: StageWork, *, when: bool = True) -> str:
    at = f" at tick {item.tick}" if when else ""
    chunk = f", chunk {item.chunk}," if item.chunk else ""
    return f"{item.work.value} of micro-batch {item.microbatch}{chunk} on stage {item.stage}{at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What one stage sends to another: outputs to the next, gradients to the one before."""

    source: int
    to: int
    messages: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCost:
    """The cost of one step of a pipeline."""

    time: float  # from the start of the first work item to the end of the last, in the unit of the times
    busy: tuple[float, ...]  # how long each stage computes
    peaks: tuple[int, ...]  # the peak number of (micro-batch, chunk) whose activations each stage holds
    boundaries: tuple[Boundary, ...]  # what is sent, by source and then by receiver

    @property
    def bubbles(self) -> tuple[float, ...]:
        return tuple(1 - busy / self.time if self.time else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        return sum(self.bubbles) / len(self.busy)


def equal_times(
    schedule: Schedule, *, forward: float = 1, backward: float = 1, weights: float = 1, send: float = 0
) -> PartTimes:
    """The times of equal stages; a stage's compute time is split among its chunks, that of a message is not."""
    each = [(stage_time / schedule.chunks,) * schedule.parts for stage_time in (forward, backward, weights)]
    send_times = (send,) * schedule.parts
    return PartTimes(forward=each[0], backward=each[1], weights=each[2], send=send_times)


def cost(schedule: Schedule, times: PartTimes, message_bytes: Sequence[int] = ()) -> PipelineCost:
    """Simulate one step; `message_bytes` are those of the message between part k and the next, for every k.

    The gradient that comes back is as large as the output that was sent. Without `message_bytes`, bytes are not
    counted.
    """
    for name in ("forward", "backward", "weights", "send"):
        given = getattr(times, name)
        if len(given) != schedule.parts or min(given) < 0:
            raise UserError(
                f"{name}={list(given)}: {schedule.name} of {schedule.stages} stages needs {schedule.parts} times, "
                "one for each part, all at least 0"
            )
    if message_bytes and len(message_bytes) != schedule.parts - 1:
        borders = f"{schedule.parts} parts have {schedule.parts - 1} borders"
        raise UserError(f"message_bytes={list(message_bytes)}: {borders}")
    items = [schedule.of_stage(stage) for stage in range(schedule.stages)]
    orders = [[(item.work, item.microbatch, item.chunk) for item in own] for own in items]
    begins = play(schedule, orders, times)
    took = times.of_work(schedule)
    lengths = [[took[item.work][schedule.part(item)] for item in own] for own in items]
    return PipelineCost(
        time=max(own[-1] + took_s[-1] for own, took_s in zip(begins, lengths, strict=True)),
        busy=tuple(map(sum, lengths)),
        peaks=most_held(schedule),
        boundaries=_boundaries(schedule, message_bytes),
    )


def _boundaries(schedule: Schedule, message_bytes: Sequence[int]) -> tuple[Boundary, ...]:
    sent: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for item in schedule.work_items:
        part = schedule.part(item)
        if item.work is Pass.WEIGHTS:
            continue
        other = part + 1 if item.work is Pass.FORWARD else part - 1
        to = other % schedule.stages
        if 0 <= other < schedule.parts and to != item.stage:
            counted = sent[item.stage, to]
            counted[0] += 1
            counted[1] += message_bytes[min(part, other)] if message_bytes else 0
    return tuple(
        Boundary(source=source, to=to, messages=messages, num_bytes=num_bytes)
        for (source, to), (messages, num_bytes) in sorted(sent.items())
    )
