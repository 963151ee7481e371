"""A member's control connection to the launcher, local or remote.

A listener thread reads the launcher's messages, so that the notice of a loss ends waits that could never complete.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from manyhands.engine.reporting import WorkerNote
from manyhands.errors import Aborted, PeerTimeout
from manyhands.places.external.control_messages import Wakeup
from manyhands.places.local.control import Context, TypedNotes
from manyhands.strategies.allreduce.elastic import elastic_membership as core

REPORTS = TypedNotes(core.MemberReady, core.ArrivedInEpoch, core.LeftEpoch, core.Done, WorkerNote)
ORDERS = TypedNotes(core.EpochView, core.GatherEpoch, core.LeaveEpoch, core.Depart, core.EndSoon)
_LOOK_S = 1.0


class Departed(Exception):
    """Raised when the launcher has dismissed this member."""


class ListeningContext(Context, Protocol):
    """A worker context whose control connection a thread can wait for."""

    def control_fileno(self) -> int:
        """The descriptor that is readable when the launcher has sent something."""


class MemberLine:
    """One member's end, the only reader of its context's messages; `close` is idempotent.

    `early` holds messages that the launcher has sent before.
    """

    def __init__(
        self,
        context: ListeningContext,
        member: int,
        timeout_s: float,
        early: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self.member, self._context, self._timeout_s = member, context, timeout_s
        self._views: list[core.EpochView] = []
        self.gather = self._leave = 0  # the last epoch whose members are to gather, or to leave
        self._departs = self._ends_soon = self._closed = False
        self._on_leave: tuple[int, Callable[[], None]] | None = None
        self._broken: Exception | None = None
        self._changed = threading.Condition()
        self._wakeup = Wakeup()
        for payload in early:
            self._sort(payload)
        self._thread = threading.Thread(target=self._listen, name="manyhands member line", daemon=True)
        self._thread.start()

    def tell(self, report: Any) -> None:
        REPORTS.send(self._context, report)

    @property
    def departs(self) -> bool:
        self._require_whole()
        return self._departs

    def stop_requested(self) -> bool:
        """Whether the run ends after the next step."""
        self._require_whole()
        return self._ends_soon or self._context.stopping

    def must_leave(self, epoch: int) -> bool:
        self._require_whole()
        return self._leave >= epoch

    def is_over(self, epoch: int, wait_s: float = 0.0) -> bool:
        """Wait up to the given time; return whether to leave this epoch, or whether the run is being stopped."""
        with self._changed:
            return self._changed.wait_for(lambda: self.must_leave(epoch) or self._context.stopping, wait_s)

    def on_leave(self, epoch: int, act: Callable[[], None]) -> None:
        """Call `act`, from any thread, when this epoch is to be left; replaces an earlier callback."""
        with self._changed:
            self._on_leave = epoch, act
            self._act()

    def wait(self, epoch: int) -> None:
        """Wait until this member is dismissed or told to leave the epoch, at most one second."""
        with self._changed:
            self._changed.wait_for(lambda: self.departs or self.is_over(epoch), _LOOK_S)

    def next_view(self, after: int) -> core.EpochView:
        """Wait for the view of the next epoch; raises Departed if this member is dismissed instead."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while True:
                self._require_whole()
                self._views = [view for view in self._views if view.epoch > after]
                if self._views:
                    return self._views.pop(0)
                if self._departs:
                    raise Departed
                if self._context.stopping:
                    raise Aborted("the run is being stopped")
                if time.monotonic() > deadline:
                    raise PeerTimeout(
                        f"{self._context.name} waited {self._timeout_s:g} s for all others to leave epoch {after}; "
                        "check whether one of them is slow, or raise the timeout",
                        -1,
                    )
                self._changed.wait(_LOOK_S)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._wakeup.ring()
            self._thread.join()
            self._wakeup.close()

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _listen(self) -> None:
        try:
            while not self._closed and not self._context.stopping:
                select.select([self._context.control_fileno(), self._wakeup.descriptor], [], [], _LOOK_S)
                for payload in self._context.received():
                    self._sort(payload)
        except Exception as error:
            self._broken = error
        with self._changed:
            self._act()
            self._changed.notify_all()

    def _sort(self, payload: Mapping[str, Any]) -> None:
        order = ORDERS.read(payload)
        with self._changed:
            match order:
                case core.EpochView() as view:
                    self._views.append(view)
                case core.GatherEpoch(epoch=epoch):
                    self.gather = epoch
                case core.LeaveEpoch(epoch=epoch):
                    self._leave = epoch
                case core.Depart():
                    self._departs = True
                case core.EndSoon():
                    self._ends_soon = True
            self._act()
            self._changed.notify_all()

    def _act(self) -> None:
        if self._on_leave is None:
            return
        epoch, act = self._on_leave
        if self._leave >= epoch or self._broken is not None or self._context.stopping:
            self._on_leave = None
            act()
