"""A member's line to the launcher: what it is told, what it tells, and the memory of each epoch that it is given."""

from __future__ import annotations

import select
import socket
import time
from typing import Any

from manyhands.allreduce.elastic.changes import (
    ArrivedInEpoch,
    Depart,
    Done,
    EndSoon,
    EpochView,
    GatherEpoch,
    LeaveEpoch,
    LeftEpoch,
    MemberReady,
)
from manyhands.allreduce.elastic.files import receive_files
from manyhands.cluster.context import RoleContext
from manyhands.cluster.notes import TypedNotes
from manyhands.errors import Aborted, PeerTimeout
from manyhands.training.reporting import WorkerNote

__all__ = ["ORDERS", "REPORTS", "Departed", "MemberLine"]

REPORTS = TypedNotes(MemberReady, ArrivedInEpoch, LeftEpoch, Done, WorkerNote)
ORDERS = TypedNotes(EpochView, GatherEpoch, LeaveEpoch, Depart, EndSoon)
_LOOK_S = 1.0


class Departed(Exception):
    """Nothing more is wanted of this member."""


class MemberLine:
    """One member's end; used by the thread of its job."""

    def __init__(self, context: RoleContext, timeout_s: float) -> None:
        self.member = context.rank
        self._context = context
        self._timeout_s = timeout_s
        self._files = socket.socket(fileno=context.descriptor("files"))
        self._views: list[EpochView] = []
        self._gather = self._leave = 0
        self.departs = False
        """Whether it was told to end."""

        self._ends_soon = False

    def tell(self, report: Any) -> None:
        """Say something to the launcher."""
        self._context.send(REPORTS.write(report))

    def stop_requested(self) -> bool:
        """Whether the run is to end after the next step; reads what came."""
        self._read()
        return self._ends_soon or self._context.stopping

    def is_asked(self, epoch: int) -> bool:
        """Whether the members of this epoch are to meet before the next step, by what was read so far."""
        return self._gather == epoch

    def is_told_to_leave(self, epoch: int) -> bool:
        """Whether somebody of this epoch is lost; reads what came."""
        self._read()
        return self._leave >= epoch

    def wait(self) -> None:
        """Until the launcher says something, or a second has passed."""
        select.select([self._context.control_fileno()], [], [], _LOOK_S)

    def next_view(self, after: int) -> EpochView:
        """Wait for the view of the next epoch; Departed where this member is to end instead."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._read()
            self._views = [view for view in self._views if view.epoch > after]
            if self._views:
                return self._views.pop(0)
            if self.departs:
                raise Departed
            if self._context.stopping:
                raise Aborted("the run is being taken down")
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"{self._context.name} waited {self._timeout_s:g} s for all others to leave epoch {after}; see "
                    "whether one of them is slow, or allow more time",
                    -1,
                )
            self.wait()

    def files(self, epoch: int) -> dict[str, int]:
        """The memory and links of an epoch whose view has come: descriptors that are the caller's."""
        return receive_files(self._files, epoch, self._timeout_s)

    def close(self) -> None:
        """Let go of the socket."""
        self._files.close()

    def _read(self) -> None:
        for payload in self._context.told():
            match ORDERS.read(payload):
                case EpochView() as view:
                    self._views.append(view)
                case GatherEpoch(epoch=epoch):
                    self._gather = epoch
                case LeaveEpoch(epoch=epoch):
                    self._leave = epoch
                case Depart():
                    self.departs = True
                case EndSoon():
                    self._ends_soon = True
