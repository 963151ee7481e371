"""Who leads `ps` in a loop of the user's own: `manyhands launch`, or the first rank under torchrun.

The launcher runs the script in as many processes as there are workers and servers, and leads them as in `fit`. Under
torchrun the first ranks serve and the others work. Rank 0 has called `prepare`, too: from there on it leads the run,
with a child that serves, and ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from manyhands.data.store.rundir import RunDirectory
from manyhands.engine.options import Options
from manyhands.observe.analyse.collect import Collector
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.external.control_connection import ControlConnection
from manyhands.places.external.control_messages import Term
from manyhands.places.external.control_server import terms_of
from manyhands.places.external.process_group import join_group, lead_group
from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.local.failure import Failure
from manyhands.places.local.watchdog import Watched
from manyhands.strategies.ps.live import reports
from manyhands.strategies.ps.live.live_training import RemoteMembers, ServerTraining, server_summary
from manyhands.strategies.ps.live.loop_job import LoopJob, end_record, loop_job
from manyhands.strategies.ps.live.ps_job import MemberContext, MemberResources
from manyhands.strategies.ps.live.ps_launcher import Launcher
from manyhands.strategies.ps.live.ps_members import LocalMembers, RunFiles, ps_ranks
from manyhands.strategies.ps.live.remote import receive_part
from manyhands.strategies.ps.strategy import Ps

_log = logging.getLogger("manyhands")
Script = Callable[..., Mapping[str, Any]]  # runs the script in a child, as this role


class ScriptMembers(LocalMembers):
    """Servers and workers that run the user's script."""

    def __init__(self, job: LoopJob, files: RunFiles, store: int, script: Script, watched: Watched) -> None:
        super().__init__(job, files, watched)
        self._store, self._world = store, job.workers + job.strategy.num_server_processes
        self._script = script

    def start_server(self, member: int, place: int) -> str:
        files = {"events": self._files.server_rings[place].descriptor}
        return self._run(member, f"server {place}", ("ps", self._job.workers + place), files)

    def start_worker(self, member: int, slot: int) -> str:
        files = {"events": self._files.rings[slot].descriptor, "buffers": self._files.buffers}
        return self._run(member, f"worker {slot}", ("worker", slot), files)

    def _run(self, member: int, name: str, role: tuple[str, int], files: Mapping[str, int]) -> str:
        target = partial(self._script, role=role, world=self._world)
        return self._start(member, name, target, {"store": self._store, **files})


class ScriptLauncher(Launcher):
    """Leads the run; when every worker has left its loop, the scripts may take their time to end."""

    def _end_members(self, deadline: float) -> None:
        del deadline  # what a script does after its loop may take long
        while self._members.members:
            self._poll()

    def _failed_late(self, member: int, failure: Failure) -> None:
        if member in self._slots and not failure.is_consequence:
            raise failure.error()
        super()._failed_late(member, failure)


def launch_scripts(
    strategy: Ps,
    workers: int,
    script: Script,
    *,
    watchdog_s: float,
    directory: RunDirectory | None,
    timeout_s: float = 300.0,
) -> tuple[bool, dict[str, Any]]:
    """Run the script to its end in every process; returns whether all joined, and where their time went."""
    strategy.check(workers, "cpu")
    path = directory.path if directory is not None else None
    job = loop_job(strategy, workers, timeout_s, run_path=path, threads=1)

    def hear(event: dict[str, Any]) -> None:
        if directory is not None:
            directory.append_member(event)
        if "sentence" in event:
            _log.warning("manyhands: %s", event["sentence"])

    with ExitStack() as stack:
        memory = [
            os.memfd_create(f"manyhands:{name}", os.MFD_CLOEXEC) for name in ("store", "buffers", "final")
        ]
        for descriptor in memory:
            stack.callback(os.close, descriptor)
        roles = range(workers + strategy.num_server_processes)
        rings = [stack.enter_context(EventRing.create(role=role)) for role in roles]
        files = RunFiles(memory[2], memory[1], dict(enumerate(rings[:workers])), rings[workers:])
        named = {f"worker-{slot}": ring for slot, ring in files.rings.items()}
        named |= {f"server-{place}": ring for place, ring in enumerate(files.server_rings)}
        events = directory.events_path if directory is not None else None
        collector = stack.enter_context(Collector(named, workers=workers, directory=events))
        launcher = ScriptLauncher(
            job,
            files,
            partial(ScriptMembers, job, files, memory[0], script),
            losses=reports.LossBook(),
            on_rows=lambda _: None,
            on_event=hear,
            watchdog_s=watchdog_s,
        )
        outcome = launcher.run()
        collector.flush()
        if path is not None:
            end_record(path)
        return True, {**collector.summary(), **server_summary(outcome)}


def _terms(job: LoopJob) -> tuple[Term, ...]:
    return terms_of({"strategy": job.strategy, "workers": job.workers})


def lead_scripts(place: ProcessPlace, name: str, job: LoopJob) -> None:
    """Lead the run to its end."""
    asked: dict[str, Any] = {"security": Options().security(), "comes_again": True}
    with lead_group(place, _terms(job), f"{name}/lead", timeout_s=job.timeout_s, **asked) as group:
        group.gather(lambda sentence: _log.warning("%s", sentence))
        remote = RemoteMembers(
            control_server=group.control_server,
            ranks=ps_ranks(job.strategy, place),
            say=lambda sentence: _log.warning("manyhands: %s", sentence),
        )
        listens_at = f"tcp:{group.address}:0" if group.address else ""
        job = replace(job, copies=True, security=group.security, listens_at=listens_at)
        with ServerTraining(job, most_workers=job.workers, remote=remote) as training:
            training.run(
                on_rows=lambda _: None,
                on_event=lambda event: (
                    _log.warning("manyhands: %s", event["sentence"]) if "sentence" in event else None
                ),
            )
        group.shutdown()


def join_scripts(
    place: ProcessPlace, name: str, job: LoopJob, stack: ExitStack
) -> tuple[MemberContext, MemberResources, ControlConnection]:
    """Join the run as the member that the leader says; `stack` closes the connection."""
    asked: dict[str, Any] = {"security": Options().security(), "comes_again": True}
    member = stack.enter_context(
        join_group(place, _terms(job), f"{name}/lead", timeout_s=job.timeout_s, **asked)
    )
    listens_at = f"tcp:{member.address}:0" if member.address else ""
    job = replace(job, security=member.security, listens_at=listens_at)
    context, resources, _, _ = receive_part(member.connection, job)
    return context, resources, member.connection
