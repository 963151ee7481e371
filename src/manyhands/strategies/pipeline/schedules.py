"""A pipeline's schedule as data: which worker does what with which micro-batch, in which order.

A chain of layers is cut into `stages` × `chunks` parts. Worker s of the pipeline, its *stage*, has the parts s,
stages + s, 2·stages + s and so on: one for each of its chunks. A micro-batch goes forward through all parts in order,
and backward through them in reverse order; the table says when. It is executed, checked, costed and drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique
from itertools import islice
from typing import TypeAlias

from manyhands.errors import UserError, check_count
from manyhands.strategies.common.collectives.schedule import ScheduleError


@unique
class Pass(Enum):
    """What a stage does with a micro-batch in one work item."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The gradient of the part's input; that of its parameters as well, unless the schedule splits it off."""
    WEIGHTS = "weight gradient"
    """The gradient of the part's parameters, in schedules that split it off: no other stage waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """One work item of one stage."""

    tick: int  # when it starts if every work item takes one tick and messages take none; from 0
    stage: int
    microbatch: int
    work: Pass
    chunk: int = 0  # which of the stage's parts it is about


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The whole table; every stage executes its work items in order, and waits for what they need."""

    name: str
    stages: int
    microbatches: int
    work_items: tuple[StageWork, ...]  # all work items, by tick, then by stage
    chunks: int = 1
    splits_backward: bool = False
    """Whether backward is two work items: the input's gradient, and the weight gradient, which can be delayed."""
    over_time: bool = False
    """Whether micro-batches are slices of a sequence in time: a part needs its own state after the slice before, and in
    backward the gradient of its state from the slice after."""

    def of_stage(self, stage: int) -> tuple[StageWork, ...]:
        return tuple(item for item in self.work_items if item.stage == stage)

    def part(self, item: StageWork) -> int:
        return item.chunk * self.stages + item.stage

    @property
    def parts(self) -> int:
        return self.stages * self.chunks


Order: TypeAlias = Sequence[tuple[Pass, int, int]]
"""The work items of one stage in order: (work, micro-batch, chunk)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTimes:
    """How long each part of the chain works on one micro-batch, by part, in any unit."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]  # time for the gradient of the part's input
    weights: tuple[float, ...]
    """Time for the gradient of the part's parameters; schedules that do not split it off add it to backward."""
    send: tuple[float, ...]
    """Time for a part's messages to arrive: its output at the next part, its gradient at the part before."""
    send_back: tuple[float, ...] = ()
    """That of its gradient alone, where it is another."""

    def of_work(self, schedule: Schedule) -> dict[Pass, tuple[float, ...]]:
        """Time of a work item of each kind, by part; backward has both gradients unless the schedule splits them."""
        both = tuple(map(sum, zip(self.backward, self.weights, strict=True)))
        backward = self.backward if schedule.splits_backward else both
        return {Pass.FORWARD: self.forward, Pass.BACKWARD: backward, Pass.WEIGHTS: self.weights}


def play(schedule: Schedule, orders: Sequence[Order], times: PartTimes) -> list[list[float]]:
    """Simulate a schedule: when each work item of each stage begins; ScheduleError where the stages deadlock.

    With one tick per work item this gives a table its ticks; with measured times it gives its cost. The work items are
    those of `orders`, one sequence for each stage; of `schedule` only the shape counts. A stage does not wait for its
    sends; messages in one direction travel one after the other.
    """
    player = _Player(schedule, times)
    begins: list[list[float]] = [[] for _ in orders]
    left = sum(map(len, orders))
    sweep = range(schedule.stages)
    while left:
        before = left
        for stage in sweep:
            left -= player.advance(stage, orders[stage], begins[stage])
        if left == before:
            stage = next(stage for stage, order in enumerate(orders) if len(begins[stage]) < len(order))
            work, microbatch, chunk = orders[stage][len(begins[stage])]
            raise ScheduleError(
                f"{schedule.name} of {schedule.stages} stages and {schedule.microbatches} micro-batches: no stage can "
                f"continue; {work.value} of micro-batch {microbatch}, chunk {chunk} on stage {stage} waits for input "
                "that never arrives"
            )
        sweep = sweep[::-1]  # alternate directions: forward runs down the stages, backward up
    return begins


class _Player:
    """The state of the simulation: when each part finished each micro-batch, and when its message arrived."""

    def __init__(self, schedule: Schedule, times: PartTimes) -> None:
        self._stages, self._parts = schedule.stages, schedule.parts
        self._count, self._over_time = schedule.microbatches, schedule.over_time
        took = times.of_work(schedule)
        self._forward_s, self._backward_s = took[Pass.FORWARD], took[Pass.BACKWARD]
        self._weights_s, self._send_s = took[Pass.WEIGHTS], (times.send, times.send_back or times.send)
        unknown: list[float | None] = [None] * (self._parts * self._count)
        self._forward, self._backward = unknown.copy(), unknown.copy()
        self._output, self._gradient = unknown.copy(), unknown.copy()
        self._free: list[float] = [0] * self._stages
        self._wire: tuple[list[float], list[float]] = ([0] * self._stages, [0] * self._stages)

    def advance(self, stage: int, order: Order, begun: list[float]) -> int:
        """Begin the items of a stage whose needs are met, in order; how many were begun."""
        before = len(begun)
        for work, microbatch, chunk in islice(order, before, None):
            part = chunk * self._stages + stage
            cell = part * self._count + microbatch
            need = self._need(work, part, microbatch, cell)
            if need is None:
                break
            begin = max(need, self._free[stage])
            begun.append(begin)
            if work is Pass.FORWARD:
                end = self._forward[cell] = begin + self._forward_s[part]
                self._output[cell] = self._arrival(0, stage, part, end)
            elif work is Pass.BACKWARD:
                end = self._backward[cell] = begin + self._backward_s[part]
                self._gradient[cell] = self._arrival(1, stage, part, end)
            else:
                end = begin + self._weights_s[part]
            self._free[stage] = end
        return len(begun) - before

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

    def _arrival(self, direction: int, stage: int, part: int, end: float) -> float:
        if self._stages == 1:
            return end
        wire = self._wire[direction]
        wire[stage] = max(end, wire[stage]) + self._send_s[direction][part]
        return wire[stage]


# Every schedule, one function each: (stages, microbatches) -> the table; a UserError for numbers that do not fit names
# the nearest that do. A function says in which order each stage does its work; `play` gives every item the earliest
# tick at which its needs are met. Backward takes micro-batches in the order of forward wherever the schedule leaves a
# choice, so that gradients are added in one order under all of them.


def naive(stages: int, microbatches: int) -> Schedule:
    """One micro-batch after the other through the layers, forward and back: one stage works, the others wait."""
    order = [(work, batch, 0) for batch in range(microbatches) for work in (Pass.FORWARD, Pass.BACKWARD)]
    return _placed(_shape("naive", stages, microbatches), [order] * stages)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All micro-batches forward, then all backward (Huang et al. 2019)."""
    order = [(work, batch, 0) for work in (Pass.FORWARD, Pass.BACKWARD) for batch in range(microbatches)]
    return _placed(_shape("gpipe", stages, microbatches), [order] * stages)


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """One forward and one backward in turn once the first gradient is back (Narayanan et al. 2021)."""
    whole = [(k, 0) for k in range(microbatches)]
    orders = [_alternating(whole, whole, min(stages - stage - 1, microbatches)) for stage in range(stages)]
    return _placed(_shape("1f1b", stages, microbatches), orders)


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with several smaller parts on every stage, passed in rounds (Narayanan et al. 2021)."""
    shape = _shape("interleaved", stages, microbatches, chunks=chunks)
    if microbatches % stages:
        below = microbatches // stages * stages
        fitting = f"{below} and {below + stages}" if below else f"{stages}"
        raise UserError(
            f"microbatches={microbatches} does not fit stages={stages}: `interleaved` takes micro-batches in rounds of "
            f"one per stage; the nearest that fit: {fitting}"
        )
    # The k-th forward of every stage: a round of micro-batches through chunk 0, the same through chunk 1, and so on.
    total = microbatches * chunks
    forward = [(k // (stages * chunks) * stages + k % stages, k // stages % chunks) for k in range(total)]
    backward = [(microbatch, chunks - 1 - chunk) for microbatch, chunk in forward]
    orders = [
        _alternating(forward, backward, min(total, 2 * (stages - stage - 1) + (chunks - 1) * stages))
        for stage in range(stages)
    ]
    return _placed(shape, orders)


def zero_bubble_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B that puts weight gradients off to where a stage would wait (zero bubble, Qi et al. 2023)."""
    whole = [(k, 0) for k in range(microbatches)]
    orders = []
    for stage in range(stages):
        # Stage s puts weight gradients off by s micro-batches. It then holds as many as stage 0, which is the most
        # that 1F1B holds, and the stages before it have their gradients so much earlier.
        order: list[tuple[Pass, int, int]] = []
        for item in _alternating(whole, whole, min(stages - stage - 1, microbatches)):
            order.append(item)
            if item[0] is Pass.BACKWARD and item[1] >= stage:
                order.append((Pass.WEIGHTS, item[1] - stage, 0))
        order += [(Pass.WEIGHTS, k, 0) for k in range(max(0, microbatches - stage), microbatches)]
        orders.append(order)
    return _placed(_shape("zb-h1", stages, microbatches, splits_backward=True), orders)


def wavefront(stages: int, microbatches: int) -> Schedule:
    """Slices of a sequence in time: layer l is at slice t while layer l - 1 is at slice t + 1."""
    order = [(Pass.FORWARD, time, 0) for time in range(microbatches)]
    order += [(Pass.BACKWARD, time, 0) for time in reversed(range(microbatches))]
    return _placed(_shape("wavefront", stages, microbatches, over_time=True), [order] * stages)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "wavefront": wavefront,
}

MOST_HELD: dict[str, Callable[[Schedule, int], int]] = {
    "naive": lambda _schedule, _stage: 1,
    "gpipe": lambda schedule, _stage: schedule.microbatches,
    "1f1b": lambda schedule, stage: min(schedule.microbatches, schedule.stages - stage),
    "interleaved": lambda schedule, stage: min(
        schedule.microbatches * schedule.chunks,
        2 * (schedule.stages - stage - 1) + (schedule.chunks - 1) * schedule.stages + 1,
    ),
    "zb-h1": lambda schedule, _stage: min(schedule.microbatches, schedule.stages),
    "wavefront": lambda schedule, _stage: schedule.microbatches,
}
"""How many micro-batches' activations of one part a stage holds at most: (schedule, stage) -> their number.

They are held from forward until backward, or until the weight gradient where that is split off.
"""


def _shape(name: str, stages: int, microbatches: int, chunks: int = 1, **kind: bool) -> Schedule:
    for what, number in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        check_count(what, number)
    return Schedule(name=name, stages=stages, microbatches=microbatches, work_items=(), chunks=chunks, **kind)


def _alternating(
    forward: Sequence[tuple[int, int]], backward: Sequence[tuple[int, int]], ahead: int
) -> list[tuple[Pass, int, int]]:
    """`ahead` forwards, then alternately one forward and one backward, then the remaining backwards."""
    order = [(Pass.FORWARD, *one) for one in forward[:ahead]]
    for number, back in enumerate(backward, start=ahead):
        if number < len(forward):
            order.append((Pass.FORWARD, *forward[number]))
        order.append((Pass.BACKWARD, *back))
    return order


def _placed(shape: Schedule, orders: Sequence[Order]) -> Schedule:
    """The table in which every work item has the earliest tick that its stage's order and its needs allow."""
    one, none = (1,) * shape.parts, (0,) * shape.parts
    times = PartTimes(forward=one, backward=one, weights=one if shape.splits_backward else none, send=none)
    items = [
        StageWork(tick=int(tick), stage=stage, microbatch=microbatch, work=work, chunk=chunk)
        for stage, begins in enumerate(play(shape, orders, times))
        for tick, (work, microbatch, chunk) in zip(begins, orders[stage], strict=True)
    ]
    items.sort(key=lambda item: (item.tick, item.stage))
    return replace(shape, work_items=tuple(items))
