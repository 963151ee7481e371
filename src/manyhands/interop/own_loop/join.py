"""`mh.join()`: become one worker of a group, however the script was started."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from manyhands.engine.device import check_device, device_of
from manyhands.engine.reporting import ProcessContext, WorkerContext
from manyhands.errors import UserError
from manyhands.interop.own_loop.connect import Unwatched, connect, in_own_loop, keeping
from manyhands.interop.own_loop.small_sums import check_mode
from manyhands.interop.own_loop.worker_group import WorkerGroup
from manyhands.native.threads import choose_functions
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import EventKind
from manyhands.places.external.process_place import ProcessPlace, joining_place
from manyhands.strategy import Strategy

_open: dict[str, str] = {}  # the groups of this process by name, with where each was joined

_opening = threading.Lock()
_CHECK_EVERY = 100


def join(
    name: str = "main",
    *,
    strategy: str | Strategy | None = None,
    device: str | None = None,
    buffers: str = "broadcast",
    check_every: int | None = None,
    timeout_s: float = 300.0,
    out: str | Path | None = None,
) -> WorkerGroup:
    """Join the group of all workers that run this script, under `manyhands launch` or torchrun; or be its only one.

    Collective: all workers join groups of the same names in the same order. `strategy` is by default that of the
    launcher, else `mirrored` on one host and `allreduce algorithm=hierarchical` on several. `device` is likewise the
    launcher's, else `cpu`; `cuda` gives each worker of a host a GPU in turn. `buffers` says how batch-norm statistics
    and the like are kept alike: `broadcast` from worker 0, their `mean`, or `local`. Every `check_every` exchanges the
    parameters of all workers are compared where each holds its own; by default every 100 on one host and never (0) on
    several, whose processors may round differently. Waiting for another worker longer than `timeout_s` is an error that
    names it. With `out`, each worker keeps its events in that directory, on a clock that agrees with worker 0's;
    `manyhands launch` has an option for the same.
    """
    if not isinstance(name, str) or not name or not name.isprintable():
        raise UserError(f"name={name!r} must be a word")
    caller = sys._getframe(1)
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    with ExitStack() as stack:
        with _opening:
            if name in _open:
                raise UserError(
                    f"a group named {name!r} is already open: joined at {_open[name]}, and again at {where}; leave the "
                    "first, or rename one of them"
                )
            _open[name] = where
        stack.callback(_open.pop, name)
        group = open_group(
            joining_place(),
            name,
            strategy=strategy,
            device=device,
            buffers=buffers,
            check_every=check_every,
            timeout_s=timeout_s,
            out=Path(out) if out is not None else None,
        )
        group.on_close(stack.pop_all().close)
        return group


def open_group(
    place: ProcessPlace,
    name: str,
    *,
    strategy: str | Strategy | None = None,
    device: str | None = None,
    buffers: str = "broadcast",
    check_every: int | None = None,
    timeout_s: float = 300.0,
    out: Path | None = None,
) -> WorkerGroup:
    """Collective: join from a place that is known; `join` finds it, and minds the names."""
    check_mode(buffers)
    choose_functions()
    if not timeout_s > 0:
        raise UserError(f"timeout_s={timeout_s} must be above 0")
    if check_every is not None and check_every < 0:
        raise UserError(f"check_every={check_every} must be at least 1, or 0 to disable the check")
    launched = place.launched
    parsed = in_own_loop(Strategy.parse(strategy)) if strategy is not None else None
    requested = _given_once("strategy", parsed, place.strategy)
    device = _given_once("device", device, place.device)
    where = check_device(device or "cpu")
    if launched is not None and out is not None:
        raise UserError(f"out={out}: set it in the launcher: manyhands launch --out {out}")
    with ExitStack() as stack:
        ring = stack.enter_context(EventRing.create(role=place.rank)) if out is not None else None
        worker_context: WorkerContext = Unwatched(ring)
        if launched is not None:
            launched.joins += 1
            events = stack.enter_context(EventRing.attach(os.dup(launched.context.descriptor("events"))))
            events.record(EventKind.JOIN, time.monotonic_ns())
            stack.callback(lambda: events.record(EventKind.LEAVE, time.monotonic_ns()))
            worker_context = ProcessContext(launched.context, events)
        connection = connect(place, name, requested, timeout_s)
        if check_every is None:
            check_every = _CHECK_EVERY if connection.on_one_host else 0
        rounds = connection.rounds(connection.words, connection.exchange, worker_context, check_every)
        stack.callback(rounds.close)
        stack.callback(connection.close)
        if ring is not None and out is not None:
            try:
                stack.enter_context(keeping(ring, connection, out))
            except BaseException:
                connection.abort()  # or the others would wait for a worker that leaves in good order
                raise
        own_device = device_of(where, connection.local_rank)
        if own_device.type == "cuda":
            torch.cuda.set_device(own_device)
        chosen, abort = connection.strategy, connection.abort
        group = WorkerGroup(name, rounds, strategy=chosen, device=own_device, buffers=buffers, on_abort=abort)
        group.on_close(stack.pop_all().close)
        return group


_T = TypeVar("_T")


def _given_once(what: str, here: _T | None, launcher: _T | None) -> _T | None:
    if here is not None and launcher is not None and here != launcher:
        both = f"the script asks for {what}={here}, but the launcher for {launcher}"
        raise UserError(f"{both}; set it in one place")
    return here if here is not None else launcher
