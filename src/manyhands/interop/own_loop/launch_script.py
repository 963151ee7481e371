"""`manyhands launch`: the user's script in several processes of this host, each a worker that `mh.join()` finds.

The launcher makes what workers need before they know each other: a store where they meet, in a memory file that they
inherit, and a ring of events for each. Everything else they open among themselves when they join. Compiled kernels are
imported here (`connect` does), so that the workers find them in the cache. A launched worker runs the script as
`python script.py` would run it, in a process of the local cluster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.rundir import RunDirectory
from manyhands.engine.device import check_device, sharing_sentence
from manyhands.errors import ManyhandsError, UserError, check_count
from manyhands.interop.own_loop.connect import choose, in_own_loop, own_loop_config
from manyhands.interop.own_loop.placed_script import ScriptRun, run_as_main, script_digest
from manyhands.native.version import __version__
from manyhands.observe.analyse.collect import Collector
from manyhands.observe.record.event_ring import BlackBoxes, EventRing
from manyhands.places.external import process_place
from manyhands.places.local.control import RoleContext
from manyhands.places.local.host import check_capacity, check_watchdog_s, of_processes
from manyhands.places.local.supervisor import LocalCluster, Role
from manyhands.places.local.watchdog import Watched
from manyhands.places.place import LAUNCHER_VARIABLE, find_place
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy


def run_script(
    context: RoleContext,
    script: Path,
    arguments: Sequence[str],
    strategy: Strategy | None,
    device: str | None,
    role: tuple[str, int] | None = None,
    world: int = 0,
    replays: Callable[..., Any] | None = None,
) -> Mapping[str, Any]:
    launched = process_place.Launched(
        context=context, strategy=strategy, device=device, role=role, world=world, replays=replays
    )
    process_place.launched = launched
    try:
        run_as_main(script, arguments)
    finally:
        process_place.launched = None
    if role is not None and not launched.counts:
        raise UserError(
            f"the script ended without a trained group, which strategy={strategy} waits for; call "
            "mh.join and prepare in it, and leave the group at its end"
        )
    return {"joins": launched.joins, **launched.counts}


def launch(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    workers: int,
    strategy: str | Strategy | None = None,
    device: str | None = None,
    watchdog_s: float = 60.0,
    out: str | Path | None = None,
    allow_overload: bool = False,
    cluster: str | None = None,
) -> dict[str, Any]:
    """Run `script` with `arguments` on `workers` processes, and return where their time went.

    Raises UserError for what makes no sense, in the script's use of manyhands too, and WorkerFailed naming the first
    worker that failed. When nobody makes progress for `watchdog_s` (0: for ever), Hang says who holds the others up.
    With `out`, the run is kept there, for `timeline`, `explain` and `watch`. Workers that do not fit on this
    host are refused (Overload) unless `allow_overload`. With `cluster`, Ray starts the processes, and this one is the
    first of them. When it returns or raises, no worker is left.
    """
    path = Path(script)
    if not path.is_file():
        raise UserError(f"script {path} does not exist")
    check_count("workers", workers)
    requested = in_own_loop(Strategy.parse(strategy)) if strategy is not None else None
    chosen = choose(requested, [range(workers)])  # refuses a strategy that cannot be
    check_device(device or "cpu")
    check_watchdog_s(watchdog_s)
    asked: Any = {"requested": requested, "requested_device": device}
    run = ScriptRun(path, tuple(arguments), workers=workers, strategy=chosen, **asked)
    if cluster is not None:
        if out is not None:
            raise UserError(f"out={out} with cluster={cluster}: call mh.join(out=...) in the script instead")
        return _run_at_place(cluster, run)
    check_capacity(of_processes(), sum(chosen.processes(workers).values()), allow_overload=allow_overload)
    return _run_here(run, watchdog_s, out)


def _run_here(script: ScriptRun, watchdog_s: float, out: str | Path | None) -> dict[str, Any]:
    path, chosen, workers = script.script, script.strategy, script.workers
    asked: Any = {"strategy": script.requested, "device": script.requested_device}
    job = partial(run_script, script=path, arguments=script.arguments, **asked)
    with ExitStack() as stack:
        directory = None
        if out is not None:
            config = own_loop_config(path.name, str(chosen), workers)
            config |= {"arguments": list(script.arguments), "sha256": script_digest(path)}
            directory = stack.enter_context(RunDirectory.create(out, config))
        began = time.monotonic()
        try:
            loop = STRATEGIES[chosen.word].load_loop()
            run = (loop.launch if loop is not None else None) or _run
            joined, observed = run(chosen, workers, job, watchdog_s=watchdog_s, directory=directory)
        except ManyhandsError as error:
            if directory is not None:
                directory.record_end(error, time.monotonic() - began)
            raise
        sharing = sharing_sentence(script.device, workers)
        summary = {
            "task": path.name,
            "strategy": str(chosen),
            "workers": workers,
            "joined": joined,
            "seconds": time.monotonic() - began,
            "notes": [sharing] if sharing is not None else [],
            "steps": max(row["steps"] for row in observed["per_worker"]),
            **observed,
        }
        if directory is not None:
            try:
                directory.write_summary(summary)
            except WriteFailed as error:  # the script has done its work
                summary["notes"] = [*summary["notes"], str(error)]
        return summary


def _run_at_place(cluster: str, script: ScriptRun) -> dict[str, Any]:
    began = time.monotonic()
    find_place(cluster, {}).run(replace(script, script=script.script.resolve()))
    facts: dict[str, Any] = {"task": script.script.name, "strategy": str(script.strategy)}
    facts |= {"workers": script.workers, "joined": True, "seconds": time.monotonic() - began}
    return {**facts, "notes": [], "per_worker": []}


def _run(
    _: Strategy,
    workers: int,
    job: Callable[[RoleContext], Mapping[str, Any]],
    *,
    watchdog_s: float,
    directory: RunDirectory | None,
) -> tuple[bool, dict[str, Any]]:
    with ExitStack() as stack:
        store = os.memfd_create("manyhands:store", os.MFD_CLOEXEC)
        stack.callback(os.close, store)
        rings = [stack.enter_context(EventRing.create(role=rank)) for rank in range(workers)]
        files = [{"store": store, "events": ring.descriptor} for ring in rings]
        env = {LAUNCHER_VARIABLE: __version__}
        roles = [
            Role(name=f"worker {rank}", target=job, descriptors=own, env=env)
            for rank, own in enumerate(files)
        ]
        events = directory.events_path if directory is not None else None
        named = {f"worker-{ring.role}": ring for ring in rings}
        collector = stack.enter_context(Collector(named, directory=events))
        boxes = BlackBoxes(dict(enumerate(rings)))
        watched = Watched(deadline_s=watchdog_s, count_events=boxes.counts, last_events=boxes.last)
        finished = stack.enter_context(LocalCluster(roles, watched=watched)).run()
        collector.flush()
        return all(one.payload["joins"] for one in finished), collector.summary()
