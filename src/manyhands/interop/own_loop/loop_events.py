"""Events of workers without a manyhands launcher: each keeps its own, in a directory that the user chooses.

Where the hosts share a file system that is one run directory; where they do not, each host has the files of its own
workers, which can be put together in one `events` folder afterwards. Every file says how far its clock is from the
time of day as worker 0 has it, so the files of all hosts fit together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from manyhands.data.store.rundir import RunDirectory
from manyhands.engine.reporting import WorkerNote
from manyhands.interop.own_loop.connect import GroupConnection
from manyhands.interop.own_loop.small_sums import Call, Words
from manyhands.observe.analyse.collect import Collector
from manyhands.observe.record.clocks import Bracket, Offset, offset_from
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import EventKind
from manyhands.places.local.status import State

__all__ = ["Recorded", "Unwatched", "keeping", "own_loop_config"]

_ROUNDS = 9  # of comparing clocks


def own_loop_config(script: str, strategy: str, workers: int) -> dict[str, Any]:
    """What config.json says of a run whose loop is the user's; what only the script knows is left at nothing."""
    return {
        "task": script,
        "strategy": strategy,
        "workers": workers,
        "steps": 0,
        "seed": 0,
        "batch_size": 0,
        "samples": 0,
        "parameters": {},
    }


class Unwatched:
    """The worker context of a worker without a manyhands launcher: it discards everything."""

    def record(self, *_: Any, **__: Any) -> bool:
        return False

    def mark(self, step: int, state: State, *, place: tuple[int, int] | None = None) -> None:
        """Discard the status."""

    def note(self, note: WorkerNote) -> None:
        """Discard the note."""

    def stop_requested(self) -> bool:
        return False


class Recorded(Unwatched):
    """The same context, with events recorded in a ring."""

    def __init__(self, ring: EventRing) -> None:
        self.record = ring.record  # type: ignore[method-assign]


@contextmanager
def keeping(ring: EventRing, connection: GroupConnection, out: Path) -> Iterator[None]:
    """Collective: while this is open, the events of this worker's `ring` go to `out`, which worker 0 makes."""
    words = connection.words
    config = own_loop_config(Path(sys.argv[0]).name, str(connection.strategy), words.world)
    made = RunDirectory.create(out, config) if words.rank == 0 else None
    try:
        offset, wall_offset_ns = align(words)  # and nobody writes before worker 0 has made the directory
        with Collector(
            {f"worker-{words.rank}": ring},
            workers=words.world,
            directory=out / "events",
            wall_offset_ns=wall_offset_ns + offset.ns,
        ):
            ring.record(EventKind.JOIN, time.monotonic_ns())
            yield
            ring.record(EventKind.LEAVE, time.monotonic_ns())
    finally:
        if made is not None:
            made.close()


def align(words: Words, now_ns: Callable[[], int] = time.monotonic_ns) -> tuple[Offset, int]:
    """Collective: this worker's distance to worker 0's clock, and worker 0's own distance to the time of day.

    All meet after looking at their clocks, then worker 0 looks at its own and tells all: so its reading lies between
    the two looks of everyone, however the workers are connected.
    """
    content = torch.zeros(2, dtype=torch.int64)
    brackets = []
    for _ in range(_ROUNDS):
        before_ns = now_ns()
        words.meet(Call.ALIGN)
        if words.rank == 0:
            content[0] = now_ns()
            content[1] = time.time_ns() - time.monotonic_ns()
        words.broadcast(content.view(torch.uint8))
        brackets.append(Bracket(before_ns=before_ns, theirs_ns=int(content[0]), after_ns=now_ns()))
    offset = offset_from(brackets) if words.rank else Offset(ns=0, error_ns=0)
    return offset, int(content[1])
