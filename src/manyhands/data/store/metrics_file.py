"""Metrics as JSON lines: one object a line, each with its `step`, only ever appended to.

A line is one write, so a process that dies leaves at most a last line without its end; such a line is no
record, and the next writer removes it. A reader may look at any time. Lines are synced to the disk at `close`
and not one by one: the death of a process takes none, a power failure may take the last seconds' worth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from manyhands.data.store.atomic import render_json, write_atomically
from manyhands.data.store.lines import LineFile
from manyhands.errors import DataError, UserError

__all__ = ["MetricsLog"]


class MetricsLog:
    """The metrics of one run; a context manager, `close` is idempotent. `append` opens the file."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file = LineFile(self.path)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add records, which then survive the death of this process.

        A number that is not finite is written as null. WriteFailed leaves the file as it was before.
        """
        for record in records:
            _require_step(record, UserError)
        self._file.append(b"".join(render_json(record, "the record") for record in records))

    def read(self) -> list[dict[str, Any]]:
        """All records in order; a torn last line is none. DataError names any other damaged line."""
        return [record for record, _ in self._records()]

    def truncate_after(self, step: int) -> int:
        """Remove the records of steps after `step`, whole or not at all; return how many they were.

        A run that resumes from the checkpoint of `step` computes those again.
        """
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

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
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
                _require_step(record, DataError, where)
                yield record, line
                offset += len(line)


def _require_step(record: Any, error: type[UserError], where: str | None = None) -> None:
    if not isinstance(record, Mapping) or not isinstance(record.get("step"), int):
        where = f"the record {record!r}" if where is None else where
        raise error(f"{where} is no record of metrics: it has no whole number as its `step`")
