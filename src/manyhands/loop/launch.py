"""`manyhands launch`: the user's script in several processes of this host, each a worker that `mh.join()` finds.

The launcher makes what workers need before they know each other: a store where they meet, in a memory file that they
inherit, and a ring of events for each. Everything else they open among themselves when they join. Compiled kernels are
imported here (`connect` does), so that the workers find them in the cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from manyhands.cluster.local import LocalCluster, Role
from manyhands.cluster.watchdog import Watched, check_watchdog_s
from manyhands.device import check_device, sharing_sentence
from manyhands.errors import Hang, UserError
from manyhands.loop.connect import (
    choose,
)  # which imports the compiled kernels: once here, and not in each worker
from manyhands.loop.place import LAUNCHER_VARIABLE
from manyhands.loop.recording import own_loop_config
from manyhands.loop.script import Script, run_script
from manyhands.observe.blackbox import BlackBoxes
from manyhands.observe.collect import Collector
from manyhands.observe.ring import EventRing
from manyhands.store.rundir import RunDirectory
from manyhands.strategy import Strategy
from manyhands.version import __version__

__all__ = ["launch"]


def launch(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    workers: int,
    strategy: str | Strategy | None = None,
    device: str | None = None,
    watchdog_s: float = 60.0,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Run `script` with `arguments` on `workers` processes, and return where their time went.

    Raises UserError for what makes no sense, in the script's use of manyhands too, and WorkerFailed naming the first
    worker that failed. When nobody makes progress for `watchdog_s` (0: for ever), Hang says who holds the others up.
    With `out`, the run is kept in that directory, for `timeline`, `explain` and `watch`. When it returns or raises, no
    process is left.
    """
    path = Path(script)
    if not path.is_file():
        raise UserError(f"there is no script {path}")
    if workers < 1:
        raise UserError(f"workers={workers} must be at least 1")
    asked = Strategy.parse(strategy) if strategy is not None else None
    chosen = choose(asked, [range(workers)])  # refuses a strategy that can not be
    if device is not None:
        check_device(device)
    sharing = sharing_sentence(device or "cpu", workers)
    check_watchdog_s(watchdog_s)
    job = Script(path=path, arguments=tuple(arguments), strategy=asked, device=device)
    with ExitStack() as stack:
        directory = None
        if out is not None:
            config = own_loop_config(path.name, str(chosen), workers)
            directory = stack.enter_context(RunDirectory.create(out, config))
        store = os.memfd_create("manyhands:store", os.MFD_CLOEXEC)
        stack.callback(os.close, store)
        rings = [stack.enter_context(EventRing.create(role=rank)) for rank in range(workers)]
        roles = [
            Role(
                name=f"worker {rank}",
                target=partial(run_script, script=job),
                descriptors={"store": store, "events": ring.descriptor},
                env={LAUNCHER_VARIABLE: __version__},
            )
            for rank, ring in enumerate(rings)
        ]
        collector = stack.enter_context(
            Collector(
                {f"worker-{ring.role}": ring for ring in rings},
                directory=directory.events_path if directory is not None else None,
            )
        )
        boxes = BlackBoxes(dict(enumerate(rings)))
        watched = Watched(deadline_s=watchdog_s, count_events=boxes.counts, last_events=boxes.last)
        began = time.monotonic()
        try:
            finished = stack.enter_context(LocalCluster(roles, watched=watched)).run()
        except Hang as error:
            if directory is not None:
                directory.write_hang(f"{error}\n\n{error.details}\n")
            raise
        collector.flush()
        summary = {
            "task": path.name,
            "strategy": str(chosen),
            "workers": workers,
            "joined": all(one.payload["joins"] for one in finished),
            "seconds": time.monotonic() - began,
            "notes": [sharing] if sharing is not None else [],
            **collector.summary(),
        }
        summary["steps"] = max(row["steps"] for row in summary["per_worker"])
        if directory is not None:
            collector.close()  # what is looked at after the summary is complete
            directory.write_summary(summary)
        return summary
