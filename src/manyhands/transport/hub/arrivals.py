"""What a hub tells its application: values, in the order in which things happened with each member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from manyhands.native.segment import Segment
from manyhands.transport.hub.areas import ArenaReader
from manyhands.transport.hub.frames import NO_PAYLOAD

__all__ = ["Arrived", "HubEvent", "Joined", "Lost", "Ready", "Rejected", "Shared"]


@dataclass(frozen=True, slots=True)
class Joined:
    """This member proved who it is; messages may be sent to it."""

    member: int
    role: str


class Arrived(NamedTuple):
    """A message of a member; `payload` is valid until `release` if it lies in shared memory, else for good.

    A tuple, because it is made for every message, and that of a frozen dataclass takes four times as long.
    """

    member: int
    message: Any
    payload: memoryview = NO_PAYLOAD
    lender: ArenaReader | None = None
    position: int = 0

    def release(self) -> None:
        """The payload is not needed any more; in the order of receipt, or its room is free later. Idempotent."""
        if self.lender is not None:
            self.lender.release(self.position)


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """A member shares memory; the segment is the receiver's to close."""

    member: int
    segment: Segment
    tag: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A registered descriptor can be read."""

    descriptor: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to a member ended, or could not be made; `in_peace` if the member said goodbye."""

    member: int
    reason: str
    in_peace: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """Somebody connected and was not let in: `count` of them since the last such event, `reason` is that of the last.

    Told at once the first time, then at growing intervals. `claimed` is its number, if it had proved the token.
    """

    reason: str
    claimed: int | None = None
    count: int = 1


HubEvent = Joined | Arrived | Shared | Ready | Lost | Rejected
