"""What an application gives a hub, its settings, and gets back: events, in order with each member."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from manyhands.errors import UserError
from manyhands.native.segment import Segment
from manyhands.transport.frames import NO_PAYLOAD, Limits
from manyhands.transport.hub.arenas import ArenaReader
from manyhands.transport.liveness import LivenessTimes
from manyhands.transport.security import Security

_SPIN_S: Final = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The limits, timeouts and security of a hub.

    `queue_bytes` bounds what is queued for one peer; `arena_bytes` is the capacity for payloads in shared memory, per
    direction of a Unix connection; `spin_s` is how long `poll` spins before it sleeps; `connect_s` is how long a member
    that does not answer is dialled; `security` says how TCP connections are protected. With `progress_bytes`, a payload
    that is being received is reported whenever so many more of its bytes are here; 0: never. With `unsent_bytes`, the
    kernel takes no more than that of what it cannot send yet, and the end of a queue is reported, too.
    """

    limits: Limits = field(default_factory=Limits)
    liveness: LivenessTimes = field(default_factory=LivenessTimes)
    queue_bytes: int = 64 << 20
    arena_bytes: int = 1 << 20
    spin_s: float = 0.0
    connect_s: float = 60.0
    progress_bytes: int = 0
    unsent_bytes: int = 0
    security: Security = field(default_factory=Security.loopback)

    def __post_init__(self) -> None:
        numbers = ("queue_bytes", "arena_bytes", "spin_s", "connect_s", "progress_bytes", "unsent_bytes")
        for name in numbers:
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} must be at least 0")


def spin_for(processes: int) -> float:
    """`spin_s` for a host where so many processes wait for each other: 0 if they must share cores."""
    return _SPIN_S if processes <= len(os.sched_getaffinity(0)) else 0.0


class Joined(NamedTuple):
    """A member proved its identity; messages may be sent to it."""

    member: int
    role: str


class Arrived(NamedTuple):
    """A message from a member; a `payload` in shared memory is valid until `release`, any other for good."""

    member: int
    message: Any
    payload: memoryview = NO_PAYLOAD
    lender: ArenaReader | None = None
    position: int = 0

    def release(self) -> None:
        """Release the payload; in order of receipt, or its space is freed later. Idempotent."""
        if self.lender is not None:
            self.lender.release(self.position)


class Arriving(NamedTuple):
    """So many bytes of a message's payload are where they belong; its `Arrived`, or the end of the member, follows."""

    member: int
    message: Any
    num_bytes: int


class Drained(NamedTuple):
    """The kernel has taken all that was queued for a member."""

    member: int


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """A member shared memory; the receiver owns the segment and closes it."""

    member: int
    segment: Segment
    tag: int


class Ready(NamedTuple):
    """A registered descriptor is readable."""

    descriptor: int


class Lost(NamedTuple):
    """The connection to a member ended or could not be made.

    `in_peace`: the member said goodbye. `final`: one end rejected the other, which another attempt would not change.
    """

    member: int
    reason: str
    in_peace: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """`count` connections were rejected since the last such event, the last for `reason`.

    `claimed` is its member number, if it had proved the token.
    """

    reason: str
    claimed: int | None = None
    count: int = 1


HubEvent = Joined | Arrived | Arriving | Drained | Shared | Ready | Lost | Rejected
