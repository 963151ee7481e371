"""A collective of one epoch, which distinguishes a lost member from a complete exchange.

    finish    every member has the sum in its memory   →   it counts
              a member is lost                          →   wait for the launcher: it counts, or MembersChanged

An exchange is complete for one member only when every member has its result in memory: a property of the collective in
shared memory; over links, a barrier ensures it. Members are therefore never more than one exchange apart, and after a
loss one number decides: the highest count among the survivors. A member that is one behind has the result in its
memory and continues with it; no member has taken anything later. `StepChannel` counts; it is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from manyhands.engine.exchange import Times, Traffic
from manyhands.errors import Aborted, WorkerFailed
from manyhands.strategies.allreduce.elastic.elastic_messages import EpochView
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.wire.parcels import Parcel

__all__ = ["LOST", "ElasticCollective", "MembersChanged", "StepChannel"]

LOST = (Aborted, WorkerFailed)
"""What an exchange raises when one of its members is lost."""


class MembersChanged(Aborted):
    """The epoch is over, and the exchange begun in it does not count."""


class StepChannel:
    """One member's count of complete exchanges; `begin` is called for every view that the member is in."""

    def __init__(self, member: int) -> None:
        self.member = member
        self.view: EpochView | None = None
        self.passed = 0
        """The number of exchanges of the epoch that this member knows to be complete."""

        self.next: EpochView | None = None
        """The next view, from when the launcher announces it until the member has entered it."""

    @property
    def epoch(self) -> int:
        """The number of the current epoch; 0 before the first."""
        return self.view.epoch if self.view is not None else 0

    def begin(self, view: EpochView) -> None:
        self.view, self.passed, self.next = view, 0, None

    def passes(self) -> None:
        """Count one more complete exchange."""
        self.passed += 1

    def learn(self, view: EpochView) -> bool:
        """The epoch is over and this view follows: return whether the interrupted exchange is complete."""
        if self.view is not None and not self.passed <= view.passed <= self.passed + 1:
            raise AssertionError(
                f"member {self.member} has passed {self.passed} exchanges of epoch {self.epoch}, and the survivors "
                f"{view.passed}"
            )
        self.next = view
        return self.view is not None and view.passed == self.passed + 1


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
        return self._inner.allocate(parcels)

    def rounds(self, parcel: Parcel) -> bool:
        return self._inner.rounds(parcel)

    def begin(self, step: int) -> None:
        self._inner.begin(step)

    def launch(self, index: int) -> None:
        """Delegates to the inner collective; no member can have passed what this member has not launched."""
        try:
            self._inner.launch(index)
        except LOST as error:
            raise MembersChanged(str(error)) from error

    def poll(self) -> bool:
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
        return self._inner.take_times()

    def traffic(self) -> Traffic:
        return self._inner.traffic()

    def close(self) -> None:
        self._inner.close()
