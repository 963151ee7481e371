"""What travels over a link: a typed message, and the fixed header that announces it.

Every message is one header of 64 bytes and then the raw bytes of one tensor, little-endian, nothing else: no
code, no names, no lengths inside the payload. The header says how many bytes follow, so a receiver refuses
what is malformed or too large before it reads or allocates anything.

    offset  size  field
         0     4  magic           0x4B4C484D, "MHLK" as bytes
         4     2  version         of this layout
         6     2  frame           a message (1), or the goodbye that ends a link (2)
         8     4  kind            what the message means; the two roles agree on it
        12     4  tag             which part (bucket, chunk, shard) it is about
        16     8  step            which step, clock or round it belongs to
        24     8  sequence        0, 1, 2, … per direction of a link
        32     8  payload_bytes   length of what follows
        40     2  dtype           code of the payload's dtype; 0 for no payload
        42    22  reserved        zero
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import torch

from manyhands.errors import UserError, format_bytes
from manyhands.native.dtypes import CODES, LINKED
from manyhands.transport.messages import ProtocolError

__all__ = [
    "DEFAULT_MAX_PAYLOAD_BYTES",
    "HEADER_BYTES",
    "MAGIC",
    "PROTOCOL_VERSION",
    "FrameKind",
    "Header",
    "Message",
]

MAGIC: Final = 0x4B4C484D
PROTOCOL_VERSION: Final = 1
DEFAULT_MAX_PAYLOAD_BYTES: Final = 1 << 34

_LAYOUT: Final = struct.Struct("<IHHIIQQQH22s")
HEADER_BYTES: Final = _LAYOUT.size
_RESERVED: Final = bytes(22)
_U32: Final = 1 << 32
_U64: Final = 1 << 64

_DTYPE_CODES: Final = {dtype: CODES[dtype] for dtype in LINKED}
_NO_PAYLOAD: Final = 0
_DTYPES: Final = {code: dtype for dtype, code in _DTYPE_CODES.items()}

if HEADER_BYTES != 64:
    raise ImportError(f"link/message.py: the header is {HEADER_BYTES} bytes, the protocol says 64")


class FrameKind(IntEnum):
    """What follows a header."""

    MESSAGE = 1
    """A message with its payload."""
    GOODBYE = 2
    """Nothing, ever again: the sender closed the link after its last message."""


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
        if not 0 <= self.kind < _U32:
            raise UserError(f"message kind={self.kind}: must be from 0 to 2**32-1")
        if not 0 <= self.tag < _U32:
            raise UserError(f"message tag={self.tag}: must be from 0 to 2**32-1")
        if not 0 <= self.step < _U64:
            raise UserError(f"message step={self.step}: must be from 0 to 2**64-1")
        if self.payload is not None:
            _check_payload(self.payload)

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
        """Size of the payload; 0 where there is none."""
        return 0 if self.payload is None else self.payload.nbytes


def _check_payload(tensor: torch.Tensor) -> None:
    """Raise UserError unless the bytes of `tensor` lie in one run in CPU memory and its dtype has a code."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise UserError(
            f"payload of shape {tuple(tensor.shape)}: must be one-dimensional and contiguous; "
            "send tensor.contiguous().view(-1)"
        )
    if tensor.dtype not in _DTYPE_CODES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in LINKED)
        raise UserError(f"payload of dtype {tensor.dtype}: allowed are {allowed}")
    if not tensor.is_cpu:
        raise UserError(f"payload on device {tensor.device}: must be on the CPU; send tensor.cpu()")


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
        """The header that announces `message` as number `sequence` of its direction."""
        kind, tag, step, payload = message.kind, message.tag, message.step, message.payload
        if payload is None:
            return cls(FrameKind.MESSAGE, kind, tag, step, sequence, None, 0)
        return cls(FrameKind.MESSAGE, kind, tag, step, sequence, payload.dtype, payload.nbytes)

    @classmethod
    def goodbye(cls, sequence: int) -> Header:
        """The header that ends a direction after `sequence` messages."""
        return cls(FrameKind.GOODBYE, 0, 0, 0, sequence, None, 0)

    @property
    def items(self) -> int:
        """Number of items in the payload."""
        return 0 if self.dtype is None else self.payload_bytes // self.dtype.itemsize

    def encode(self) -> bytes:
        """These fields as 64 bytes."""
        code = _NO_PAYLOAD if self.dtype is None else _DTYPE_CODES[self.dtype]
        return _LAYOUT.pack(
            MAGIC,
            PROTOCOL_VERSION,
            self.frame,
            self.kind,
            self.tag,
            self.step,
            self.sequence,
            self.payload_bytes,
            code,
            _RESERVED,
        )

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, max_payload_bytes: int) -> Header:
        """Read 64 bytes from a peer; ProtocolError names the first field that is not allowed."""
        if len(data) != HEADER_BYTES:
            raise ProtocolError("length", f"a header is {HEADER_BYTES} bytes, not {len(data)}")
        magic, version, frame, kind, tag, step, sequence, payload_bytes, code, reserved = _LAYOUT.unpack(data)
        if magic != MAGIC:
            raise ProtocolError(
                "magic", f"{magic:#010x} instead of {MAGIC:#010x}; the peer is no link of ours"
            )
        if version != PROTOCOL_VERSION:
            raise ProtocolError(
                "version", f"the peer speaks {version}, this end {PROTOCOL_VERSION}; run one release on both"
            )
        if frame not in _FRAMES:
            raise ProtocolError("frame", f"unknown frame {frame}")
        if code != _NO_PAYLOAD and code not in _DTYPES:
            raise ProtocolError("dtype", f"unknown dtype code {code}")
        dtype = None if code == _NO_PAYLOAD else _DTYPES[code]
        _check_length(payload_bytes, dtype, max_payload_bytes)
        if frame == _GOODBYE and (dtype is not None or kind or tag or step):
            raise ProtocolError("frame", "a goodbye carries nothing")
        if reserved != _RESERVED:
            raise ProtocolError("reserved", "must be zero in this version")
        return cls(_FRAMES[frame], kind, tag, step, sequence, dtype, payload_bytes)


def _check_length(payload_bytes: int, dtype: torch.dtype | None, max_payload_bytes: int) -> None:
    if payload_bytes > max_payload_bytes:
        raise ProtocolError(
            "payload_bytes",
            f"{format_bytes(payload_bytes)} announced, at most {format_bytes(max_payload_bytes)} allowed",
        )
    if dtype is None and payload_bytes:
        raise ProtocolError("payload_bytes", f"{payload_bytes} bytes announced without a dtype")
    if dtype is not None and payload_bytes % dtype.itemsize:
        raise ProtocolError("payload_bytes", f"{payload_bytes} bytes are no whole number of {dtype} items")
