"""The run of `fit` as a place sees it: what a process does that starts the workers, that leads, or that is led.

here         run_session, which starts workers on this host
rank 0       lead_group ── gather ── run_session ── gives out the run ──►
rank r       join_group ── Training.take_part ─────────────────────────►  the same Run, but for its directory
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from torch import nn

from manyhands.data.randomness import preserved, seed_all
from manyhands.data.store.state_tree import pack_tree, unpack_tree
from manyhands.engine.request import Request
from manyhands.engine.run import History, Run
from manyhands.engine.session import run_session
from manyhands.engine.training import Result, SegmentDrive, Segments, Stage, Training, training_class
from manyhands.errors import Aborted, PeerTimeout, UserError, WorkerFailed
from manyhands.places.external.control_messages import Term
from manyhands.places.external.control_server import terms_of
from manyhands.places.external.process_group import GroupMember, ProcessGroup, join_group, lead_group
from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.place import Command
from manyhands.strategy import Strategy

_log = logging.getLogger("manyhands")
# Every process of a run calls `fit` as often as the others, in the same order: so each call has a name.
_fits = itertools.count()

_RUN: Final = "run"
_ORDER: Final = "order"
_COME_AGAIN_S: Final = 30.0


@contextmanager
def spoken_by(leads: bool) -> Iterator[None]:
    if leads:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True, kw_only=True)
class RequestedRun:
    """What was asked of `fit`, to be run at a place; see `places.place.PlacedRun`."""

    request: Request
    out: str | Path | None
    resume: bool

    @property
    def strategy(self) -> Strategy:
        return self.request.strategy

    @property
    def workers(self) -> int:
        return self.request.workers

    @property
    def device(self) -> str:
        return self.request.plan.device

    @property
    def min_workers(self) -> int | None:
        return self.request.options.min_workers

    @property
    def max_workers(self) -> int | None:
        return self.request.options.max_workers

    @property
    def commands(self) -> queue.SimpleQueue[Command] | None:
        return self.request.options.commands

    @property
    def calls_back(self) -> bool:
        options = self.request.options
        return bool(options.callbacks or options.on_rows or options.view or options.commands)

    def for_others(self) -> RequestedRun:
        alone: dict[str, Any] = {"on_rows": None, "view": None, "commands": None, "resume_command": ""}
        options = replace(self.request.options, callbacks=(), progress="none", **alone)
        return RequestedRun(request=replace(self.request, options=options), out=None, resume=False)

    def following(self, commands: queue.SimpleQueue[Command]) -> RequestedRun:
        options = replace(self.request.options, commands=commands)
        return replace(self, request=replace(self.request, options=options))

    def pack(self, result: Run) -> bytes:
        return b"".join(bytes(chunk) for chunk in pack_tree(_tree(result)))

    def unpack(self, data: bytes) -> Run:
        """The run that another process has led, which keeps its directory."""
        run = _run_of(self.request.plan.task.model(), bytearray(data))
        if self.out is not None:
            kept = f"the run is kept in {self.out} on the node of the cluster that led it"
            run.summary["notes"].append(kept)
        return run

    def here(self) -> Run:
        return run_session(self.request, self.out, self.resume)

    def _lead_segments(self, lead: Callable[[int], ProcessGroup]) -> Run:
        """Each segment in a group of its own, whose members first hear which one it is; at last the result."""
        numbers = itertools.count()

        def give_order(group: ProcessGroup, order: Mapping[str, Any]) -> ProcessGroup:
            group.gather(lambda sentence: _log.warning("%s", sentence))
            group.give(_ORDER, lambda: [json.dumps(order).encode()])
            return group

        drive = SegmentDrive(
            run=lambda training, stage, order: run_one(training, stage, order), is_here=False
        )

        def run_one(training: Training, stage: Stage, order: Mapping[str, Any]) -> Result:
            with lead(next(numbers)) as group:
                give_order(group, order)
                drive.hosts = group.num_hosts
                result = training.lead(stage, group)
                group.shutdown()
                return result

        run = run_session(
            self.request,
            self.out,
            self.resume,
            lambda training, stage: cast(Segments, training).run_segments(stage, drive),
            starts=False,
        )
        with lead(next(numbers)) as group:
            give_order(group, {}).give(_RUN, partial(pack_tree, _tree(run)))
            group.shutdown()
        return run

    def take_part(self, process: ProcessPlace, name: str | None = None) -> Run:
        """Be one process of the run `name` (by default, of how often `fit` was called); all return the same."""
        request = self.request
        if process.world == 1:
            return self.here()
        kind = training_class(request.strategy, compiled=request.plan.task.compiled)
        if not kind.can_take_part:
            raise UserError(
                f"strategy={request.strategy} starts its own processes, but {process.kind} has already started "
                f"{process.world} workers; use allreduce here, or start it without {process.kind}"
            )
        if process.index is None:  # the launcher counts processes, and gives them no roles
            role, index = request.strategy.role_of(process.rank, request.workers)
            process = replace(process, role=role, index=index)
        with preserved():
            seed_all(request.plan.seed)
            model = request.plan.task.model()
        name = name or f"fit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_fits)}"
        terms, timeout_s = _terms(request, model), request.options.timeout_s
        asked: dict[str, Any] = {"security": request.options.security(), "comes_again": kind.comes_again}
        if kind.in_segments:

            def lead(number: int) -> ProcessGroup:
                return lead_group(process, terms, f"{name}/{number}", timeout_s=timeout_s, **asked)

            def join(number: int) -> GroupMember:
                return join_group(process, terms, f"{name}/{number}", timeout_s=timeout_s, **asked)

            if process.leads:
                return self._lead_segments(lead)
            with preserved(), spoken_by(leads=False):
                return _follow_segments(join, cast(Segments, kind(request, model)), model)
        if process.leads:
            with lead_group(process, terms, name, timeout_s=timeout_s, **asked) as group:
                group.gather(lambda sentence: _log.warning("%s", sentence))
                run = run_session(
                    request, self.out, self.resume, lambda made, stage: made.lead(stage, group), starts=False
                )
                group.give(_RUN, partial(pack_tree, _tree(run)))
                group.shutdown()
                return run
        patience_s = timeout_s
        with preserved(), spoken_by(leads=False):
            while True:
                with join_group(process, terms, name, timeout_s=patience_s, **asked) as member:
                    member.timeout_s = timeout_s
                    try:
                        return _follow(member, kind(request, model), model)
                    except Aborted as error:
                        if not (
                            kind.comes_again
                            and member.connection.over is not None
                            and member.connection.over.is_lost
                        ):
                            raise
                        _log.warning("%s; %s tries to rejoin", error, process.name)
                patience_s = min(timeout_s, _COME_AGAIN_S)


def _follow_segments(join: Callable[[int], GroupMember], training: Segments, model: nn.Module) -> Run:
    """Take part in each segment of a run in a group of its own; the last group has no segment, but the result."""
    for number in itertools.count():
        with join(number) as member:
            order = json.loads(bytes(member.connection.take(_ORDER, member.timeout_s)))
            if not order:
                return _follow_to_result(member, model)
            training.ordered(order).take_part(member)
    raise AssertionError("unreachable")


def _follow(member: GroupMember, training: Training, model: nn.Module) -> Run:
    training.take_part(member)
    if member.place.leaves:
        return Run(model=model, history=History([]), summary={})
    return _follow_to_result(member, model)


def _follow_to_result(member: GroupMember, model: nn.Module) -> Run:
    line = member.connection
    try:
        return _run_of(model, line.take(_RUN, member.timeout_s))
    except (Aborted, PeerTimeout) as error:
        if line.over is None:
            raise
        raise WorkerFailed(line.over.sentence, worker_rank=line.over.rank) from error


def _tree(run: Run) -> dict[str, Any]:
    return {"model": run.model.state_dict(), "summary": run.summary, "rows": list(run.history)}


def _run_of(model: nn.Module, data: bytearray) -> Run:
    tree = unpack_tree(data)
    model.load_state_dict(tree["model"])
    return Run(model=model, history=History(tree["rows"]), summary=tree["summary"])


def _terms(request: Request, model: nn.Module) -> tuple[Term, ...]:
    """What must be the same on every process, the most informative difference first."""
    config: dict[str, Any] = request.config(model)
    versions = config.pop("versions")
    first = {name: config.pop(name) for name in ("task", "strategy", "steps", "seed")}
    first |= {name: versions[name] for name in ("manyhands", "torch")}
    of_plan = (
        "stopping",
        "restore_best",
        "log",
        "autocast",
        "half",
        "fp8",
        "compile",
        "buffers",
        "check_every",
        "slow",
    )
    return terms_of({**first, **config, **{name: getattr(request.plan, name) for name in of_plan}})
