"""The one interface by which two roles exchange messages, whatever carries them.

A link has two ends, one per role. Every outcome is a value, so the type checker reports a caller that forgets one:

    send     Queued · Full (back-pressure: nothing was taken, try again) · Closed · PeerDied
    receive  Received · TimedOut · Closed · PeerDied
    flush    Flushed · TimedOut · Closed · PeerDied

`Closed` means that an end closed the link after everything it had queued was delivered; `PeerDied` means that the peer
went without that. Messages of one direction arrive in the order of their sends, each whole, and before the end.

Every message is a frame (see `transport.frames`) whose body of 32 bytes says what the raw bytes of one tensor behind it
are, little-endian, nothing else: no code, no names, no lengths inside the payload. A receiver refuses what is malformed
or too large before it reads or allocates anything.

    offset  size  field
         0    32  header          of kind 1, a message, or 2, the goodbye that ends a link
        32     4  kind            what the message means; the two roles agree on it
        36     4  tag             which part (bucket, chunk, shard) it is about
        40     8  step            which step, clock or round it belongs to
        48     8  sequence        0, 1, 2, … per direction of a link
        56     2  dtype           code of the payload's dtype; 0 for no payload
        58     6  reserved        zero
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Final, NamedTuple

import torch

from manyhands.errors import UserError, format_bytes
from manyhands.native.closeable import Closeable
from manyhands.native.dtypes import CODES, LINKED
from manyhands.transport import frames
from manyhands.transport.link.wire import Wire
from manyhands.transport.messages import ProtocolError

DEFAULT_MAX_PAYLOAD_BYTES: Final = 1 << 34

_BODY: Final = struct.Struct("<IIQQH6s")
HEADER_BYTES: Final = frames.HEADER_BYTES + _BODY.size
_RESERVED: Final = bytes(6)
_U32: Final = 1 << 32
_U64: Final = 1 << 64

_DTYPE_CODES: Final[dict[torch.dtype | None, int]] = {None: 0, **{dtype: CODES[dtype] for dtype in LINKED}}
_DTYPES: Final = {code: dtype for dtype, code in _DTYPE_CODES.items()}

if HEADER_BYTES != 64:
    raise ImportError(f"a link's header is {HEADER_BYTES} bytes, and payloads must be aligned to 64")


class FrameKind(IntEnum):
    """What follows a header: a message with its payload, or nothing more, because the sender closed the link."""

    MESSAGE = 1
    GOODBYE = 2


_FRAMES: Final = {int(frame): frame for frame in FrameKind}
_GOODBYE: Final = int(FrameKind.GOODBYE)


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One thing said by one role to another: three numbers and at most one tensor.

    `kind` and `tag` are 32-bit, `step` 64-bit, all unsigned. The payload is one-dimensional, contiguous, on
    the CPU and of a supported dtype; no copy is taken, so it must not change until the link is flushed.
    """

    kind: int
    step: int = 0
    tag: int = 0
    payload: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.kind < _U32 and 0 <= self.tag < _U32 and 0 <= self.step < _U64):
            for name, bits in (("kind", 32), ("tag", 32), ("step", 64)):
                if not 0 <= getattr(self, name) < 1 << bits:
                    raise UserError(f"message {name}={getattr(self, name)} must be from 0 to 2**{bits}-1")
        tensor = self.payload
        if tensor is None:
            return
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise UserError(
                f"the payload has shape {tuple(tensor.shape)}; it must be one-dimensional and contiguous: "
                "send tensor.contiguous().view(-1)"
            )
        if tensor.dtype not in _DTYPE_CODES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in LINKED)
            raise UserError(f"the payload has dtype {tensor.dtype}; allowed are {allowed}")
        if not tensor.is_cpu:
            raise UserError(f"the payload is on {tensor.device}; it must be on the CPU: send tensor.cpu()")

    @classmethod
    def announced(cls, header: Header, payload: torch.Tensor | None) -> Message:
        """The message that `header` came before; what makes a header has checked all of it."""
        message = object.__new__(cls)
        put = object.__setattr__  # as the constructor does, which would check it again
        put(message, "kind", header.kind)
        put(message, "step", header.step)
        put(message, "tag", header.tag)
        put(message, "payload", payload)
        return message

    @property
    def payload_bytes(self) -> int:
        return 0 if self.payload is None else self.payload.nbytes


class Header(NamedTuple):
    """The 64 bytes before every payload."""

    frame: FrameKind
    kind: int
    tag: int
    step: int
    sequence: int
    dtype: torch.dtype | None
    payload_bytes: int

    @classmethod
    def of(cls, message: Message, sequence: int) -> Header:
        kind, tag, step, payload = message.kind, message.tag, message.step, message.payload
        if payload is None:
            return cls(FrameKind.MESSAGE, kind, tag, step, sequence, None, 0)
        return cls(FrameKind.MESSAGE, kind, tag, step, sequence, payload.dtype, payload.nbytes)

    @classmethod
    def goodbye(cls, sequence: int) -> Header:
        return cls(FrameKind.GOODBYE, 0, 0, 0, sequence, None, 0)

    @property
    def items(self) -> int:
        return 0 if self.dtype is None else self.payload_bytes // self.dtype.itemsize

    def encode(self) -> bytes:
        frame, kind, tag, step, sequence, dtype, payload_bytes = self
        return frames.encode_header(frame, 0, _BODY.size, payload_bytes) + _BODY.pack(
            kind, tag, step, sequence, _DTYPE_CODES[dtype], _RESERVED
        )

    @classmethod
    def decode(
        cls,
        data: bytes | bytearray | memoryview,
        max_payload_bytes: int,
        due: int | None = None,
        peer: str = "",
    ) -> Header:
        """Read 64 bytes from a peer, of the message that is due; ProtocolError names the first field not allowed."""
        if len(data) != HEADER_BYTES:
            raise ProtocolError("length", f"a header has {HEADER_BYTES} bytes, not {len(data)}")
        frame, flags, body, payload_bytes, _ = frames.decode_header(data, 0, _BODY.size, max_payload_bytes)
        kind, tag, step, sequence, code, reserved = _BODY.unpack_from(data, frames.HEADER_BYTES)
        if frame not in _FRAMES:
            raise ProtocolError("frame", f"unknown frame {frame}")
        if flags or body != _BODY.size:
            raise ProtocolError("flags" if flags else "body_bytes", "must be 0 and 32 on a link")
        if code not in _DTYPES:
            raise ProtocolError("dtype", f"unknown dtype code {code}")
        dtype = _DTYPES[code]
        if dtype is None:
            if payload_bytes:
                raise ProtocolError("payload_bytes", f"{payload_bytes} bytes announced without a dtype")
        elif payload_bytes % dtype.itemsize:
            raise ProtocolError(
                "payload_bytes", f"{payload_bytes} bytes are not a multiple of {dtype.itemsize}, for {dtype}"
            )
        if frame == _GOODBYE and (dtype is not None or kind or tag or step):
            raise ProtocolError("frame", "a goodbye must be empty")
        if reserved != _RESERVED:
            raise ProtocolError("reserved", "must be zero in this version")
        if due not in (None, sequence):
            raise ProtocolError("sequence", f"{peer} sent number {sequence}, but number {due} was expected")
        return cls(_FRAMES[frame], kind, tag, step, sequence, dtype, payload_bytes)


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


class Link(Closeable, ABC):
    """One end of a connection between two roles; a context manager.

    One thread may send and flush while another receives; two threads must not do the same at once. `peer`
    names the other role in every sentence; `counters` are live.
    """

    wire: ClassVar[Wire] = Wire.NONE  # what carries the bytes
    peer: str
    counters: LinkCounters

    @abstractmethod
    def send(self, message: Message) -> SendOutcome:
        """Take the message at once, without waiting for the peer.

        The payload is not copied: it must not change until `flush` says Flushed. The queue is bounded in bytes: a
        message that does not fit is refused as Full, except that an empty queue takes one message of any size. Raises
        ProtocolError if it is larger than the link's largest payload.
        """

    @abstractmethod
    def receive(self, timeout_s: float, into: torch.Tensor | None = None) -> ReceiveOutcome:
        """Wait at most `timeout_s` (0: only look) for the next message of the peer.

        With `into`, the payload is written to its beginning and the message's payload is that part of it; the dtype
        must be the same and the room enough, else ProtocolError is raised and the message stays for the next receive.
        After a TimedOut the link may have begun to fill `into`: pass the same tensor again (another one is filled by a
        copy at the end). ProtocolError if the peer breaks the protocol; the link is then of no further use.
        """

    @abstractmethod
    def flush(self, timeout_s: float) -> FlushOutcome:
        """Wait at most `timeout_s` until everything queued has left this end."""

    @abstractmethod
    def close(self) -> None:
        """End the link and free what it holds; idempotent.

        What is still queued may be dropped, and the peer then sees PeerDied and not Closed: flush first. A receive or
        flush in another thread returns Closed.
        """


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
