"""Drains the event rings of a run into files.

A full ring, a full file or a full disk does not stop a run: losses are counted and reported in the notes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from manyhands.errors import UserError
from manyhands.observe.record.event_files import EventFileWriter
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import Records

__all__ = ["DEFAULT_MAX_BYTES", "EventKeeper"]

DEFAULT_MAX_BYTES = 256 << 20
"""What the event files of one run may take on disk together: four million events."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class EventKeeper:
    """Drains the rings and, with a `directory`, appends to `<name>.bin` there, up to `max_bytes` in total.

    The caller owns the rings, given under the names of their files. Call from one thread at a time.
    """

    def __init__(
        self,
        rings: Mapping[str, EventRing],
        directory: Path | None = None,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        wall_offset_ns: int | None = None,
    ) -> None:
        if max_bytes < 0:
            raise UserError(f"max_bytes={max_bytes} is not allowed; it is 0 or more")
        self.directory = directory
        self._rings = dict(rings)
        self._max_file_bytes = max_bytes // len(rings)
        self._wall_offset_ns = wall_offset_ns
        self._files: dict[str, EventFileWriter] = {}
        self._refusal = ""

    def open(self) -> None:
        """Create the files, if there is a directory."""
        if self.directory is None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for name, ring in self._rings.items():
                self._files[name] = EventFileWriter.create(
                    self.directory,
                    name=name,
                    role=ring.role,
                    max_bytes=self._max_file_bytes,
                    wall_offset_ns=self._wall_offset_ns,
                )
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _FULL:  # the files opened so far are kept
                self._refusal = (
                    f"{self.directory} took no more files ({error.strerror}): some events are not kept"
                )
                return
            self.close()
            raise

    def take(self) -> Iterator[tuple[int, Records]]:
        """Return what each role recorded since the last call; it is already in the role's file."""
        for name, ring in self._rings.items():
            records = ring.drain()
            if not len(records):
                continue
            if name in self._files:
                self._files[name].append(records)
            yield ring.role, records

    def counts(self) -> dict[str, Any]:
        """Return the numbers of events recorded, dropped and not written; call before the rings close."""
        return {
            "recorded": sum(ring.written for ring in self._rings.values()),
            "dropped": sum(ring.dropped for ring in self._rings.values()),
            "unwritten": sum(file.unwritten for file in self._files.values()),
            "notes": self.notes(),
        }

    def notes(self) -> list[str]:
        """Return one sentence for each loss of events; empty when there was none."""
        losses = [
            f"{name} recorded faster than it was read: {ring.dropped} events are missing from all figures"
            for name, ring in self._rings.items()
            if ring.dropped
        ]
        losses += [self._refusal] if self._refusal else []
        return losses + [file.note for file in self._files.values() if file.note]

    def close(self) -> None:
        """Complete the files; call before the rings close."""
        for name, file in self._files.items():
            file.close(self._rings[name].dropped)
