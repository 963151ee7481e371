"""The only reader of a run's event rings: a background thread that stores and totals what roles record.

Roles record and continue; this thread drains their rings a few times a second. It never blocks a role. A full ring, a
full file or a full disk does not stop a run: losses are counted and reported in the notes.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manyhands.errors import ManyhandsError, UserError, check_count
from manyhands.observe.analyse.totals import Totals, TotalsSnapshot
from manyhands.observe.record.event_files import EventFileWriter
from manyhands.observe.record.event_ring import EventRing

_MAX_BYTES = 256 << 20  # of the event files of one run together: four million events
_STOP_TIMEOUT_S = 10.0


class Collector:
    """Reads the rings of a run in the background, from `start` (or entering) to `close` (or leaving).

    `rings` are those of roles 0, 1, … by file name, or with `workers` of any roles: those below it are workers. The
    caller owns them and closes them last. With a `directory` their events are kept there, up to `max_bytes` in all.
    `clock` is the one that times the events.
    """

    def __init__(
        self,
        rings: Mapping[str, EventRing],
        *,
        workers: int | None = None,
        directory: Path | None = None,
        max_bytes: int = _MAX_BYTES,
        wall_offset_ns: int | None = None,
        interval_s: float = 0.05,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        roles = [ring.role for ring in rings.values()]
        is_whole = sorted(roles) == list(range(len(roles)))
        if not roles or len(set(roles)) < len(roles) or (workers is None and not is_whole):
            raise UserError(f"rings={roles} is not allowed; give one ring for each role 0, 1, ...")
        check_count("max_bytes", max_bytes, 0)
        self._rings, self._directory = dict(rings), directory
        self._max_file_bytes = max_bytes // len(rings)
        self._wall_offset_ns = wall_offset_ns
        self._files: dict[str, EventFileWriter] = {}
        self._refusal = ""
        self._interval_s = interval_s
        self._clock = clock
        self._workers = len(roles) if workers is None else workers
        self._totals = Totals(self._workers)
        # Two locks, so that a view which asks for a snapshot never waits for a disk.
        self._reading = threading.Lock()  # the rings and the files
        self._adding = threading.Lock()  # the totals
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Collector:
        directory = self._directory
        try:
            for name, ring in self._rings.items() if directory is not None else ():
                assert directory is not None
                directory.mkdir(parents=True, exist_ok=True)
                self._files[name] = EventFileWriter.create(
                    directory,
                    name=name,
                    role=ring.role,
                    max_bytes=self._max_file_bytes,
                    wall_offset_ns=self._wall_offset_ns,
                )
        except BaseException as error:
            if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._close_files()
                raise
            # The files opened so far are kept.
            self._refusal = f"{directory} accepts no more files ({error.strerror}): some events are not kept"
        self._thread = threading.Thread(target=self._run, name="manyhands-events", daemon=True)
        self._thread.start()
        return self

    def flush(self) -> None:
        """Drain all rings now, in the calling thread."""
        with self._reading:
            for name, ring in self._rings.items():
                records = ring.drain()
                if len(records) and name in self._files:
                    self._files[name].append(records)
                if len(records) and ring.role < self._workers:
                    with self._adding:
                        self._totals.update(records)

    def snapshot(self) -> TotalsSnapshot:
        """Return the totals of what was read so far; callable from any thread."""
        with self._adding:
            return self._totals.snapshot(self._clock())

    def summary(self) -> dict[str, Any]:
        """Return totals `per_worker`, `slow` and `late` workers and `events` counts; call before the rings close."""
        workers = self.snapshot().workers
        with self._adding:
            slow, late = self._totals.slowness.ever(), self._totals.slowness.late_ever()
        rings = self._rings.values()
        return {
            "per_worker": [worker.to_dict() for worker in workers],
            "slow": [asdict(straggler) for straggler in slow],
            "late": asdict(late) if late is not None else None,
            "events": {
                "recorded": sum(ring.written for ring in rings),
                "dropped": sum(ring.dropped for ring in rings),
                "unwritten": sum(file.unwritten for file in self._files.values()),
                "notes": self.notes(),
            },
        }

    def notes(self) -> list[str]:
        losses = [
            f"{name} recorded faster than it was read: {ring.dropped} events are missing from all figures"
            for name, ring in self._rings.items()
            if ring.dropped
        ]
        return [*losses, *filter(None, (self._refusal, *(file.note for file in self._files.values())))]

    def close(self) -> None:
        """Stop the thread, drain the rings and complete the files. Idempotent; call before the rings close."""
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

    def _close_files(self) -> None:
        for name, file in self._files.items():
            file.close(self._rings[name].dropped)

    def __enter__(self) -> Collector:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.flush()
