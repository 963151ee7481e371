"""What carries bytes between two roles, and in which form: the words by which traffic is counted."""

from __future__ import annotations

from enum import IntEnum

from manyhands.wire.names import CODECS, RAW

__all__ = ["KNOWN_WIRES", "Wire", "codec_of", "wire_of"]

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


_NUMBERS = {RAW: 0, **{word: listed.number for word, listed in CODECS.items()}}
_WORDS = {number: word for word, number in _NUMBERS.items()}

if len(_WORDS) != len(_NUMBERS) or not all(0 <= number < 1 << _CODEC_BITS for number in _WORDS):
    raise ImportError("wire/names.py: every codec needs a number of its own, from 1 to 15")


def wire_of(wire: Wire, codec: str = RAW) -> int:
    """What carried bytes, and the name of the codec they were in, in the one byte that an event has for both."""
    return wire | _NUMBERS[codec] << _CODEC_BITS


def codec_of(both: int) -> tuple[Wire, str]:
    """What `wire_of` put together; ValueError where there is no such pair."""
    number = both >> _CODEC_BITS
    if number not in _WORDS:
        raise ValueError(f"{number} is no codec")
    return Wire(both & (1 << _CODEC_BITS) - 1), _WORDS[number]


KNOWN_WIRES = tuple(wire_of(wire, codec) for wire in Wire for codec in _NUMBERS)
"""What that byte may be."""
