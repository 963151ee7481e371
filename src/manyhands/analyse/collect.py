"""The one reader of all rings of a run: a background thread that empties them into totals and files.

Roles record and go on; this side does the rest, a few times a second: drain every ring, append the raw
records to `<role>.bin` in the events directory, add them up. Nothing here can hold a role back, and neither a
full ring, a full file nor a full disk stops a run: what is lost is counted, and the summary says so.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from manyhands.analyse.totals import Snapshot, Totals
from manyhands.errors import ManyhandsError, UserError
from manyhands.record.files import EventFileWriter
from manyhands.record.ring import EventRing

__all__ = ["DEFAULT_MAX_BYTES", "Collector"]

DEFAULT_MAX_BYTES = 256 << 20
"""What the event files of one run may take on disk together: four million events."""

_STOP_TIMEOUT_S = 10.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Collector:
    """Reads the rings of a run in the background, from `start` (or entering) to `close` (or leaving).

    `rings` are those of roles 0, 1, … under the names their files get, or with `workers` of any roles, of
    which those below that number are workers and count in the totals. The caller owns them, and closes them
    after the collector. With a `directory` the events are kept on disk, up to `max_bytes` in all and the same
    for each role; `wall_offset_ns` as in `EventFileWriter.create`.
    """

    def __init__(
        self,
        rings: Mapping[str, EventRing],
        *,
        workers: int | None = None,
        directory: Path | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        wall_offset_ns: int | None = None,
        interval_s: float = 0.05,
    ) -> None:
        roles = [ring.role for ring in rings.values()]
        is_whole = sorted(roles) == list(range(len(roles)))
        if not roles or len(set(roles)) < len(roles) or (workers is None and not is_whole):
            raise UserError(f"rings={roles} is not allowed; it holds one ring for each role 0, 1, ...")
        if max_bytes < 0:
            raise UserError(f"max_bytes={max_bytes} is not allowed; it is 0 or more")
        self._rings = dict(rings)
        self._directory = directory
        self._max_file_bytes = max_bytes // len(roles)
        self._interval_s = interval_s
        self._wall_offset_ns = wall_offset_ns
        self._files: dict[str, EventFileWriter] = {}
        self._refusal = ""
        self._workers = len(roles) if workers is None else workers
        self._totals = Totals(self._workers)
        # Two locks, so that a view which asks for a snapshot never waits for a disk.
        self._reading = threading.Lock()  # the rings and the files
        self._adding = threading.Lock()  # the totals
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Collector:
        """Open the files and begin to read."""
        if self._directory is not None:
            self._open_files(self._directory)
        self._thread = threading.Thread(target=self._run, name="manyhands-events", daemon=True)
        self._thread.start()
        return self

    def flush(self) -> None:
        """Take in everything recorded until now, in the calling thread."""
        with self._reading:
            for name, ring in self._rings.items():
                records = ring.drain()
                if not len(records):
                    continue
                if ring.role < self._workers:
                    with self._adding:
                        self._totals.update(records)
                if name in self._files:
                    self._files[name].append(records)

    def snapshot(self) -> Snapshot:
        """The run as far as it was read; from any thread."""
        with self._adding:
            return self._totals.snapshot(time.monotonic_ns())

    def summary(self) -> dict[str, Any]:
        """For a summary: totals `per_worker`, who was `slow`, the fate of the `events`; before the rings close."""
        workers = self.snapshot().workers
        with self._adding:
            slow = self._totals.slow_ever()
        return {
            "per_worker": [worker.to_dict() for worker in workers],
            "slow": [straggler.to_dict() for straggler in slow],
            "events": {
                "recorded": sum(ring.written for ring in self._rings.values()),
                "dropped": sum(ring.dropped for ring in self._rings.values()),
                "unwritten": sum(file.unwritten for file in self._files.values()),
                "notes": self.notes(),
            },
        }

    def notes(self) -> list[str]:
        """A sentence for each loss of events; empty when there was none."""
        losses = [
            f"{name} recorded faster than it was read: {ring.dropped} events are missing from all figures"
            for name, ring in self._rings.items()
            if ring.dropped
        ]
        losses += [self._refusal] if self._refusal else []
        return losses + [file.note for file in self._files.values() if file.note]

    def close(self) -> None:
        """Stop the thread, read the last events, complete the files; idempotent; before the rings close."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise ManyhandsError(
                f"the event collector was still writing to {self._directory} after {_STOP_TIMEOUT_S:.0f} s; "
                "check that its disk responds"
            )
        self._thread = None
        try:
            self.flush()
        finally:
            self._close_files()

    def __enter__(self) -> Collector:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open_files(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, ring in self._rings.items():
                self._files[name] = EventFileWriter.create(
                    directory,
                    name=name,
                    role=ring.role,
                    max_bytes=self._max_file_bytes,
                    wall_offset_ns=self._wall_offset_ns,
                )
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _FULL:  # the files that are there go on
                self._refusal = f"{directory} took no more files ({error.strerror}): some events are not kept"
                return
            self._close_files()
            raise

    def _close_files(self) -> None:
        for name, file in self._files.items():
            file.close(self._rings[name].dropped)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.flush()
