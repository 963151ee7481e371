"""The idx format of the MNIST files: a magic number, the dimensions' sizes, the items, all big-endian.

offset 0   0 0          two zero bytes
offset 2   type code    08 uint8 · 09 int8 · 0B int16 · 0C int32 · 0D float32 · 0E float64
offset 3   d            number of dimensions
offset 4   d × uint32   their sizes
then       the items, last dimension fastest, and nothing after them
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.data.file_reader import DataFile
from manyhands.errors import format_bytes

__all__ = ["read_idx"]

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MAX_DIMS = 8  # no idx file in use has more than four; a larger count is a sign of another format


def read_idx(path: Path | str, *, limit_bytes: int = 2**31) -> NDArray[Any]:
    """The array in an idx file, plain or gzip, in the machine's byte order.

    Anything but one whole idx file raises DataError naming the file and the offset; items of more than
    `limit_bytes` are refused before they are read.
    """
    with DataFile(path) as file:
        dtype, shape = _read_header(file, limit_bytes)
        items = file.take(math.prod(shape) * dtype.itemsize, f"{_times(shape)} items of {dtype.name}")
        file.expect_end("its last item")
    array = np.frombuffer(items, dtype).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _read_header(file: DataFile, limit_bytes: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    magic = file.take(4, "the magic number of an idx file")
    if magic[:2] != b"\0\0":
        raise file.error(0, f"not an idx file: it starts with {magic[:2].hex(' ')}, expected 00 00")
    if magic[2] not in _TYPES:
        known = ", ".join(f"{code:02x}" for code in _TYPES)
        raise file.error(2, f"the idx type code is {magic[2]:02x}; allowed: {known}")
    if not 1 <= magic[3] <= _MAX_DIMS:
        raise file.error(3, f"the idx file has {magic[3]} dimensions; allowed: 1 to {_MAX_DIMS}")
    dtype = np.dtype(_TYPES[magic[2]])
    shape = struct.unpack(f">{magic[3]}I", file.take(4 * magic[3], f"the sizes of {magic[3]} dimensions"))
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > limit_bytes:
        raise file.error(
            4,
            f"{_times(shape)} items of {dtype.name} make {format_bytes(num_bytes)}, "
            f"over the limit of {format_bytes(limit_bytes)}",
        )
    return dtype, shape


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
