"""One run by processes that were started externally: what the leader does, and what every other process does.

rank 0     lead_company ── gather ── run_session ── gives out the run ──►
rank r     join_company ── Training.take_part ─────────────────────────►  the same Run, but for its directory
"""

from __future__ import annotations

import itertools
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import nn

from manyhands.data.randomness import preserved, seed_all
from manyhands.data.store.portable import pack_tree, unpack_tree
from manyhands.engine.request import Request
from manyhands.engine.run import History, Run
from manyhands.engine.session import run_session
from manyhands.engine.training import Training, training_class
from manyhands.errors import Aborted, PeerTimeout, UserError, WorkerFailed
from manyhands.places.external.control_messages import Term
from manyhands.places.external.process_group import GroupMember, ProcessGroup, join_group, lead_group
from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.external.register import terms_of
from manyhands.places.external.specified import check_hosts
from manyhands.strategy import Strategy

__all__ = ["on_processes", "run_externally", "spoken_by"]

_log = logging.getLogger("manyhands")
_fits = itertools.count()
"""Every process of a run calls `fit` as often as the others, in the same order: so each call has a name."""

_RUN: Final = "run"
_COME_AGAIN_S: Final = 30.0


def on_processes(strategy: Strategy, place: ProcessPlace, workers: int | None) -> tuple[Strategy, int]:
    """What the strategy is on the processes that there are, and how many work; UserError where more were asked for."""
    spec = place.cluster
    roles = {kind: len(listed) for kind, listed in spec.addresses.items()} if spec is not None else {}
    placed, count = strategy.placed(place.world, roles)
    if workers is not None and workers != count:
        who = "the cluster lists" if spec is not None else f"{place.kind} started"
        each = "each of which is a worker" if count == place.world else f"{count} of which are workers"
        raise UserError(f"workers={workers}: {who} {place.world} processes, {each}; leave it out")
    return placed, count


@contextmanager
def spoken_by(place: ProcessPlace) -> Iterator[None]:
    """Context in which only the leader issues warnings."""
    with warnings.catch_warnings():
        if not place.leads:
            warnings.simplefilter("ignore")
        yield


def run_externally(
    request: Request, place: ProcessPlace, out: str | Path | None, resume: bool, name: str | None = None
) -> Run:
    """Take this process's part in a run; returns the same on each process but for the directory.

    `name` is the run's, the same on each; None derives it from how often this process has called `fit`.
    """
    if place.world == 1:
        return run_session(request, out, resume)
    kind = training_class(request.strategy, compiled=request.plan.task.compiled)
    if not kind.can_take_part:
        raise UserError(
            f"strategy={request.strategy} starts processes of its own, and {place.kind} has started "
            f"{place.world} that would be workers; use allreduce here, or start it without {place.kind}"
        )
    if place.kind == "torchrun":
        role, index = request.strategy.role_of(place.rank, request.workers)
        place = replace(place, role=role, index=index)
    if place.cluster is not None:
        check_hosts(place.cluster, place.cluster.ranked[place.rank])
    with preserved():
        seed_all(request.plan.seed)
        model = request.plan.task.model()
    terms, security, timeout_s = _terms(request, model), request.options.security(), request.options.timeout_s
    name = name or f"fit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_fits)}"
    asked: dict[str, Any] = {"security": security, "comes_again": kind.comes_again}
    if place.leads:
        with lead_group(place, terms, name, timeout_s=timeout_s, **asked) as process_group:
            return _lead(process_group, request, out, resume)
    patience_s = timeout_s
    with preserved(), spoken_by(place):
        while True:
            with join_group(place, terms, name, timeout_s=patience_s, **asked) as member:
                member.timeout_s = timeout_s
                try:
                    return _follow(member, kind(request, model), model)
                except Aborted as error:
                    if not (kind.comes_again and member.line.over is not None and member.line.over.is_lost):
                        raise
                    _log.warning("%s; %s tries to come again", error, place.name)
            patience_s = min(timeout_s, _COME_AGAIN_S)


def _lead(process_group: ProcessGroup, request: Request, out: str | Path | None, resume: bool) -> Run:
    process_group.gather(lambda sentence: _log.warning("%s", sentence))
    run = run_session(request, out, resume, process_group)
    tree = {"model": run.model.state_dict(), "summary": run.summary, "rows": list(run.history)}
    process_group.give(_RUN, partial(pack_tree, tree))
    process_group.shutdown()
    return run


def _follow(member: GroupMember, training: Training, model: nn.Module) -> Run:
    training.take_part(member)
    if member.place.leaves:
        return Run(model=model, history=History([]), summary={})
    line = member.line
    try:
        tree = unpack_tree(line.take(_RUN, member.timeout_s))
    except (Aborted, PeerTimeout) as error:
        if line.over is None:
            raise
        raise WorkerFailed(line.over.sentence, worker_rank=line.over.rank) from error
    model.load_state_dict(tree["model"])
    return Run(model=model, history=History(tree["rows"]), summary=tree["summary"])


def _terms(request: Request, model: nn.Module) -> tuple[Term, ...]:
    """What must be the same on every process, the most informative difference first."""
    config: dict[str, Any] = request.config(model)
    versions, plan = config.pop("versions"), request.plan
    first = {name: config.pop(name) for name in ("task", "strategy", "steps", "seed")}
    return terms_of(
        {
            **first,
            "manyhands": versions["manyhands"],
            "torch": versions["torch"],
            **config,
            "stopping": plan.stopping,
            "autocast": plan.autocast,
            "compile": plan.compile,
            "buffers": plan.buffers,
            "check_every": plan.check_every,
            "slow": plan.slow,
        }
    )
