"""What the workers of an elastic run tell its launcher, what it tells them, and what it decides: frozen values.

A **member** is one process; its number is never used again. A **slot** is the place of a worker, `worker 2`, whoever
holds it. An **epoch** is a set of members who exchange among themselves alone, in memory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.engine.run_commands import AddWorker, RemoveWorker

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
    "GiveUp",
    "KillWorker",
    "LeaveEpoch",
    "LeftEpoch",
    "MemberReady",
    "RunOver",
    "StartMember",
    "WorkerLost",
    "WorkerSilent",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSeat:
    """One worker of an epoch; its rank is its place among the seats."""

    slot: int
    member: int
    fresh: bool = False
    """Whether it has no state yet and takes that of the donor."""

    host: str = ""
    """The identity of the host it is on; empty where all are on one."""

    address: str = ""
    """The `host:port` at which it lets in those of higher rank; empty where all share memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochView:
    """An epoch: who is in it, in the order of slots, and what became of the epoch before."""

    epoch: int
    seats: tuple[EpochSeat, ...]
    donor: int | None = None
    """The member whose state the fresh ones take; None where nobody has any: all begin with that of rank 0."""

    passed: int = 0
    """How many exchanges of the epoch before were taken. Whoever has passed one less has the result of the last one in
    its memory, and takes it, too."""

    def rank_of(self, member: int) -> int:
        """The rank of a member that has a seat."""
        return next(rank for rank, seat in enumerate(self.seats) if seat.member == member)

    @property
    def has_fresh(self) -> bool:
        """Whether somebody takes a state."""
        return any(seat.fresh for seat in self.seats)


# ── workers tell ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReady:
    """A new member is there, and waits for an epoch that it is in."""

    member: int
    host: str = ""
    """As in `EpochSeat`."""

    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedInEpoch:
    """A member has everything that the epoch needs and exchanges in it from now on."""

    member: int
    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftEpoch:
    """A member exchanges nothing more in this epoch, and waits for the next."""

    member: int
    epoch: int
    passed: int
    """How many exchanges of the epoch it knows to be complete."""

    step: int
    """Steps that it has taken."""

    at_border: bool
    """Whether what it does next is a step; otherwise something that all do together between two, or nothing more."""

    began: bool = False
    """Whether it had begun to compute a step that it has not taken."""

    settled: bool = True
    """Whether it has the state of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The run is over, and this member has left the weights where the launcher finds them."""

    member: int
    epoch: int
    steps_done: int = 0
    samples: int = 0
    seconds: float = 0.0
    """Of training."""

    stopped_early: bool = False


# ── the launcher notices, and is asked for ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The member's process is gone."""

    member: int
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSilent:
    """The member gives no sign of life."""

    member: int


ElasticEvent = (
    MemberReady | ArrivedInEpoch | LeftEpoch | Done | WorkerLost | WorkerSilent | AddWorker | RemoveWorker
)

# ── the launcher tells workers, besides an `EpochView` ────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherEpoch:
    """Somebody waits to join or to go: leave the epoch together before the next step."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveEpoch:
    """Somebody of the epoch is lost: leave it now."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Depart:
    """Nothing more is wanted of this member: it ends."""


@dataclass(frozen=True, slots=True)
class EndSoon:
    """The run is to end after the next step."""


# ── the launcher's decisions ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMember:
    """Start a process for this slot."""

    member: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """It must not wake up again."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Tell the members of the epoch to `GatherEpoch`."""

    epoch: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End every wait in the epoch, and tell its members to `LeaveEpoch`."""

    epoch: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginEpoch:
    """Give the members of this view what its epoch needs, and tell them."""

    view: EpochView


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """Tell this member to `Depart`."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The run cannot go on."""

    sentence: str


@dataclass(frozen=True, slots=True)
class RunOver:
    """The weights are where they are wanted."""


ElasticAction = StartMember | KillWorker | Ask | Abort | BeginEpoch | Dismiss | GiveUp | RunOver
