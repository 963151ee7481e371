"""`manyhands replay RUN --script SCRIPT`: a recorded loop of the user's own under `ps`, executed again."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import UserError
from manyhands.interop.own_loop.launch_script import run_script
from manyhands.interop.own_loop.placed_script import script_digest
from manyhands.native.version import __version__
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.local.supervisor import LocalCluster, Role
from manyhands.places.place import LAUNCHER_VARIABLE
from manyhands.strategies.ps.live.loop_job import read_orders
from manyhands.strategies.ps.replay import is_same
from manyhands.strategies.ps.replayed_loop import ReplayedLoop, recorded_order
from manyhands.strategies.ps.update_files import read_record
from manyhands.strategy import Strategy


class ReplayedScript(NamedTuple):
    """What came out: `difference` names the first gradient that differs, and is empty where none does."""

    updates: int
    steps: int
    difference: str
    same_bytes: bool | None  # None where there are no final weights to compare with


def replay_script(run: Path, script: Path) -> ReplayedScript:
    """Start the script as the recorded run did, in the recorded order; the script's other effects happen again."""
    directory = RunDirectory.open(run, lock=False)
    config, record = directory.config, read_record(run)
    if not script.is_file():
        raise UserError(f"script {script} does not exist")
    if script_digest(script) != config.get("sha256"):
        raise UserError(f"{run} is not a run of {script}, or the script was changed since")
    arguments = config.get("arguments")
    if not isinstance(arguments, list) or not all(isinstance(one, str) for one in arguments):
        raise UserError(f"{run / 'config.json'}: arguments={arguments!r} must be a list of texts")
    strategy: Any = Strategy.parse(record.strategy)
    read_orders(run)
    recorded_order(run, strategy.servers)
    job = partial(run_script, script=script, arguments=arguments, strategy=strategy, device=None)
    replays = partial(ReplayedLoop.open, run_path=run.resolve())
    with ExitStack() as stack:
        files: dict[str, int] = {}
        for name in ("store", *(f"area-{slot}" for slot in range(record.workers))):
            files[name] = os.memfd_create(f"manyhands:{name}", os.MFD_CLOEXEC)
            stack.callback(os.close, files[name])
        names = [("worker", slot) for slot in range(record.workers)] + [("ps", record.workers)]
        roles = []
        for kind, rank in names:
            ring = stack.enter_context(EventRing.create(role=rank))
            target = partial(job, role=(kind, rank), world=record.workers + 1, replays=replays)
            name = f"worker {rank}" if kind == "worker" else "the replay"
            own = {**files, "events": ring.descriptor}
            roles.append(
                Role(name=name, target=target, descriptors=own, env={LAUNCHER_VARIABLE: __version__})
            )
        found = stack.enter_context(LocalCluster(roles)).run()[-1].payload
    same = is_same(directory.read_summary() or {}, found["digests"]) if not found["difference"] else None
    return ReplayedScript(found["updates"], found["steps"], found["difference"], same)
