"""The one format of bytes between processes, on hubs, links and control channels: a fixed header, a body, a payload.

    offset bytes field
         0     4 magic           b"MHFR"
         4     2 version         of this layout and of the handshake
         6     2 kind            which message the body is
         8     2 flags           1: of the transport itself; 2: the payload lies in shared memory and not in the stream
        10     2 reserved        zero
        12     4 body_bytes
        16     8 payload_bytes
        24     8 position        of the payload in shared memory; else zero

Little-endian. Lengths are checked against limits before anything of that length is read or allocated. The body of a
link's frame has a fixed size (see `link.interface`).

`FrameDecoder` does no I/O: it says where the next bytes go (`room`), takes how many arrived (`advance`), and returns
the frames one by one (`next_frame`). So a large payload is received directly into the application's buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np

from manyhands.errors import UserError, format_bytes
from manyhands.transport.messages import ProtocolError

OF_TRANSPORT: Final = 1
IN_ARENA: Final = 2
NO_PAYLOAD: Final = memoryview(b"")

_VERSION: Final = 4
_MAGIC: Final = int.from_bytes(b"MHFR", "little")
_TLS_HANDSHAKE: Final = int.from_bytes(b"\x16\x03", "little")
_LAYOUT: Final = struct.Struct("<IHHHHIQQ")
HEADER_BYTES: Final = _LAYOUT.size
_BUFFER_BYTES: Final = 64 << 10

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The longest body and payload that a peer may announce."""

    body_bytes: int = 64 << 20
    payload_bytes: int = 1 << 34

    def __post_init__(self) -> None:
        if not 0 <= self.body_bytes < 1 << 32:
            raise UserError(f"body_bytes={self.body_bytes} must be from 0 to 2**32-1")
        if self.payload_bytes < 0:
            raise UserError(f"payload_bytes={self.payload_bytes} must be at least 0")


class FrameHeader(NamedTuple):
    """The fields of the 32-byte header that vary."""

    kind: int
    flags: int
    body_bytes: int
    payload_bytes: int
    position: int


class WholeFrame(NamedTuple, Generic[T]):
    """A complete frame; `payload` is empty if there is none, or if it is in shared memory."""

    header: FrameHeader
    message: T
    payload: memoryview


def encode_header(kind: int, flags: int, body_bytes: int, payload_bytes: int, position: int = 0) -> bytes:
    return _LAYOUT.pack(_MAGIC, _VERSION, kind, flags, 0, body_bytes, payload_bytes, position)


def decode_header(
    data: bytes | bytearray | memoryview, offset: int, max_body_bytes: int, max_payload_bytes: int
) -> FrameHeader:
    """Decode a header; ProtocolError names the first field that is not allowed."""
    magic, version, kind, flags, reserved, body, payload, position = _LAYOUT.unpack_from(data, offset)
    if magic != _MAGIC:
        if magic & 0xFFFF == _TLS_HANDSHAKE:
            raise ProtocolError("magic", "the peer uses TLS; give this process --tls DIR too")
        raise ProtocolError("magic", f"{magic:#010x} instead of {_MAGIC:#010x}; the peer is not manyhands")
    if version != _VERSION:
        raise ProtocolError("version", f"the peer uses {version}, this end {_VERSION}; run the same release")
    if flags & ~(OF_TRANSPORT | IN_ARENA):
        raise ProtocolError("flags", f"{flags:#06x} is unknown")
    if reserved:
        raise ProtocolError("reserved", "must be zero in this version")
    if body > max_body_bytes or payload > max_payload_bytes:
        field, size, most = "body_bytes", body, max_body_bytes
        if body <= max_body_bytes:
            field, size, most = "payload_bytes", payload, max_payload_bytes
        raise ProtocolError(field, f"{format_bytes(size)} announced, at most {format_bytes(most)} allowed")
    if position and not flags & IN_ARENA:
        raise ProtocolError("position", "it is only for payloads in shared memory")
    return FrameHeader(kind, flags, body, payload, position)


class FrameDecoder(Generic[T]):
    """Incremental decoder: bytes in, in pieces of any size; frames out.

    `interpret` turns a header and its body into a message; `place` then returns the destination of the payload,
    before it is read: a writable view of exactly that many bytes, or None for new memory. Either may raise
    ProtocolError, after which the stream is unusable.
    """

    def __init__(
        self,
        limits: Limits,
        interpret: Callable[[FrameHeader, memoryview], T],
        place: Callable[[T, int], memoryview | None] = lambda _message, _num_bytes: None,
    ) -> None:
        self.limits = limits
        self._interpret = interpret
        self._place = place
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0  # received, but not decoded yet
        self._header: FrameHeader | None = None  # of a body or payload that is being filled
        self._message: T | None = None  # once the body is complete
        self._target = NO_PAYLOAD
        self._filled = 0

    @property
    def between_frames(self) -> bool:
        return self._header is None and self._begin == self._end

    @property
    def partial(self) -> tuple[T | None, int]:
        """The message whose payload is being received, if there is one, and how many bytes of it are here."""
        return self._message, self._filled

    def unfinished(self, num_bytes: int) -> bytes:
        return bytes(self._view[self._begin : min(self._end, self._begin + num_bytes)])

    def room(self) -> memoryview:
        """The buffer for the next bytes; never empty."""
        if self._header is not None:
            return self._target[self._filled :]
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin:
            rest = self._end - self._begin
            self._view[:rest] = bytes(self._view[self._begin : self._end])
            self._begin, self._end = 0, rest
        return self._view[self._end :]

    def advance(self, num_bytes: int) -> None:
        if self._header is None:
            self._end += num_bytes
        else:
            self._filled += num_bytes

    def next_frame(self) -> WholeFrame[T] | None:
        if self._header is not None:
            return self._filled_frame()
        begin = self._begin
        if self._end - begin < HEADER_BYTES:
            return None
        header = decode_header(self._view, begin, self.limits.body_bytes, self.limits.payload_bytes)
        body_begin, body_end = begin + HEADER_BYTES, begin + HEADER_BYTES + header.body_bytes
        if body_end <= self._end:
            self._begin = body_end
            return self._understood(header, self._view[body_begin:body_end])
        if body_end - begin > _BUFFER_BYTES:  # a shorter one fits into the buffer
            self._begin = body_begin
            self._fill(header, fresh_bytes(header.body_bytes))
        return None

    def _understood(self, header: FrameHeader, body: memoryview) -> WholeFrame[T] | None:
        message = self._interpret(header, body)
        num_bytes = header.payload_bytes
        if num_bytes == 0 or header.flags & IN_ARENA:
            return WholeFrame(header, message, NO_PAYLOAD)
        target = self._place(message, num_bytes)
        if target is None:
            target = fresh_bytes(num_bytes)
        elif target.nbytes != num_bytes:
            raise ProtocolError("payload_bytes", f"{num_bytes} bytes announced, {target.nbytes} expected")
        self._message = message
        self._fill(header, target.cast("B"))
        return self._filled_frame()

    def _fill(self, header: FrameHeader, target: memoryview) -> None:
        here = min(self._end - self._begin, len(target))
        target[:here] = self._view[self._begin : self._begin + here]
        self._begin += here
        self._header, self._target, self._filled = header, target, here

    def _filled_frame(self) -> WholeFrame[T] | None:
        header, message, target = self._header, self._message, self._target
        if header is None or self._filled < len(target):
            return None
        self._header, self._message, self._target = None, None, NO_PAYLOAD
        if message is None:
            return self._understood(header, target)
        return WholeFrame(header, message, target)


def fresh_bytes(num_bytes: int) -> memoryview:
    """Uninitialized memory: clearing a large payload takes as long as receiving it."""
    try:
        return np.empty(num_bytes, np.uint8).data
    except MemoryError:
        raise ProtocolError("payload_bytes", f"not enough memory for {format_bytes(num_bytes)}") from None
