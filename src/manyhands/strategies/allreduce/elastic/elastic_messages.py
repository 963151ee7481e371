"""Messages between the workers of an elastic run and its launcher, and the launcher's decisions: frozen values.

A **member** is one process; its number is never reused. A **slot** is the place of a worker, such as `worker 2`,
independent of the process that fills it. An **epoch** is a set of members that exchange only with each other, in
memory or over links that belong to the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.places.run_commands import AddWorker, RemoveWorker
from manyhands.strategies.common.membership import Died, Fail, KillMember, MemberSilent, StartWorker

__all__ = [
    "Abort",
    "ArrivedInEpoch",
    "Ask",
    "BeginEpoch",
    "Depart",
    "Dismiss",
    "Done",
    "ElasticAction",
    "ElasticEvent",
    "EndSoon",
    "EpochSeat",
    "EpochView",
    "GatherEpoch",
    "LeaveEpoch",
    "LeftEpoch",
    "MemberReady",
    "RunOver",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSeat:
    """One worker of an epoch; its rank is its index among the seats."""

    slot: int
    member: int
    fresh: bool = False
    """Whether the member has no state yet and takes that of the donor."""

    host: str = ""
    """The identity of the member's host; empty if all are on one host."""

    address: str = ""
    """The `host:port` at which it accepts members of higher rank; empty if all share memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochView:
    """An epoch: its members in the order of slots, and how the epoch before it ended."""

    epoch: int
    seats: tuple[EpochSeat, ...]
    donor: int | None = None
    """The member whose state the fresh members take; None if no member has any and all begin with that of rank 0."""

    passed: int = 0
    """How many exchanges of the previous epoch count.

    A member that has passed one fewer has the result of the last one in its memory, and takes it as well.
    """

    def rank_of(self, member: int) -> int:
        """The rank of a member that has a seat."""
        return next(rank for rank, seat in enumerate(self.seats) if seat.member == member)

    @property
    def has_fresh(self) -> bool:
        """Whether any member of the epoch takes the donor's state."""
        return any(seat.fresh for seat in self.seats)


# ── workers tell ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReady:
    """A new member has started and waits for an epoch with a seat for it."""

    member: int
    host: str = ""
    """As in `EpochSeat`."""

    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedInEpoch:
    """A member has all resources of the epoch and takes part in its exchanges from now on."""

    member: int
    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftEpoch:
    """A member exchanges nothing more in this epoch and waits for the next view."""

    member: int
    epoch: int
    passed: int
    """How many exchanges of the epoch the member knows to be complete."""

    step: int
    """The number of steps that the member has taken."""

    at_border: bool
    """Whether its next action is a step; otherwise a collective action between two steps, or nothing more."""

    began: bool = False
    """Whether it had begun to compute a step that it has not taken."""

    settled: bool = True
    """Whether it has the state of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The run is over, and this member has left the weights for the launcher."""

    member: int
    epoch: int
    steps_done: int = 0
    samples: int = 0
    seconds: float = 0.0
    """The duration of training."""

    stopped_early: bool = False


ElasticEvent = (
    MemberReady | ArrivedInEpoch | LeftEpoch | Done | Died | MemberSilent | AddWorker | RemoveWorker
)

# ── the launcher tells workers, besides an `EpochView` ────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherEpoch:
    """A member waits to join or leave: all leave the epoch together before the next step."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveEpoch:
    """A member of the epoch is lost: leave it now."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Depart:
    """The member is no longer needed: it ends."""


@dataclass(frozen=True, slots=True)
class EndSoon:
    """The run ends after the next step."""


# ── the launcher's decisions ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Send `GatherEpoch` to the members of the epoch."""

    epoch: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End every wait in the epoch, and send `LeaveEpoch` to its members."""

    epoch: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginEpoch:
    """Give the members of this view the resources of its epoch, then send them the view."""

    view: EpochView


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """Send `Depart` to this member."""

    member: int


@dataclass(frozen=True, slots=True)
class RunOver:
    """The weights are in place, and the run is over."""


ElasticAction = StartWorker | KillMember | Ask | Abort | BeginEpoch | Dismiss | Fail | RunOver
