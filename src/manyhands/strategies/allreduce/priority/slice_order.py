"""Which slices go next: the same on every worker, though gradients come at another time on each. Pure.

An all-reduce needs everybody, so workers must not choose by themselves. Before something is sent, each tells all others
what it has; the rule goes by these reports and by nothing else, so all choose alike:

    of what every worker has and nobody has sent, the most urgent, as long as what is on its way is within the credit

What is on its way is not called back: something more urgent waits for the credit at most (ByteScheduler: Peng et al.,
SOSP 2019). A slice that is larger than the credit goes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["Desk", "SendOrder"]


class SendOrder:
    """The rule, over one step: slices by number, with the bytes and the priority of each, the lower the more urgent."""

    def __init__(self, num_bytes: Sequence[int], priorities: Sequence[int], credit_bytes: int) -> None:
        if credit_bytes < 1:
            raise ValueError(f"credit_bytes={credit_bytes} lets nothing through")
        self._num_bytes = num_bytes
        self._credit_bytes = credit_bytes
        self._unsent = sorted(range(len(num_bytes)), key=lambda number: (priorities[number], number))
        self._in_flight: set[int] = set()

    @property
    def in_flight_bytes(self) -> int:
        """Of slices that were chosen and have not arrived."""
        return sum(self._num_bytes[number] for number in self._in_flight)

    @property
    def is_over(self) -> bool:
        """Whether every slice has arrived."""
        return not self._unsent and not self._in_flight

    def next(self, ready: Collection[int]) -> tuple[int, ...]:
        """Of the slices that are `ready` on every worker, those that go now, the most urgent first.

        One that does not fit into the credit is not overtaken by smaller ones that are less urgent.
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
        """GradientSlice `number` is summed, here and (so far as it matters to the others) everywhere."""
        self._in_flight.remove(number)


class Desk:
    """One worker's end, over one step: what it has, what it has told, and what all have agreed to send.

    `filled` and `closed` come from the worker, `report` and `heard` from who exchanges the reports: all workers do so
    together, each when it `wants_to_report`. A worker that has everything waits for `closed`, which comes at once: so
    who reports the last slice reports that it is closed, too.
    """

    def __init__(self, order: SendOrder, slices: int) -> None:
        self._order = order
        self._slices = slices
        self._ready: set[int] = set()
        self._told: frozenset[int] = frozenset()
        self._is_closed = False
        self._all_closed = False
        self._called_off = False

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be agreed on or to arrive."""
        return self._called_off or (self._all_closed and self._order.is_over)

    @property
    def wants_to_report(self) -> bool:
        """Whether this worker has something to say that it has not said, or has said all and waits for others."""
        if self.is_over or self._order.in_flight_bytes:
            return False
        if len(self._ready) == self._slices:
            return self._is_closed
        return bool(self._ready) and self._told != self._ready

    def filled(self, number: int) -> None:
        """This worker's part of a slice is there."""
        self._ready.add(number)

    def closed(self) -> None:
        """This worker is done with the step: it has every slice, and nothing to add."""
        if len(self._ready) != self._slices:
            raise ValueError(f"closed with {len(self._ready)} of {self._slices} slices")
        self._is_closed = True

    def report(self) -> frozenset[int]:
        """What this worker has, to be told to all."""
        self._told = frozenset(self._ready)
        return self._told

    def heard(self, reports: Sequence[Collection[int]], *, called_off: bool = False) -> tuple[int, ...]:
        """Everybody's report, this worker's among them: what goes now. Nothing more where the step is `called_off`."""
        if called_off:
            self._called_off = True
            return ()
        everywhere = set(self._told)
        for report in reports:
            everywhere.intersection_update(report)
        self._all_closed = len(everywhere) == self._slices
        return self._order.next(everywhere)

    def arrived(self, number: int) -> None:
        """A slice is summed."""
        self._order.arrived(number)
