"""The one interface by which two roles exchange messages, whatever carries them.

A link has two ends, one per role. Every outcome is a value, so a caller that forgets one is told by the type
checker:

    send     Queued · Full (back-pressure: nothing was taken, try again) · Closed · PeerDied
    receive  Received · TimedOut · Closed · PeerDied
    flush    Flushed · TimedOut · Closed · PeerDied

`Closed` means that an end closed the link after everything it had queued was delivered; `PeerDied` means that
the peer went without that. Messages of one direction arrive in the order of their sends, each whole. What
arrived before the end is received before the end is told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Final, Self

import torch

from manyhands.errors import format_bytes
from manyhands.transport.link.message import Header, Message
from manyhands.transport.link.wire import Wire
from manyhands.transport.messages import ProtocolError

__all__ = [
    "DEFAULT_QUEUE_BYTES",
    "Closed",
    "FlushOutcome",
    "Flushed",
    "Full",
    "Link",
    "LinkCounters",
    "PeerDied",
    "Queued",
    "ReceiveOutcome",
    "Received",
    "SendOutcome",
    "TimedOut",
]

DEFAULT_QUEUE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Queued:
    """The link took the message; `pending_bytes`, headers included, have not left yet."""

    pending_bytes: int


@dataclass(frozen=True, slots=True)
class Full:
    """The link took nothing: `pending_bytes` wait for the peer; receive or flush, then try again."""

    pending_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Closed:
    """One of the two ends closed the link, and nothing it had queued was lost."""


@dataclass(frozen=True, slots=True)
class PeerDied:
    """The peer went without closing the link; `reason` is a sentence that names it."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A message arrived."""

    message: Message


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The deadline passed; nothing is lost, and the same call may be made again."""

    waited_s: float


@dataclass(frozen=True, slots=True)
class Flushed:
    """Everything queued has left: its payloads may be changed."""


SendOutcome = Queued | Full | Closed | PeerDied
ReceiveOutcome = Received | TimedOut | Closed | PeerDied
FlushOutcome = Flushed | TimedOut | Closed | PeerDied


@dataclass(slots=True)
class LinkCounters:
    """What one end has done so far, in messages taken or handed out and in bytes of payload."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    full_count: int = 0


class Link(ABC):
    """One end of a connection between two roles; a context manager.

    One thread may send and flush while another receives; two threads must not do the same at once. `peer`
    names the other role in every sentence; `counters` are live.
    """

    wire: ClassVar[Wire] = Wire.NONE
    """What carries the bytes."""

    peer: str
    counters: LinkCounters

    @abstractmethod
    def send(self, message: Message) -> SendOutcome:
        """Take the message at once, without waiting for the peer.

        The payload is not copied: it must not change until `flush` says Flushed. The queue is bounded in
        bytes: a message that does not fit is refused as Full, except that an empty queue takes one message of
        any size (so a large message is never stuck). Raises ProtocolError if it is larger than the link's
        largest payload.
        """

    @abstractmethod
    def receive(self, timeout_s: float, into: torch.Tensor | None = None) -> ReceiveOutcome:
        """Wait at most `timeout_s` (0: only look) for the next message of the peer.

        With `into`, the payload is written to its beginning and the message's payload is that part of it; the
        dtype must be the same and the room enough, else ProtocolError is raised and the message stays for the
        next receive. After a TimedOut the link may have begun to fill `into`, and may go on: pass the same
        tensor again (another one is filled by a copy at the end). Raises ProtocolError when the peer sends
        what the protocol does not allow; the link is then of no further use.
        """

    @abstractmethod
    def flush(self, timeout_s: float) -> FlushOutcome:
        """Wait at most `timeout_s` until everything queued has left this end."""

    @abstractmethod
    def close(self) -> None:
        """End the link and free what it holds; idempotent.

        What is still queued may be dropped, and the peer then sees PeerDied and not Closed: flush first. A
        receive or flush in another thread returns Closed.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def room_for(header: Header, into: torch.Tensor | None, peer: str) -> torch.Tensor | None:
    """Where the announced payload goes: the beginning of `into`, a fresh tensor, or None for no payload."""
    if header.dtype is None:
        return None
    if into is None:
        return torch.empty(header.items, dtype=header.dtype)
    count, room = header.items, into.numel()
    if into.dtype != header.dtype or room < count or into.dim() != 1 or not into.is_contiguous():
        raise ProtocolError(
            "payload_bytes",
            f"{peer} sent {header.items} × {header.dtype} (kind {header.kind}, tag {header.tag}, step "
            f"{header.step}), which does not fit into a tensor of shape {tuple(into.shape)} and {into.dtype}",
        )
    return into if room == count else into[:count]


def hand_out(header: Header, payload: torch.Tensor | None, into: torch.Tensor | None, peer: str) -> Received:
    """The outcome for a message that is here; its payload is copied if it is not yet where it is wanted."""
    if payload is not None and into is not None and payload.data_ptr() != into.data_ptr():
        wanted = room_for(header, into, peer)
        payload = payload if wanted is None else wanted.copy_(payload)
    return Received(Message.announced(header, payload))


def check_size(num_bytes: int, max_payload_bytes: int, peer: str) -> None:
    """Raise ProtocolError for a payload that the peer would refuse."""
    if num_bytes > max_payload_bytes:
        raise ProtocolError(
            "payload_bytes",
            f"{format_bytes(num_bytes)} for {peer}, at most {format_bytes(max_payload_bytes)} allowed",
        )
