"""A collective of one epoch, which tells a loss from an exchange that is complete.

    finish    every member has the sum in its memory   →   it counts
              somebody is lost                          →   wait for the launcher's word: it counts, or MembersChanged

What counts is decided by `StepChannel`; that a member which passes an exchange proves that all have its result is the
collective's own property in shared memory, and is made so by a barrier where links carry it.
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
"""What an exchange raises when one of its members is gone."""


class MembersChanged(Aborted):
    """What was begun in an epoch that is over does not count."""


class ElasticCollective(Collective):
    """Sums as `inner` does.

    `confirm` waits until all have the result, where `inner` alone does not prove it. `complete` is called when an
    exchange was cut: whether it counts nevertheless. `passes` is called for each that counts.
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
        """As the inner one."""
        return self._inner.allocate(parcels)

    def rounds(self, parcel: Parcel) -> bool:
        """As the inner one."""
        return self._inner.rounds(parcel)

    def begin(self, step: int) -> None:
        """As the inner one."""
        self._inner.begin(step)

    def launch(self, index: int) -> None:
        """As the inner one; nobody can have passed what this member has not launched."""
        try:
            self._inner.launch(index)
        except LOST as error:
            raise MembersChanged(str(error)) from error

    def poll(self) -> bool:
        """As the inner one."""
        try:
            return self._inner.poll()
        except LOST as error:
            raise MembersChanged(str(error)) from error

    def finish(self) -> None:
        """One exchange."""
        self._exchange(self._inner.finish)

    def broadcast(self, index: int, root: int = 0) -> None:
        """One exchange."""
        self._exchange(lambda: self._inner.broadcast(index, root))

    def _exchange(self, work: Callable[[], None]) -> None:
        try:
            work()
            if self._confirm is not None:
                self._confirm()
        except LOST as error:
            if self._confirm is not None:
                self._inner.close()  # or others would wait for what comes over links from this member
            if not self._complete():
                raise MembersChanged(str(error)) from error
        self._passes()

    def take_times(self) -> Times:
        """As the inner one."""
        return self._inner.take_times()

    def traffic(self) -> Traffic:
        """As the inner one."""
        return self._inner.traffic()

    def close(self) -> None:
        """As the inner one."""
        self._inner.close()
