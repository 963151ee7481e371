"""What carries bytes between two roles, and in which form: the words by which traffic is counted."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["KNOWN_WIRES", "Codec", "Wire", "codec_of", "wire_of"]

_CODEC_BITS = 4


class Wire(IntEnum):
    """What carried the bytes."""

    NONE = 0
    """Nothing was sent."""
    MEMORY = 1
    """Shared memory, read where it lies."""
    SHARED = 2
    """A link through a ring in shared memory."""
    TCP = 3
    """A socket."""
    TORCH = 4
    """torch.distributed."""


class Codec(IntEnum):
    """What the bytes are."""

    RAW = 0
    """The numbers as they lie in memory."""


def wire_of(wire: Wire, codec: Codec = Codec.RAW) -> int:
    """Both in the one byte that an event has for them."""
    return wire | codec << _CODEC_BITS


def codec_of(both: int) -> tuple[Wire, Codec]:
    """What `wire_of` put together; ValueError where there is no such pair."""
    return Wire(both & (1 << _CODEC_BITS) - 1), Codec(both >> _CODEC_BITS)


KNOWN_WIRES = tuple(wire_of(wire, codec) for wire in Wire for codec in Codec)
"""What that byte may be."""
