"""What a pipeline's schedule costs: time and bubbles, the activations held at once, messages and bytes.

The table is played through with the time that every part takes, so stages may be uneven. A stage sends and goes on: a
message costs whoever waits for it, and nobody else. What the formulas of papers say for equal stages follows, and is
what the tests compare with; f, b and w are the times of forward, of the input's gradient and of the weights' gradient
for a whole stage, p the stages, m the micro-batches, v the chunks of a stage:

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
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.errors import UserError
from manyhands.strategies.pipeline.check import most_held
from manyhands.strategies.pipeline.play import PartTimes, play
from manyhands.strategies.pipeline.schedule_table import Pass, Schedule

__all__ = ["Boundary", "PipelineCost", "cost", "equal_times"]


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

    time: float
    """From the start of the first work item to the end of the last, in the unit of the times."""

    busy: tuple[float, ...]
    """How long each stage computes."""

    peaks: tuple[int, ...]
    """The peak number of (micro-batch, chunk) whose activations each stage holds."""

    boundaries: tuple[Boundary, ...]
    """What is sent, by source and then by receiver."""

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The fraction of the time in which each stage is idle."""
        return tuple(1 - busy / self.time if self.time else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The fraction of all stages' time in which they are idle."""
        return sum(self.bubbles) / len(self.busy)


def equal_times(
    schedule: Schedule, *, forward: float = 1, backward: float = 1, weights: float = 1, send: float = 0
) -> PartTimes:
    """The times of equal stages; a stage's compute time is split among its chunks, that of a message is not."""

    def each(stage_time: float) -> tuple[float, ...]:
        return (stage_time / schedule.chunks,) * schedule.parts

    return PartTimes(
        forward=each(forward), backward=each(backward), weights=each(weights), send=(send,) * schedule.parts
    )


def cost(schedule: Schedule, times: PartTimes, message_bytes: Sequence[int] = ()) -> PipelineCost:
    """Simulate one step; `message_bytes` are those of the message between part k and the next, for every k.

    The gradient that comes back is as large as the output that was sent. Without `message_bytes`, bytes are not
    counted.
    """
    _check_lengths(schedule, times, message_bytes)
    turns = [schedule.of_stage(stage) for stage in range(schedule.stages)]
    orders = [[(turn.work, turn.microbatch, turn.chunk) for turn in own] for own in turns]
    begins = play(schedule, orders, times)
    took = times.of_work(schedule)
    lengths = [[took[turn.work][schedule.part(turn)] for turn in own] for own in turns]
    return PipelineCost(
        time=max(own[-1] + took_s[-1] for own, took_s in zip(begins, lengths, strict=True)),
        busy=tuple(map(sum, lengths)),
        peaks=most_held(schedule),
        boundaries=_boundaries(schedule, message_bytes),
    )


def _boundaries(schedule: Schedule, message_bytes: Sequence[int]) -> tuple[Boundary, ...]:
    sent: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for turn in schedule.turns:
        part = schedule.part(turn)
        if turn.work is Pass.WEIGHTS:
            continue
        other = part + 1 if turn.work is Pass.FORWARD else part - 1
        to = other % schedule.stages
        if 0 <= other < schedule.parts and to != turn.stage:
            counted = sent[turn.stage, to]
            counted[0] += 1
            counted[1] += message_bytes[min(part, other)] if message_bytes else 0
    return tuple(
        Boundary(source=source, to=to, messages=messages, num_bytes=num_bytes)
        for (source, to), (messages, num_bytes) in sorted(sent.items())
    )


def _check_lengths(schedule: Schedule, times: PartTimes, message_bytes: Sequence[int]) -> None:
    for name in ("forward", "backward", "weights", "send"):
        given = getattr(times, name)
        if len(given) != schedule.parts or min(given) < 0:
            raise UserError(
                f"{name}={list(given)}: {schedule.name} of {schedule.stages} stages needs {schedule.parts} times, "
                "one for each part, none below 0"
            )
    if message_bytes and len(message_bytes) != schedule.parts - 1:
        raise UserError(
            f"message_bytes={list(message_bytes)}: {schedule.parts} parts have {schedule.parts - 1} borders"
        )
