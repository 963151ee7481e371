"""The events that a hub returns to its application, in the order in which they happened with each member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from manyhands.native.segment import Segment
from manyhands.transport.hub.areas import ArenaReader
from manyhands.transport.hub.frames import NO_PAYLOAD

__all__ = ["Arrived", "HubEvent", "Joined", "Lost", "Ready", "Rejected", "Shared"]


@dataclass(frozen=True, slots=True)
class Joined:
    """A member proved its identity; messages may be sent to it."""

    member: int
    role: str


class Arrived(NamedTuple):
    """A message from a member; a `payload` in shared memory is valid until `release`, any other for good.

    It is a tuple, because one is made for every message, and a frozen dataclass takes four times as long.
    """

    member: int
    message: Any
    payload: memoryview = NO_PAYLOAD
    lender: ArenaReader | None = None
    position: int = 0

    def release(self) -> None:
        """Release the payload; in order of receipt, or its space is freed later. Idempotent."""
        if self.lender is not None:
            self.lender.release(self.position)


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """A member shared memory; the receiver owns the segment and closes it."""

    member: int
    segment: Segment
    tag: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A registered descriptor is readable."""

    descriptor: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to a member ended or could not be made; `in_peace` if the member said goodbye."""

    member: int
    reason: str
    in_peace: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """Connections were rejected: `count` of them since the last such event; `reason` is that of the last one.

    The first is reported at once, later ones at growing intervals. `claimed` is its member number, if it had proved
    the token.
    """

    reason: str
    claimed: int | None = None
    count: int = 1


HubEvent = Joined | Arrived | Shared | Ready | Lost | Rejected
