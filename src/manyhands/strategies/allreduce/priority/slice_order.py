"""Which slices are sent next: the same choice on every worker, although gradients are ready at different times. Pure.

An all-reduce needs every worker, so workers must not choose by themselves. Before anything is sent, each tells all
others what it has. The rule depends on these reports alone, so all choose alike:

    of what every worker has and nobody has sent, the most urgent, as long as what is in flight is within the credit

What is in flight is not called back: a more urgent slice waits for at most the credit (ByteScheduler: Peng et al.,
SOSP 2019). A slice that is larger than the credit is sent alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["Desk", "SendOrder"]


class SendOrder:
    """The rule, over one step: slices by number, with their bytes and priorities; a lower priority is more urgent."""

    def __init__(self, num_bytes: Sequence[int], priorities: Sequence[int], credit_bytes: int) -> None:
        if credit_bytes < 1:
            raise ValueError(f"credit_bytes={credit_bytes} lets nothing through")
        self._num_bytes = num_bytes
        self._credit_bytes = credit_bytes
        self._unsent = sorted(range(len(num_bytes)), key=lambda number: (priorities[number], number))
        self._in_flight: set[int] = set()

    @property
    def in_flight_bytes(self) -> int:
        """The bytes of slices that were chosen and have not arrived."""
        return sum(self._num_bytes[number] for number in self._in_flight)

    @property
    def is_over(self) -> bool:
        """Whether every slice has arrived."""
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

    The worker calls `filled` and `closed`; the thread that exchanges reports calls `report` and `heard`. All workers
    exchange reports together, each when it `wants_to_report`. A worker that has every slice waits for `closed`, which
    follows at once: so the report of the last slice also says that the step is closed.
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
        """Whether nothing is left to agree on or to arrive."""
        return self._called_off or (self._all_closed and self._order.is_over)

    @property
    def wants_to_report(self) -> bool:
        """Whether this worker has something new to report, or has reported everything and waits for others."""
        if self.is_over or self._order.in_flight_bytes:
            return False
        if len(self._ready) == self._slices:
            return self._is_closed
        return bool(self._ready) and self._told != self._ready

    def filled(self, number: int) -> None:
        self._ready.add(number)

    def closed(self) -> None:
        """Mark the step as closed: this worker has every slice and nothing to add."""
        if len(self._ready) != self._slices:
            raise ValueError(f"closed with {len(self._ready)} of {self._slices} slices")
        self._is_closed = True

    def report(self) -> frozenset[int]:
        """Return what this worker has, to be sent to all."""
        self._told = frozenset(self._ready)
        return self._told

    def heard(self, reports: Sequence[Collection[int]], *, called_off: bool = False) -> tuple[int, ...]:
        """Take all reports, this worker's included; return what to send now, nothing if the step is `called_off`."""
        if called_off:
            self._called_off = True
            return ()
        everywhere = set(self._told)
        for report in reports:
            everywhere.intersection_update(report)
        self._all_closed = len(everywhere) == self._slices
        return self._order.next(everywhere)

    def arrived(self, number: int) -> None:
        self._order.arrived(number)
