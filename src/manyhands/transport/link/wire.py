"""What carries bytes between two roles, and in which form: the words by which traffic is counted."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from manyhands.wire.names import CODECS, MOST_STAGES, RAW, words_of

_WIRE_BITS: Final = 8
_STAGE_BITS: Final = 5
_STAGE: Final = (1 << _STAGE_BITS) - 1


class Wire(IntEnum):
    """What carried the bytes."""

    NONE = 0  # nothing was sent
    MEMORY = 1  # shared memory, read where it lies
    SHARED = 2  # a link through a ring in shared memory
    TCP = 3  # a socket
    TORCH = 4  # torch.distributed


_WORDS = {listed.number: word for word, listed in CODECS.items()}

if len(_WORDS) != len(CODECS) or not all(0 < number <= _STAGE for number in _WORDS):
    raise ImportError(f"wire/names.py: every codec needs its own number, from 1 to {_STAGE}")


def wire_of(wire: Wire, codec: str = RAW) -> int:
    """What carried bytes and the codec they were in, as one number: an event keeps both, without the codec's options.

    The codec takes 16 bits above the wire: 5 for each stage of a chain, the first lowest.
    """
    number = 0
    for place, word in enumerate(words_of(codec)):
        number |= CODECS[word].number << _STAGE_BITS * place
    return wire | number << _WIRE_BITS


def codec_of(number: int) -> str:
    """The words of a codec by its number in events, as `topk+int8`; ValueError where there is no such chain."""
    if number == 0:
        return RAW
    words: list[str] = []
    rest = number
    while rest:
        word = _WORDS.get(rest & _STAGE)
        if word is None or len(words) == MOST_STAGES:
            raise ValueError(f"{number} is not a codec")
        words.append(word)
        rest >>= _STAGE_BITS
    return "+".join(words)


def is_codec(number: int) -> bool:
    try:
        codec_of(number)
    except ValueError:
        return False
    return True


KNOWN_WIRES = tuple(Wire)  # what the byte of an event that tells the wire may be
