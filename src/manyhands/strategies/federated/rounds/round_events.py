"""Events of federated rounds and the decisions that follow: plain values, the only things that the core knows.

Times are seconds of one clock, the driver's; a restarted driver has another clock and says so (`ServerResumed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "AbandonRound",
    "BeginRound",
    "ClientGone",
    "ClientSeen",
    "ClientsSeen",
    "CloseRound",
    "EndRounds",
    "RefuseReport",
    "ReportCame",
    "RoundDecision",
    "RoundEvent",
    "RoundFailed",
    "ServerResumed",
    "SumCame",
    "TakeReport",
    "TimePassed",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientSeen:
    """A client asked whether there is work for it."""

    client: int
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientsSeen:
    """Several clients asked for work at once, as in a simulation."""

    clients: tuple[int, ...]
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientGone:
    """A client will not report in this round: it said so, or its message was rejected."""

    client: int
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportCame:
    """A client's report has arrived, and the driver has validated its content."""

    client: int
    attempt: int
    """The attempt for which it was made."""
    digest: str
    """Digest of its content, by which a repeated report is recognised."""
    at_s: float
    norm: float = 0.0
    """Norm of its update; 0 where it was not computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SumCame:
    """The sum of several clients' updates has arrived, in a round in which no single update is seen."""

    attempt: int
    clients: tuple[int, ...]
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundFailed:
    """The current round can no longer produce a sum."""

    attempt: int
    why: str
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePassed:
    """Nothing happened, but the clock has advanced to this time."""

    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerResumed:
    """The server was restarted: sums of an open round, and which clients were present, are lost."""

    at_s: float


RoundEvent: TypeAlias = (
    ClientSeen | ClientsSeen | ClientGone | ReportCame | SumCame | RoundFailed | TimePassed | ServerResumed
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginRound:
    """Save the state, and then ask these clients."""

    attempt: int
    number: int
    """Number of the round, from 0; there may be several attempts at one."""
    asked: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeReport:
    """Add this client's update to the sum."""

    client: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RefuseReport:
    """Do not add this client's report; it is rejected."""

    client: int
    attempt: int
    why: str
    repeated: bool = False
    """Whether it is in the sum already, just as it came now: its sender did not get the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseRound:
    """Move the model by the mean of what was added, and save it together with the state: the round counts."""

    attempt: int
    number: int
    counted: tuple[int, ...]
    """Whose updates are in it."""
    rejected: tuple[int, ...] = ()
    """Whose updates are to be left out of it, since their norms are too large beside the others'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AbandonRound:
    """Forget the sum; the round does not count, and is tried again."""

    attempt: int
    number: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRounds:
    """The rounds are over: all of them count, or no client has come for too long."""

    complete: bool
    why: str


RoundDecision: TypeAlias = BeginRound | TakeReport | RefuseReport | CloseRound | AbandonRound | EndRounds
