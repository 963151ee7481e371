"""A data file read forward and exactly, gunzipped on the way; every error names the file and the offset."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import Self

from manyhands.errors import DataError, format_bytes

__all__ = ["DataFile"]

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
        found = self._up_to(num_bytes)
        if len(found) < num_bytes:
            raise DataError(
                f"{self._place(self.offset)}: the file is truncated: {what} at offset {start} "
                f"should have {num_bytes} bytes, found {len(found)}"
            )
        return found

    def rest(self, limit_bytes: int) -> bytearray:
        """Everything up to the end of the file, at most `limit_bytes`; a longer file is refused."""
        found = self._up_to(limit_bytes)
        if self._up_to(1):
            raise DataError(f"{self.path} holds more than {format_bytes(limit_bytes)}; give a smaller file")
        return found

    def begins(self, num_bytes: int) -> bytearray:
        """The next bytes, up to so many, to look at."""
        return self._up_to(num_bytes)

    def expect_end(self, after: str) -> None:
        """Reject a file that continues where it should end; for gzip this also checks its checksum."""
        end = self.offset
        if self._up_to(1):
            raise DataError(f"{self._place(end)}: the file goes on after {after}; it should end there")

    def error(self, offset: int, problem: str) -> DataError:
        """A DataError about what was found at `offset`."""
        return DataError(f"{self._place(offset)}: {problem}")

    def _up_to(self, num_bytes: int) -> bytearray:
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
                raise DataError(
                    f"{self._place(self.offset)}: the file is truncated: gzip ends early"
                ) from error
            except (OSError, zlib.error) as error:
                raise DataError(f"{self._place(self.offset)}: the file is damaged: {error}") from error
            if not piece:
                break
            found += piece
            self.offset += len(piece)
        return found

    def _place(self, offset: int) -> str:
        unit = "uncompressed byte" if self._gzip is not None else "byte"
        return f"{self.path}, {unit} {offset}"
