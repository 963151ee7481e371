"""Metrics as JSON lines: one object a line, each with its `step`, only ever appended to.

A line is one write, so a process that dies leaves at most a last line without its end; such a line is no
record, and the next writer removes it. A reader may look at any time. Lines are synced to the disk at `close`
and not one by one: the death of a process takes none, a power failure may take the last seconds' worth.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from manyhands.errors import DataError, UserError
from manyhands.store.atomic import WriteFailed, reason, render_json, write_all, write_atomically

__all__ = ["MetricsLog"]


class MetricsLog:
    """The metrics of one run; a context manager, `close` is idempotent. `append` opens the file."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record, which then survives the death of this process.

        A number that is not finite is written as null. WriteFailed leaves the file as it was before.
        """
        _require_step(record, f"the record {dict(record)!r}", UserError)
        line = render_json(record, "the record")
        try:
            if self._descriptor is None:
                self._descriptor = _open_at_a_line_end(self.path)
            end = os.fstat(self._descriptor).st_size
            try:
                write_all(self._descriptor, line)
            except OSError:
                os.ftruncate(self._descriptor, end)
                raise
        except OSError as error:
            raise WriteFailed(f"{self.path} could not be written: {reason(error)}") from error

    def read(self) -> list[dict[str, Any]]:
        """All records in order; a torn last line is none. DataError names any other damaged line."""
        return [record for record, _ in self._records()]

    def truncate_after(self, step: int) -> int:
        """Remove the records of steps after `step`, whole or not at all; return how many they were.

        A run that resumes from the checkpoint of `step` computes those again.
        """
        self.close()
        records = list(self._records())
        kept = [line for record, line in records if record["step"] <= step]
        if len(kept) < len(records):
            write_atomically(self.path, kept)
        return len(records) - len(kept)

    def close(self) -> None:
        """Sync the file to the disk and let go of it; a later `append` opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise WriteFailed(f"{self.path} could not be synced: {reason(error)}") from error
            finally:
                os.close(descriptor)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
                    raise DataError(f"{where} is not JSON; remove that line to go on without it") from None
                _require_step(record, where, DataError)
                yield record, line
                offset += len(line)


def _require_step(record: Any, where: str, error: type[UserError]) -> None:
    if not isinstance(record, Mapping) or not isinstance(record.get("step"), int):
        raise error(f"{where} is no record of metrics: it has no whole number as its `step`")


def _open_at_a_line_end(path: Path) -> int:
    """Open for appending, without a last line that has no end (the next record would be glued to it)."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        end = os.fstat(descriptor).st_size
        keep = end
        while keep and os.pread(descriptor, 1, keep - 1) != b"\n":
            keep -= 1
        if keep < end:
            os.ftruncate(descriptor, keep)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
