"""Every schedule of a pipeline, one function each: (stages, microbatches) -> the table.

A function says in which order each stage does its work; `play` gives every turn the earliest tick at which its
needs are met. Backward takes micro-batches in the order of forward wherever the schedule leaves a choice, so that
gradients are added in one order under all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from manyhands.errors import UserError
from manyhands.strategies.pipeline.play import Order, PartTimes, play
from manyhands.strategies.pipeline.schedule_table import Maker, Pass, Schedule, StageWork

__all__ = [
    "MOST_HELD",
    "SCHEDULES",
    "gpipe",
    "interleaved",
    "naive",
    "one_forward_one_backward",
    "wavefront",
    "zero_bubble_h1",
]


def naive(stages: int, microbatches: int) -> Schedule:
    """One micro-batch after the other through the layers, forward and back: one stage works, the others wait."""
    order = [
        (work, microbatch, 0) for microbatch in range(microbatches) for work in (Pass.FORWARD, Pass.BACKWARD)
    ]
    return _placed(_shape("naive", stages, microbatches), [order] * stages)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All micro-batches forward, then all backward (Huang et al. 2019)."""
    order = [
        (work, microbatch, 0) for work in (Pass.FORWARD, Pass.BACKWARD) for microbatch in range(microbatches)
    ]
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
        for turn in _alternating(whole, whole, min(stages - stage - 1, microbatches)):
            order.append(turn)
            if turn[0] is Pass.BACKWARD and turn[1] >= stage:
                order.append((Pass.WEIGHTS, turn[1] - stage, 0))
        order += [(Pass.WEIGHTS, k, 0) for k in range(max(0, microbatches - stage), microbatches)]
        orders.append(order)
    return _placed(_shape("zb-h1", stages, microbatches, splits_backward=True), orders)


def wavefront(stages: int, microbatches: int) -> Schedule:
    """Slices of a sequence in time: layer l is at slice t while layer l - 1 is at slice t + 1."""
    slices = range(microbatches)
    order = [
        *((Pass.FORWARD, time, 0) for time in slices),
        *((Pass.BACKWARD, time, 0) for time in reversed(slices)),
    ]
    return _placed(_shape("wavefront", stages, microbatches, over_time=True), [order] * stages)


SCHEDULES: dict[str, Maker] = {
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


def _shape(
    name: str,
    stages: int,
    microbatches: int,
    *,
    chunks: int = 1,
    splits_backward: bool = False,
    over_time: bool = False,
) -> Schedule:
    """The table without its work items; UserError for numbers of which there is no table."""
    for what, number in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise UserError(f"{what}={number} is not allowed; the least is 1")
    return Schedule(
        name=name,
        stages=stages,
        microbatches=microbatches,
        turns=(),
        chunks=chunks,
        splits_backward=splits_backward,
        over_time=over_time,
    )


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
    turns = [
        StageWork(tick=int(tick), stage=stage, microbatch=microbatch, work=work, chunk=chunk)
        for stage, begins in enumerate(play(shape, orders, times))
        for tick, (work, microbatch, chunk) in zip(begins, orders[stage], strict=True)
    ]
    turns.sort(key=lambda turn: (turn.tick, turn.stage))
    return replace(shape, turns=tuple(turns))
