"""Which worker takes which step, and when it may read and write the parameters; shared by all strategies.

* `free`: each worker takes the next batch that nobody has, and steps whenever it is ready. No worker waits.
* `locked`: the same batches, but from reading the parameters to writing them a worker is alone.
* `turns`: batch k is worker k mod n's, and is read and written after batch k − 1 and before batch k + 1. So it is the
  plain loop, with the batches fetched by n workers.
* `together`: every worker takes its part of every batch, and they wait for each other in it.

Compiled steps are many small ones in one call: there the batches are given out here, and the waiting is theirs, at the
gate that `compiled_gate` describes.

Training goes from one synchronization of all workers to the next (an evaluation, a checkpoint, the end). Between two
of them the batches from `first` to `end` are each taken once; an early stop leaves no gap in what was done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from manyhands.native.counters import Counter
from manyhands.native.group.gate import FREE, LOCKED, TURNS, CompiledGate, Gate
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import Segment


class Order(ABC):
    """One worker's side of an order, whose memory begins at `offset` of `segment`.

    begin(first, end)                  all workers, while synchronized
    while (step := claim()) is not None:
        enter(step); read, compute, write; applied(); leave(step)
    done()                             when all are synchronized again

    Where steps are compiled, `numbering` gives the number that the first of a batch's small steps has at the gate, and
    they go through it by themselves.
    """

    NUM_BYTES: ClassVar[int] = 4 * Counter.NUM_BYTES + Gate.NUM_BYTES
    _gate_order: ClassVar[int] = FREE

    def __init__(
        self, segment: Segment, offset: int, group: SharedGroup, numbering: Callable[[int], int] | None = None
    ) -> None:
        self._rank, self._world = group.rank, group.world
        self._numbering = numbering
        self._claimed, self._end, self._stopped, self._applied = (
            Counter.within(segment, offset + number * Counter.NUM_BYTES) for number in range(4)
        )
        self._gate = Gate(segment, offset + 4 * Counter.NUM_BYTES, group, "take its step")
        self._seen = 0

    def begin(self, first: int, end: int) -> None:
        """Every worker, between two barriers: distribute the batches from `first` to `end`."""
        if self._rank == 0:
            self._claimed.set(first)
            self._end.set(end)
            self._stopped.set(0)

    @abstractmethod
    def claim(self) -> int | None:
        """This worker's next batch; None if it is to synchronize with the others."""

    def enter(self, step: int) -> None:  # noqa: ARG002 - others wait at the gate here
        self.note_reading()

    def note_reading(self) -> None:
        """Mark the read of the parameters: what others write from here on is counted by `applied`."""
        self._seen = self._applied.get()

    def applied(self) -> int:
        """Mark this worker's step as written; returns how many steps others wrote since the read."""
        return self._applied.add() - self._seen

    def leave(self, step: int) -> None:  # noqa: B027 - the free have nobody to let in
        """End the access to the parameters, written or not."""

    @property
    def compiled_gate(self) -> CompiledGate:
        return self._gate.compiled(self._gate_order)

    @abstractmethod
    def stop(self, step: int) -> None:
        """Between `enter` and `leave`, or after a compiled step: prevent any worker from beginning another batch."""

    def done(self) -> int:
        return self._end.get()

    def take_waits(self) -> dict[int, int]:
        return self._gate.take_waits()


class Free(Order):
    """No worker waits for another."""

    def claim(self) -> int | None:
        if self._stopped.get():
            return None
        step = self._claimed.add()
        return step if step < self._end.get() else None

    def stop(self, step: int) -> None:  # noqa: ARG002 - whatever was taken is finished
        """Stop giving out batches; those already taken are finished."""
        self._stopped.set(1)

    def done(self) -> int:
        return min(self._claimed.get(), self._end.get())


class Locked(Free):
    """One step at a time, in order of arrival."""

    _ticket = 0
    _gate_order = LOCKED

    def enter(self, step: int) -> None:
        self._ticket = self._gate.draw()
        self._gate.enter(self._ticket)
        super().enter(step)

    def leave(self, step: int) -> None:
        super().leave(step)
        self._gate.leave(self._ticket)


class _Planned(Order):
    """Every `_stride`-th batch from `_next` on is this worker's."""

    _next = 0
    _stride = 1

    def claim(self) -> int | None:
        step = self._next
        if step >= self._end.get():
            return None
        self._next += self._stride
        return step


class Turns(_Planned):
    """Round-robin: one step at a time, in the order of the batches."""

    _gate_order = TURNS

    def begin(self, first: int, end: int) -> None:
        super().begin(first, end)
        self._next, self._stride = first + (self._rank - first) % self._world, self._world
        if self._rank == 0:
            number = first if self._numbering is None else self._numbering(first)
            self._gate.reset(number, first % self._world)

    def enter(self, step: int) -> None:
        self._gate.enter(step)
        super().enter(step)

    def leave(self, step: int) -> None:
        super().leave(step)
        self._gate.leave(step, (step + 1) % self._world)

    def stop(self, step: int) -> None:
        """Each worker may have taken its next batch, which is finished: those end n after this one.

        After a compiled step the others were let in already, and may have taken another each: n more.
        """
        ahead = self._world if self._numbering is None else 2 * self._world
        self._end.set(min(self._end.get(), step + ahead))


class Together(_Planned):
    """Every worker takes part in every step, and each step ends only when all have."""

    def begin(self, first: int, end: int) -> None:
        super().begin(first, end)
        self._next = first

    def stop(self, step: int) -> None:
        """End after the next step: others may have begun it, and it needs all; none can have begun the one after."""
        self._end.set(min(self._end.get(), step + 2))


ORDERS: dict[str, type[Order]] = {"free": Free, "locked": Locked, "turns": Turns, "together": Together}
"""By the name in a strategy's text."""
