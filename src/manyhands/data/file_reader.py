"""Data files read forward and exactly, gunzipped on the way; every error names the file and the offset."""

from __future__ import annotations

import gzip
import importlib.util
import io
import math
import struct
import zlib
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import DataError, UserError, format_bytes

__all__ = ["DataFile", "bundled_file", "read_idx"]


_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20


class DataFile:
    """Reads a file from its start to its end; a context manager.

    Memory grows with what the file really holds, never with what a header promises. Offsets of a gzip file
    count its uncompressed bytes.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.offset = 0
        self._raw: io.BufferedReader | None = None
        self._gzip: gzip.GzipFile | None = None

    def __enter__(self) -> Self:
        try:
            self._raw = self.path.open("rb")
            compressed = self._raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            self._raw.seek(0)
        except OSError as error:
            self.close()
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
        if compressed:
            self._gzip = gzip.GzipFile(fileobj=self._raw, mode="rb")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        for stream in (self._gzip, self._raw):
            if stream is not None:
                stream.close()
        self._gzip = self._raw = None

    def take(self, num_bytes: int, what: str) -> bytearray:
        """Exactly the next `num_bytes`, which hold `what`; a file that ends before that is truncated."""
        start = self.offset
        found = self.up_to(num_bytes)
        if len(found) < num_bytes:
            about = f"{what} at offset {start} should have {num_bytes} bytes, found {len(found)}"
            raise self.error(self.offset, f"the file is truncated: {about}")
        return found

    def rest(self, limit_bytes: int) -> bytearray:
        """Everything up to the end of the file, at most `limit_bytes`; a longer file is refused."""
        found = self.up_to(limit_bytes)
        if self.up_to(1):
            raise DataError(f"{self.path} holds more than {format_bytes(limit_bytes)}; give a smaller file")
        return found

    def expect_end(self, after: str) -> None:
        """Reject a file that continues where it should end; for gzip this also checks its checksum."""
        end = self.offset
        if self.up_to(1):
            raise self.error(end, f"the file continues after {after}; it should end there")

    def error(self, offset: int, problem: str) -> DataError:
        unit = "uncompressed byte" if self._gzip is not None else "byte"
        return DataError(f"{self.path}, {unit} {offset}: {problem}")

    def up_to(self, num_bytes: int) -> bytearray:
        """The next `num_bytes`, or fewer where the file ends."""
        stream = self._gzip if self._gzip is not None else self._raw
        if stream is None:
            raise ValueError(f"{self.path} is closed")
        found = bytearray()
        while len(found) < num_bytes:
            try:
                # read1 gives what is there, so that damage further on does not hide how far the file was good
                piece = stream.read1(min(num_bytes - len(found), _CHUNK_BYTES))
            except EOFError as error:
                raise self.error(self.offset, "the file is truncated: gzip ends early") from error
            except (OSError, zlib.error) as error:
                raise self.error(self.offset, f"the file is damaged: {error}") from error
            if not piece:
                break
            found += piece
            self.offset += len(piece)
        return found


_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MAX_DIMS = 8  # no idx file in use has more than four; a larger count is a sign of another format


def read_idx(path: Path | str, *, limit_bytes: int = 2**31) -> NDArray[Any]:
    """The array in an idx file, the format of MNIST, plain or gzip, in the machine's byte order.

        offset 0   0 0          two zero bytes
        offset 2   type code    08 uint8 · 09 int8 · 0B int16 · 0C int32 · 0D float32 · 0E float64
        offset 3   d            number of dimensions
        offset 4   d × uint32   their sizes, big-endian
        then       the items, big-endian, last dimension fastest, and nothing after them

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
        size, limit = format_bytes(num_bytes), format_bytes(limit_bytes)
        raise file.error(4, f"{_times(shape)} items of {dtype.name} make {size}, over the limit of {limit}")
    return dtype, shape


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def bundled_file(name: str, what: str) -> Path | None:
    """The file of a table inside scikit-learn; None where the version that is installed keeps it elsewhere.

    UserError if it is not installed, which says that `what` comes with it.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise UserError(f"{what} come with scikit-learn, which is not installed: pip install scikit-learn")
    file = Path(found.submodule_search_locations[0], "datasets", "data", name)
    return file if file.exists() else None
