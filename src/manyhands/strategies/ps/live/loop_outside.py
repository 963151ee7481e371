"""`ps` in a loop of the user's own under torchrun: the first ranks serve, the others work, and rank 0 leads.

The leader's process has called `prepare`, too: from there on it leads the run, with a child that serves, and ends.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from manyhands.engine.options import Options
from manyhands.places.external.control_connection import ControlConnection
from manyhands.places.external.control_messages import Term
from manyhands.places.external.control_server import terms_of
from manyhands.places.external.process_group import join_group, lead_group
from manyhands.places.external.process_place import ProcessPlace
from manyhands.strategies.ps.live.live_training import RemoteMembers, ServerTraining
from manyhands.strategies.ps.live.loop_job import LoopJob
from manyhands.strategies.ps.live.ps_job import MemberContext, MemberResources
from manyhands.strategies.ps.live.ps_members import ps_ranks
from manyhands.strategies.ps.live.remote import receive_part

_log = logging.getLogger("manyhands")


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
