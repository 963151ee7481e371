"""A collective of one epoch, which distinguishes a lost member from a complete exchange.

    finish    every member has the sum in its memory   →   it counts
              a member is lost                          →   wait for the launcher: it counts, or MembersChanged

`StepChannel` decides what counts. That a member which passes an exchange proves that all have its result is a
property of the collective in shared memory; over links, a barrier ensures it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from manyhands.engine.exchange import Times, Traffic
from manyhands.errors import Aborted, WorkerFailed
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.wire.parcels import Parcel

__all__ = ["LOST", "ElasticCollective", "MembersChanged"]

LOST = (Aborted, WorkerFailed)
"""What an exchange raises when one of its members is lost."""


class MembersChanged(Aborted):
    """The epoch is over, and the exchange begun in it does not count."""


class ElasticCollective(Collective):
    """Wraps `inner`, and counts its exchanges.

    `confirm` waits until all members have the result, if `inner` alone does not prove it. `complete` is called after
    an interrupted exchange and returns whether it counts nevertheless. `passes` is called for each exchange that
    counts.
    """

    instead_of_rows = (
        "its rows are not summed with elastic=yes; leave that out, or build it with sparse=False"
    )

    def __init__(
        self,
        inner: Collective,
        confirm: Callable[[], None] | None,
        complete: Callable[[], bool],
        passes: Callable[[], None],
    ) -> None:
        self.rank, self.world, self.wire = inner.rank, inner.world, inner.wire
        self._inner = inner
        self._confirm = confirm
        self._complete = complete
        self._passes = passes

    def allocate(self, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        """Delegates to the inner collective."""
        return self._inner.allocate(parcels)

    def rounds(self, parcel: Parcel) -> bool:
        """Delegates to the inner collective."""
        return self._inner.rounds(parcel)

    def begin(self, step: int) -> None:
        """Delegates to the inner collective."""
        self._inner.begin(step)

    def launch(self, index: int) -> None:
        """Delegates to the inner collective; no member can have passed what this member has not launched."""
        try:
            self._inner.launch(index)
        except LOST as error:
            raise MembersChanged(str(error)) from error

    def poll(self) -> bool:
        """Delegates to the inner collective."""
        try:
            return self._inner.poll()
        except LOST as error:
            raise MembersChanged(str(error)) from error

    def finish(self) -> None:
        """Finish the launched buckets as one exchange; raises MembersChanged if it does not count."""
        self._exchange(self._inner.finish)

    def broadcast(self, index: int, root: int = 0) -> None:
        """Broadcast as one exchange; raises MembersChanged if it does not count."""
        self._exchange(lambda: self._inner.broadcast(index, root))

    def _exchange(self, work: Callable[[], None]) -> None:
        try:
            work()
            if self._confirm is not None:
                self._confirm()
        except LOST as error:
            if self._confirm is not None:
                self._inner.close()  # otherwise the others would keep waiting for this member's messages
            if not self._complete():
                raise MembersChanged(str(error)) from error
        self._passes()

    def take_times(self) -> Times:
        """Delegates to the inner collective."""
        return self._inner.take_times()

    def traffic(self) -> Traffic:
        """Delegates to the inner collective."""
        return self._inner.traffic()

    def close(self) -> None:
        """Close the inner collective."""
        self._inner.close()
