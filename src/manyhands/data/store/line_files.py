"""Append-only files of lines that survive resumes and full disks, and the metrics of a run in one.

Metrics are JSON objects, one a line, each with its `step`. A reader may look at any time. They are synced to the
disk at `close` and not one by one: the death of a process takes none, a power failure may take the last seconds' worth.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from manyhands.data.store.atomic import (
    WriteFailed,
    reason,
    render_json,
    sync_directory,
    write_all,
    write_atomically,
)
from manyhands.errors import DataError, UserError
from manyhands.native.closeable import Closeable

__all__ = ["Backlog", "LineFile", "MetricsLog"]


_BLOCK = 1 << 16
_T = TypeVar("_T")


class LineFile:
    """Appends lines to `path`, which `append` opens; `close` is idempotent, and a later `append` opens it again.

    A line is there whole or not at all. A disk that takes only a part of one gets that part taken back; what a crash or
    a power failure left without its end (the rest of a line, or blocks that read as zeros) is removed by the next
    writer, so that nothing is ever glued to it. Every line is in the kernel's hands when `append` returns, and outlives
    its process; `sync` makes it outlive the machine.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._num_lines: int | None = None  # until somebody asks, or the first line comes
        self._descriptor: int | None = None
        self._is_named = False

    @property
    def num_lines(self) -> int:
        """The lines of the whole file, including those from before a resume."""
        if self._num_lines is None:
            try:
                with self.path.open("rb") as file:
                    self._num_lines, _, _ = _count_lines(file.fileno())
            except FileNotFoundError:
                return 0
        return self._num_lines

    def append(self, lines: bytes) -> None:
        """Add a line, its end included, or several at once; WriteFailed leaves the file as it was before."""
        try:
            if self._descriptor is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                descriptor = os.open(self.path, flags, 0o666)
                try:
                    self._num_lines, keep, size = _count_lines(descriptor)
                    if keep < size:
                        os.ftruncate(descriptor, keep)
                except BaseException:
                    os.close(descriptor)
                    raise
                self._descriptor = descriptor
            end = os.fstat(self._descriptor).st_size
            try:
                write_all(self._descriptor, lines)
            except OSError:
                os.ftruncate(self._descriptor, end)
                raise
        except OSError as error:
            raise WriteFailed(f"{self.path} could not be written: {reason(error)}") from error
        self._num_lines = self.num_lines + lines.count(b"\n")

    def sync(self) -> None:
        """Have every line on the disk; WriteFailed where it does not take them."""
        if self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
                if not self._is_named:  # a new file's name is in the directory's own keeping
                    sync_directory(self.path.parent)
                    self._is_named = True
            except OSError as error:
                raise WriteFailed(f"{self.path} could not be synced: {reason(error)}") from error

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


class Backlog(Generic[_T]):
    """Records on their way to a disk that may be full: what it does not take waits here, and is tried again in order.

    So a run continues, and its file is complete once there is space again. `write` takes all that it is given, or none
    of it and raises WriteFailed.
    """

    def __init__(self, write: Callable[[Sequence[_T]], None]) -> None:
        self._write = write
        self._waiting: deque[_T] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, *records: _T) -> str | None:
        """Write records behind those that wait; what to say, where they are the first that the disk does not take."""
        is_first = not self._waiting
        self._waiting.extend(records)
        try:
            self.retry()
        except WriteFailed as error:
            return f"{error}; the run continues, and tries again" if is_first else None
        return None

    def retry(self) -> None:
        """Write all pending records, or as many as the disk has space for; WriteFailed keeps the others."""
        at_once = len(self._waiting)
        while self._waiting:
            try:
                self._write([*itertools.islice(self._waiting, at_once)])
            except WriteFailed:
                if at_once == 1:
                    raise
                at_once = 1
                continue
            for _ in range(min(at_once, len(self._waiting))):
                self._waiting.popleft()


def _count_lines(descriptor: int) -> tuple[int, int, int]:
    """How many whole lines there are, how many bytes those take, and how many bytes there are."""
    num_lines, keep, offset = 0, 0, 0
    while block := os.pread(descriptor, _BLOCK, offset):
        if ends := block.count(b"\n"):
            num_lines, keep = num_lines + ends, offset + block.rindex(b"\n") + 1
        offset += len(block)
    return num_lines, keep, offset


class MetricsLog(Closeable):
    """The metrics of one run; a context manager, `close` is idempotent. `append` opens the file."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = Path(path), LineFile(path)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add records, which then survive the death of this process.

        A number that is not finite is written as null. WriteFailed leaves the file as it was before.
        """
        for record in records:
            _require_step(record, UserError, f"the record {record!r}")
        self._file.append(b"".join(render_json(record, "the record") for record in records))

    def read(self) -> list[dict[str, Any]]:
        """All records in order; a torn last line is none. DataError names any other damaged line."""
        return [record for record, _ in self._records()]

    def truncate_after(self, step: int) -> int:
        """`keep` those up to `step`: a run that resumes from its checkpoint computes the others again."""
        return self.keep(lambda record: bool(record["step"] <= step))

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> int:
        """Remove the records that are not `wanted`, whole or not at all; return how many they were."""
        self.close()
        records = list(self._records())
        kept = [line for record, line in records if wanted(record)]
        if len(kept) < len(records):
            write_atomically(self.path, kept)
        return len(records) - len(kept)

    def close(self) -> None:
        """Sync the file to the disk and close it; a later `append` opens it again."""
        try:
            self._file.sync()
        finally:
            self._file.close()

    def _records(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            offset = 0
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return  # its writer died, or is writing it just now
                where = f"{self.path} line {number} (at byte {offset})"
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    raise DataError(f"{where} is not JSON; remove that line to continue without it") from None
                _require_step(record, DataError, where)
                yield record, line
                offset += len(line)


def _require_step(record: Any, error: type[UserError], where: str) -> None:
    if not isinstance(record, Mapping) or not isinstance(record.get("step"), int):
        raise error(f"{where} is no record of metrics: it has no integer as its `step`")
