"""The only reader of a run's event rings: a background thread that stores and totals what roles record.

Roles record and continue; this thread drains their rings a few times a second. It never blocks a role.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manyhands.errors import ManyhandsError, UserError
from manyhands.observe.analyse.totals import Totals, TotalsSnapshot
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.keeper import DEFAULT_MAX_BYTES, EventKeeper

__all__ = ["Collector"]

_STOP_TIMEOUT_S = 10.0


class Collector:
    """Reads the rings of a run in the background, from `start` (or entering) to `close` (or leaving).

    `rings` are those of roles 0, 1, … under the names their files get, or with `workers` of any roles, of
    which those below that number are workers and count in the totals. The caller owns them, and closes them
    after the collector. With a `directory` the events are kept on disk, up to `max_bytes` in all and the same
    for each role; `wall_offset_ns` as in `EventFileWriter.create`. `clock` is the one that the events are timed by.
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
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        roles = [ring.role for ring in rings.values()]
        is_whole = sorted(roles) == list(range(len(roles)))
        if not roles or len(set(roles)) < len(roles) or (workers is None and not is_whole):
            raise UserError(f"rings={roles} is not allowed; it holds one ring for each role 0, 1, ...")
        self._keeper = EventKeeper(rings, directory, max_bytes=max_bytes, wall_offset_ns=wall_offset_ns)
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
        """Open the event files and start the reader thread."""
        self._keeper.open()
        self._thread = threading.Thread(target=self._run, name="manyhands-events", daemon=True)
        self._thread.start()
        return self

    def flush(self) -> None:
        """Drain all rings now, in the calling thread."""
        with self._reading:
            for role, records in self._keeper.take():
                if role < self._workers:
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
            slow, late = self._totals.slow_ever(), self._totals.late_ever()
        return {
            "per_worker": [worker.to_dict() for worker in workers],
            "slow": [straggler.to_dict() for straggler in slow],
            "late": late.to_dict() if late is not None else None,
            "events": self._keeper.counts(),
        }

    def notes(self) -> list[str]:
        """Return one sentence for each loss of events; empty when there was none."""
        return self._keeper.notes()

    def close(self) -> None:
        """Stop the thread, drain the rings and complete the files. Idempotent; call before the rings close."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise ManyhandsError(
                f"the event collector was still writing to {self._keeper.directory} after {_STOP_TIMEOUT_S:.0f} s; "
                "check that its disk responds"
            )
        self._thread = None
        try:
            self.flush()
        finally:
            self._keeper.close()

    def __enter__(self) -> Collector:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.flush()
