"""Simulates a schedule: every stage executes its work items in order, and waits for what they need.

With one tick per work item this gives a table its ticks; with measured times it gives the cost of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from manyhands.strategies.common.collectives.schedule import ScheduleError
from manyhands.strategies.pipeline.schedule_table import Pass, Schedule

__all__ = ["Order", "PartTimes", "play"]

Order: TypeAlias = Sequence[tuple[Pass, int, int]]
"""The work items of one stage in order: (work, micro-batch, chunk)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTimes:
    """How long each part of the chain works on one micro-batch, by part, in any unit."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """Time for the gradient of the part's input."""

    weights: tuple[float, ...]
    """Time for the gradient of the part's parameters; schedules that do not split it off add it to backward."""

    send: tuple[float, ...]
    """Time for a part's messages to arrive: its output at the next part, its gradient at the part before."""

    def of_work(self, schedule: Schedule) -> dict[Pass, tuple[float, ...]]:
        """Time of a work item of each kind, by part; backward has both gradients unless the schedule splits them."""
        both = tuple(map(sum, zip(self.backward, self.weights, strict=True)))
        backward = self.backward if schedule.splits_backward else both
        return {Pass.FORWARD: self.forward, Pass.BACKWARD: backward, Pass.WEIGHTS: self.weights}


def play(schedule: Schedule, orders: Sequence[Order], times: PartTimes) -> list[list[float]]:
    """When each work item of each stage begins; ScheduleError where the stages deadlock.

    The work items are those of `orders`, one sequence for each stage; of `schedule` only the shape counts. A stage
    does not wait for its sends; messages in one direction travel one after the other.
    """
    player = _Player(schedule, times)
    begins: list[list[float]] = [[] for _ in orders]
    left = sum(map(len, orders))
    sweep = range(schedule.stages)
    while left:
        before = left
        for stage in sweep:
            begun = begins[stage]
            at = len(begun)
            player.advance(stage, orders[stage], begun)
            left -= len(begun) - at
        if left == before:
            raise ScheduleError(_stuck(schedule, orders, begins))
        sweep = sweep[::-1]  # alternate directions: forward runs down the stages, backward up
    return begins


class _Player:
    """The state of the simulation: when each part finished each micro-batch, and when its message arrived."""

    def __init__(self, schedule: Schedule, times: PartTimes) -> None:
        self._stages, self._parts = schedule.stages, schedule.parts
        self._count, self._over_time = schedule.microbatches, schedule.over_time
        took = times.of_work(schedule)
        self._forward_s, self._backward_s = took[Pass.FORWARD], took[Pass.BACKWARD]
        self._weights_s, self._send_s = took[Pass.WEIGHTS], times.send
        cells = self._parts * self._count
        self._forward: list[float | None] = [None] * cells
        self._backward: list[float | None] = [None] * cells
        self._output: list[float | None] = [None] * cells
        self._gradient: list[float | None] = [None] * cells
        self._free: list[float] = [0] * self._stages
        self._wire: tuple[list[float], list[float]] = ([0] * self._stages, [0] * self._stages)

    def advance(self, stage: int, order: Order, begun: list[float]) -> None:
        """Execute the stage's next work items for as long as the times of what they need are known."""
        for work, microbatch, chunk in islice(order, len(begun), None):
            part = chunk * self._stages + stage
            cell = part * self._count + microbatch
            need = self._need(work, part, microbatch, cell)
            if need is None:
                return
            begin = max(need, self._free[stage])
            begun.append(begin)
            self._free[stage] = self._done(work, stage, part, cell, begin)

    def _need(self, work: Pass, part: int, microbatch: int, cell: int) -> float | None:
        """When everything that a work item needs is there; None while that is not known."""
        if work is Pass.WEIGHTS:
            return self._backward[cell]
        if work is Pass.FORWARD:
            first = self._output[cell - self._count] if part else 0
            second = self._forward[cell - 1] if self._over_time and microbatch else 0
        else:
            first = self._forward[cell]
            if first is not None and part + 1 < self._parts:
                first = self._gradient[cell + self._count]  # which is later than this part's forward
            last = microbatch + 1 == self._count
            second = self._backward[cell + 1] if self._over_time and not last else 0
        return None if first is None or second is None else max(first, second)

    def _done(self, work: Pass, stage: int, part: int, cell: int, begin: float) -> float:
        """Record the end of a work item, and when its message arrives."""
        if work is Pass.FORWARD:
            end = self._forward[cell] = begin + self._forward_s[part]
            self._output[cell] = self._arrival(0, stage, part, end)
        elif work is Pass.BACKWARD:
            end = self._backward[cell] = begin + self._backward_s[part]
            self._gradient[cell] = self._arrival(1, stage, part, end)
        else:
            end = begin + self._weights_s[part]
        return end

    def _arrival(self, direction: int, stage: int, part: int, end: float) -> float:
        """When a message that is sent at `end` arrives; a single stage sends nothing."""
        if self._stages == 1:
            return end
        wire = self._wire[direction]
        wire[stage] = max(end, wire[stage]) + self._send_s[part]
        return wire[stage]


def _stuck(schedule: Schedule, orders: Sequence[Order], begins: Sequence[Sequence[float]]) -> str:
    stage = next(stage for stage, order in enumerate(orders) if len(begins[stage]) < len(order))
    work, microbatch, chunk = orders[stage][len(begins[stage])]
    return (
        f"{schedule.name} of {schedule.stages} stages and {schedule.microbatches} micro-batches: no stage can go on; "
        f"stage {stage} waits with {work.value} of micro-batch {microbatch}, chunk {chunk}, for what never comes"
    )
