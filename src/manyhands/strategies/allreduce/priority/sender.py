"""The sender: a thread that exchanges reports and sums slices while its worker computes.

The worker fills slices and closes the step; the sender carries out what the `Desk` decides and reports arrivals. A
report goes from each worker to all others: its loss and its flags, which count once all have closed the step, then a
byte for each slice that it has and for each parameter that its backward reached.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from manyhands.engine.exchange import LocalStep, PeerTraffic, SharedStep
from manyhands.errors import UserError
from manyhands.strategies.common.collectives.schedule_collective import ScheduleCollective, SideThread
from manyhands.wire.flat_layout import LINE_BYTES, BucketLayout, LayoutSlot, trainable
from manyhands.wire.parcels import Parcel
from manyhands.wire.tap import GradientTap, put

__all__ = ["Agreed", "Desk", "SendOrder", "SliceSender", "SlicedGradients", "cut"]

_LOSS, _STOP, _PAUSE, _BAD = range(4)
_WORDS, _WORD_BYTES = 4, 8


class Agreed(NamedTuple):
    """What all workers know once all have closed a step."""

    shared: SharedStep
    reached: tuple[bool, ...]  # by parameter: whether any worker's backward reached it


@dataclass(slots=True)
class _Step:
    """The state of one step."""

    number: int
    desk: Desk
    words: list[float] = field(default_factory=lambda: [0.0] * _WORDS)
    reached: Sequence[bool] = ()
    agreed: Agreed | None = None


class SliceSender(SideThread):
    """One worker's sender; uses the collective exclusively from `begin` until `is_over`. `close` is idempotent.

    An error in the thread is raised in the worker's thread, at its next call.
    """

    def __init__(
        self,
        collective: ScheduleCollective,
        slices: Sequence[GradientSlice],
        parameters: int,
        credit_bytes: int,
    ) -> None:
        super().__init__("manyhands sender of slices")
        self._collective, self._slices = collective, slices
        self._parameters, self._credit_bytes = parameters, credit_bytes
        self._step: _Step | None = None
        self._arrived: list[int] = []
        self._late: list[tuple[int, tuple[int, int]]] = []  # workers, and when only they were waited for
        self._posts: dict[int, PeerTraffic] = {}
        self._start()

    @property
    def is_over(self) -> bool:
        with self._changed:
            return self._is_idle()

    def begin(self, step: int) -> None:
        sizes = [one.parcel.num_bytes for one in self._slices]
        order = SendOrder(sizes, [one.parcel.priority for one in self._slices], self._credit_bytes)
        with self._changed:
            assert self._step is None or self._step.desk.is_over, "a step begins when the last one is over"
            self._step = _Step(step, Desk(order, len(self._slices)))

    def fill(self, number: int) -> None:
        with self._changed:
            assert self._step is not None, "begin comes before fill"
            self._step.desk.filled(number)
            self._changed.notify_all()

    def agree(self, local: LocalStep, reached: Sequence[bool]) -> Agreed:
        """Close the step, in which every slice is filled, and wait until all workers have."""
        loss = local.loss * local.share if local.is_finite and local.share else 0.0
        with self._changed:
            step = self._step
            assert step is not None, "begin comes before agree"
            step.words = [loss, float(local.stop), float(local.pause), float(not local.is_finite)]
            step.reached = tuple(reached)
            step.desk.closed()
            self._changed.notify_all()
            while step.agreed is None:
                self._wait()
            return step.agreed

    def arrivals(self, *, wait: bool) -> list[int]:
        """Return the slices that arrived since the last call; with `wait`, at least one unless the step is over."""
        with self._changed:
            while wait and not self._arrived and self._step is not None and not self._step.desk.is_over:
                self._wait()
            arrived, self._arrived = self._arrived, []
            return arrived

    def take_late(self) -> list[tuple[int, tuple[int, int]]]:
        with self._changed:
            late, self._late = self._late, []
            return late

    def take_traffic(self) -> Mapping[int, PeerTraffic]:
        with self._changed:
            posts, self._posts = self._posts, {}
            return posts

    def close(self) -> None:
        """Stop the thread and release the collective at once, even in the middle of a failed step."""
        self._end(self._collective.close)

    def _is_idle(self) -> bool:
        return self._step is None or self._step.desk.is_over

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ends and (self._step is None or not self._step.desk.wants_to_report):
                    self._changed.wait()
                step = self._step
                if self._ends or step is None:
                    return
                words = np.asarray(step.words, np.float64).view(np.uint8)
                ready = np.zeros(len(self._slices), np.uint8)
                ready[sorted(step.desk.report())] = 1
                reached = np.zeros(self._parameters, np.uint8)
                reached[: len(step.reached)] = step.reached
            found, waits = self._collective.executor.gather(
                torch.from_numpy(np.concatenate([words, ready, reached]))
            )
            for number in self._choose(step, found, waits):
                self._collective.step = step.number
                self._collective.sum_part(self._slices[number].parcel)
                with self._changed:
                    step.desk.order.arrived(number)
                    self._arrived.append(number)
                    self._take_over_posts()
                    self._changed.notify_all()

    def _choose(
        self, step: _Step, found: Sequence[torch.Tensor], waits: Mapping[int, tuple[int, int]]
    ) -> tuple[int, ...]:
        """Take the reports of all workers; return the slices to sum now, the same on each."""
        reports = [one.numpy() for one in found]
        ready_at = _WORDS * _WORD_BYTES
        reached_at = ready_at + len(self._slices)
        ready = [set(np.flatnonzero(report[ready_at:reached_at]).tolist()) for report in reports]
        agreed = None
        if all(len(one) == len(self._slices) for one in ready):
            words = np.stack([report[:ready_at].view(np.float64) for report in reports])
            reached = np.any([report[reached_at:] for report in reports], axis=0)
            bad = tuple(np.flatnonzero(words[:, _BAD]).tolist())
            loss = 0.0
            for mine in words[:, _LOSS].tolist():  # in the order of workers, so that all get the same bits
                loss += mine
            shared = SharedStep(
                loss=float("nan") if bad else loss,
                bad_workers=bad,
                stop=bool(words[:, _STOP].any()),
                pause=bool(words[:, _PAUSE].any()),
            )
            agreed = Agreed(shared=shared, reached=tuple(reached.tolist()))
        with self._changed:
            self._late += waits.items()
            called_off = agreed is not None and bool(agreed.shared.bad_workers)
            chosen = step.desk.choose(ready, called_off=called_off)
            self._take_over_posts()
            step.agreed = agreed
            if agreed is not None:
                self._changed.notify_all()
            return chosen

    def _take_over_posts(self) -> None:
        for peer, post in self._collective.take_times().posts.items():
            self._posts.setdefault(peer, PeerTraffic()).add(post)


# Which slices are sent next: the same choice on every worker, although gradients are ready at different times. Pure.
# An all-reduce needs every worker, so workers must not choose by themselves. Before anything is sent, each tells all
# others what it has. The rule depends on these reports alone, so all choose alike:
#
#     of what every worker has and nobody has sent, the most urgent, as long as what is in flight is within the credit
#
# What is in flight is not called back: a more urgent slice waits for at most the credit (ByteScheduler: Peng et al.,
# SOSP 2019). A slice that is larger than the credit is sent alone.
class SendOrder:
    """The rule, over one step: slices by number, with their bytes and priorities; a lower priority is more urgent."""

    def __init__(self, num_bytes: Sequence[int], priorities: Sequence[int], credit_bytes: int) -> None:
        if credit_bytes < 1:
            raise ValueError(f"credit_bytes={credit_bytes} must be at least 1")
        self._num_bytes, self._credit_bytes = num_bytes, credit_bytes
        self._unsent = sorted(range(len(num_bytes)), key=lambda number: (priorities[number], number))
        self._in_flight: set[int] = set()

    @property
    def in_flight_bytes(self) -> int:
        return sum(self._num_bytes[number] for number in self._in_flight)

    @property
    def is_over(self) -> bool:
        return not self._unsent and not self._in_flight

    def next(self, ready: Collection[int]) -> tuple[int, ...]:
        """Return the slices to send now, of those `ready` on every worker, the most urgent first.

        A slice that does not fit into the credit is not overtaken by smaller, less urgent ones.
        """
        chosen: list[int] = []
        for number in self._unsent:
            if number not in ready:
                continue
            if self._in_flight and self.in_flight_bytes + self._num_bytes[number] > self._credit_bytes:
                break
            self._in_flight.add(number)
            chosen.append(number)
        self._unsent = [number for number in self._unsent if number not in self._in_flight]
        return tuple(chosen)

    def arrived(self, number: int) -> None:
        """Slice `number` is summed here and (so far as it matters to the others) on every worker."""
        self._in_flight.remove(number)


class Desk:
    """One worker's end, over one step: what it has, what it has reported, and what all have agreed to send.

    The worker calls `filled` and `closed`; the thread that exchanges reports calls `report` and `choose`. All workers
    exchange reports together, each when it `wants_to_report`. A worker that has every slice waits for `closed`, which
    follows at once: so the report of the last slice also says that the step is closed.
    """

    def __init__(self, order: SendOrder, slices: int) -> None:
        self.order, self._slices = order, slices
        self._ready: set[int] = set()
        self._reported: frozenset[int] = frozenset()
        self._is_closed = self._all_closed = self._called_off = False

    @property
    def is_over(self) -> bool:
        return self._called_off or (self._all_closed and self.order.is_over)

    @property
    def wants_to_report(self) -> bool:
        """Whether this worker has something new to report, or has reported everything and waits for others."""
        if self.is_over or self.order.in_flight_bytes:
            return False
        if len(self._ready) == self._slices:
            return self._is_closed
        return bool(self._ready) and self._reported != self._ready

    def filled(self, number: int) -> None:
        self._ready.add(number)

    def closed(self) -> None:
        """Mark the step as closed: this worker has every slice and nothing to add."""
        if len(self._ready) != self._slices:
            raise ValueError(f"closed with {len(self._ready)} of {self._slices} slices")
        self._is_closed = True

    def report(self) -> frozenset[int]:
        self._reported = frozenset(self._ready)
        return self._reported

    def choose(self, reports: Sequence[Collection[int]], *, called_off: bool = False) -> tuple[int, ...]:
        """Take all reports, this worker's included; return what to send now, nothing if the step is `called_off`."""
        if called_off:
            self._called_off = True
            return ()
        everywhere = self._reported.intersection(*reports)
        self._all_closed = len(everywhere) == self._slices
        return self.order.next(everywhere)


class SlicedGradients:
    """Owns the gradients of `model` from construction to `close`; calls `filled(number)` for each full slice.

    Between two steps no parameter has a `grad`: the optimizer reads the sums in place, through `views`.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: Sequence[BucketLayout],
        slices: Sequence[GradientSlice],
        buckets: Sequence[torch.Tensor],
        filled: Callable[[int], None],
    ) -> None:
        named = trainable(model)
        self._names, self.parameters = [names[0] for names in named.values()], list(named)
        self._slices, self._filled = slices, filled
        views = {
            number: items.view(self.parameters[number].shape)
            for layout, bucket in zip(layouts, buckets, strict=True)
            for number, items in layout.views(bucket)
        }
        self.views = [views[index] for index in range(len(views))]  # by parameter: its gradient in the bucket
        self.slices_of: list[list[int]] = [[] for _ in named]  # by parameter: those with parts of it
        for number, one in enumerate(slices):
            for index in one.parameters:
                self.slices_of[index].append(number)
        self._held = False
        self.weight = 1.0
        self.on_next_gradient: Callable[[], None] | None = None
        self.step = 0  # the one that is computed
        self.begin()
        self._tap = GradientTap(self.parameters, self._on_gradient)

    def begin_step(self, step: int) -> None:
        """Gradients from here on are of step `step`; its first backward begins it, when the last one has arrived."""
        self.step = step

    def begin(self) -> None:
        self.reached = [False] * len(self.parameters)  # by this worker's backward, in this step
        self._missing = [set(one.parameters) for one in self._slices]

    @contextmanager
    def holding(self) -> Iterator[None]:
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def fill_rest(self) -> None:
        """After backward: fill what it did not reach with what was accumulated before, or zero."""
        for index, reached in enumerate(self.reached):
            if not reached:
                self.views[index].zero_()
            self._fill(index)

    def close(self) -> None:
        self._tap.close()
        for parameter in self.parameters:
            parameter.grad = None
        self.views = []

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self.on_next_gradient is not None:
            listener, self.on_next_gradient = self.on_next_gradient, None
            listener()
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            raise UserError(
                f"parameter {self._names[index]!r} has a sparse gradient, which order=priority does not slice; leave "
                "it out, or build the embedding with sparse=False"
            )
        numbers = self.slices_of[index]
        if numbers and not any(index in self._missing[number] for number in numbers):
            raise UserError(
                f"parameter {self._names[index]!r} got a second gradient after the first was sent; checkpoint with "
                "use_reentrant=False"
            )
        put(self.views[index], gradient, self.weight, add=self.reached[index])
        self.reached[index] = True
        if not self._held:
            self._fill(index)

    def _fill(self, index: int) -> None:
        for number in self.slices_of[index]:
            missing = self._missing[number]
            if index in missing:
                missing.remove(index)
                if not missing:
                    self._filled(number)


# Gradients in slices: the units that are sent, and the parameters that wait for each. Pure.
# A bucket is cut between its tensors, and a tensor that is larger than a slice is cut itself, so that nothing urgent
# waits for more than a slice (P3: Jayarajan et al., MLSys 2019). A slice is a `Parcel` whose priority is the number of
# the first parameter in it: the next forward needs that one first.
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSlice:
    """A part of a bucket that is summed as one unit."""

    parcel: Parcel  # which bytes of which bucket it is; a lower priority is more urgent
    parameters: tuple[int, ...]  # the parameters with items in this slice

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError(f"slice {self.parcel.key} does not belong to a parameter")


def cut(layouts: Sequence[BucketLayout], most_bytes: int) -> tuple[GradientSlice, ...]:
    """Cut every bucket into slices of at most `most_bytes`, rounded up to a cache line; in launch order."""
    pieces = (_cut_bucket(number, layout, most_bytes) for number, layout in enumerate(layouts))
    return tuple(chain.from_iterable(pieces))


def _cut_bucket(number: int, layout: BucketLayout, most_bytes: int) -> Iterator[GradientSlice]:
    line = LINE_BYTES // layout.dtype.itemsize
    most = max(line, most_bytes // layout.dtype.itemsize // line * line)
    whole = layout.parcel(number)
    slots = [slot for slot in layout.slots if slot.count]
    ends = [*(slot.offset for slot in slots[1:]), layout.count][: len(slots)]
    slots_here: list[LayoutSlot] = []
    begin = 0

    def piece(end: int) -> GradientSlice:
        numbers = tuple(slot.parameter for slot in slots_here)
        return GradientSlice(
            parcel=replace(whole.part(begin, end), priority=min(numbers)), parameters=numbers
        )

    for slot, end in zip(slots, ends, strict=True):
        if slots_here and end - begin > most:
            yield piece(slot.offset)
            slots_here, begin = [], slot.offset
        slots_here.append(slot)
        while end - begin > most:
            yield piece(begin + most)
            begin += most
    if layout.count > begin:
        yield piece(layout.count)
