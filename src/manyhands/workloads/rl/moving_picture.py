"""Pictures as one moving picture: an animated PNG, which every browser shows and zlib can write.

A picture after the first holds only the rectangle in which it differs from the one before. With at most 256 colours
a pixel is one byte. The format: https://www.w3.org/TR/png-3/
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from manyhands.workloads.rl.stepping import Array

__all__ = ["moving_picture"]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PALETTE, _COLOURS = 3, 2  # what a pixel is: the number of a colour, or red, green and blue
_MOST_COLOURS = 256
_FASTEST_MS = 20  # browsers take shorter times for a mistake


def moving_picture(pictures: Sequence[Array], ms_each: int, most_bytes: int) -> bytes:
    """Pictures (height, width, 3) of bytes, or (height, width) of grays, shown for so long each, again and again.

    Where they are more than `most_bytes`, every other one is left out, as often as it takes, and the rest are shown for
    longer; a single picture is as large as it is.
    """
    coloured = [np.stack([one] * 3, 2) if one.ndim == 2 else one for one in pictures]
    while len(made := _written(coloured, ms_each)) > most_bytes and len(coloured) > 1:
        coloured, ms_each = coloured[::2], 2 * ms_each
    return made


def _written(pictures: Sequence[Array], ms_each: int) -> bytes:
    height, width, _ = pictures[0].shape
    colours, pixels = _numbered(pictures)
    kind = _COLOURS if colours is None else _PALETTE
    parts = [_SIGNATURE, _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))]
    if colours is not None:
        parts.append(_chunk(b"PLTE", colours.tobytes()))
    parts.append(_chunk(b"acTL", struct.pack(">II", len(pictures), 0)))
    parts += _frames(pixels, max(_FASTEST_MS, ms_each))
    return b"".join([*parts, _chunk(b"IEND", b"")])


def _frames(pictures: Sequence[Array], ms_each: int) -> Iterator[bytes]:
    number = 0  # of the chunks that make up the animation
    before: Array | None = None
    for one in pictures:
        top, left, part = (0, 0, one) if before is None else _changed(before, one)
        place = struct.pack(">IIII", part.shape[1], part.shape[0], left, top)
        yield _chunk(b"fcTL", struct.pack(">I", number) + place + struct.pack(">HHBB", ms_each, 1000, 0, 0))
        rows = part.reshape(len(part), -1)
        data = zlib.compress(
            np.pad(rows, ((0, 0), (1, 0))).tobytes(), 9
        )  # a row begins with its filter: none
        if before is None:
            yield _chunk(b"IDAT", data)
            number += 1
        else:
            yield _chunk(b"fdAT", struct.pack(">I", number + 1) + data)
            number += 2
        before = one


def _changed(before: Array, after: Array) -> tuple[int, int, Array]:
    """The smallest rectangle that has all that changed: its first row and column, and its pixels."""
    differs = before != after
    differs = differs.any(2) if differs.ndim == 3 else differs
    rows, columns = np.flatnonzero(differs.any(1)), np.flatnonzero(differs.any(0))
    if not len(rows):
        return 0, 0, after[:1, :1]
    top, left = int(rows[0]), int(columns[0])
    return top, left, after[top : rows[-1] + 1, left : columns[-1] + 1]


def _numbered(pictures: Sequence[Array]) -> tuple[Array | None, Sequence[Array]]:
    """The colours of all pictures, and the number of each pixel's; None and the pictures where they are too many."""
    whole = [one.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32) for one in pictures]
    colours = np.zeros(0, np.uint32)
    for one in whole:
        colours = np.union1d(colours, one)
        if len(colours) > _MOST_COLOURS:
            return None, pictures
    numbered = [np.searchsorted(colours, one).astype(np.uint8) for one in whole]
    return colours.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 1:], numbered


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
