"""A parameter server whose roles are threads of the test: real servers, workers, hubs and memory, and no processes.

The test is the launcher: it publishes views and hears what the roles say. Threads share the random generators, so a
task's model must come with weights of its own.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from manyhands.engine.computing import TrainingPlan
from manyhands.native.segment import Segment
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.local.control import Channel, Note, RoleContext, Stop
from manyhands.places.local.forking import RoleSpec
from manyhands.places.local.packed_job import pack
from manyhands.places.local.status import StatusTable
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.reports import (
    ORDERS,
    REPORTS,
    Finish,
    LeaveShards,
    ServerListens,
    ViewPublished,
    WorkerLeft,
    WorkerReady,
)
from manyhands.strategies.ps.live.server_process import serve
from manyhands.strategies.ps.live.server_tables import final_bytes, final_tables
from manyhands.strategies.ps.live.worker_process import work
from manyhands.strategies.ps.ps_messages import ShardView, SlotView, View
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategy import Strategy
from manyhands.task import Task

_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.005


def job_for(task: Task, strategy: str, *, steps: int, workers: int, evaluate_every: int = 0) -> Job:
    """What all roles of such a run are told."""
    parsed = Strategy.parse(strategy)
    assert isinstance(parsed, Ps)
    return Job(
        plan=TrainingPlan(
            task=task, steps=steps, seed=0, evaluate_every=evaluate_every, checkpoint_every=0, device="cpu"
        ),
        strategy=parsed,
        token="a token that only this test knows",
        fingerprint="a task",
        workers=workers,
        timeout_s=_WITHIN_S,
        threads=1,
        run_path=None,
        keep_checkpoints=1,
        resume_version=None,
    )


class ThreadedRun:
    """Servers are members 1 to S, workers follow; a context manager, which ends every thread on leaving."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.heard: list[tuple[int, Any]] = []
        self.addresses: dict[int, str] = {}
        self._servers = job.strategy.num_server_processes
        self._stack = ExitStack()
        self._holders: dict[int, int] = {}  # by slot
        self._channels: dict[int, Channel] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._failures: list[BaseException] = []
        self.totals: dict[int, Mapping[str, Any]] = {}
        self.rings: dict[int, EventRing] = {}
        """By role: workers by their slots, servers after them."""

    def __enter__(self) -> ThreadedRun:
        _, built, self._layout = self.job.build()
        self._model = built.model
        self._packed = pack(self.job)  # each role loads it for itself
        self._stack.callback(os.close, self._packed)
        self._status_table = self._stack.enter_context(StatusTable.create(16))
        self._final = self._stack.enter_context(Segment.create(final_bytes(self._layout), "the end"))
        try:
            for member in range(1, self._servers + 1):
                ring = self._ring(self._role_of(member))
                files = {"final": self._final.descriptor, "events": os.dup(ring.descriptor)}
                self._start(member, serve, files)
            self._await(lambda: len(self.addresses) == self._servers, "servers that listen")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.post(Stop())
        for thread in self._threads.values():
            thread.join(_WITHIN_S)
        self._stack.close()

    def start_workers(self) -> None:
        """One thread for each slot."""
        for slot in range(self.job.workers):
            self.start_worker(slot, self._servers + 1 + slot)

    def start_worker(self, slot: int, member: int) -> None:
        """One more thread; it holds the slot in every view that is published from now on."""
        ring = self._ring(slot)
        buffers = os.memfd_create("buffers")
        self._stack.callback(os.close, buffers)
        files = {
            "events": os.dup(ring.descriptor),
            "buffers": buffers,
            "final": self._final.descriptor,
        }
        self._holders[slot] = member
        self._start(member, partial(work, slot=slot), files)

    def tell(self, member: int, order: Any) -> None:
        """Say something to one role."""
        self._channels[member].post(Note(payload=ORDERS.write(order)))

    def hold(self, slot: int, member: int) -> None:
        """In every view from now on, `member` holds the slot."""
        self._holders[slot] = member

    def publish(
        self,
        epoch: int,
        primaries: tuple[int, ...],
        backups: tuple[int, ...] = (),
        deaf: tuple[int, ...] = (),
    ) -> None:
        """Tell everybody but the `deaf` who serves which shard, and who works in which slot."""
        view = View(
            epoch=epoch,
            shards=tuple(
                ShardView(shard=shard, epoch=epoch, primary=primary, backup=backups[shard] if backups else 0)
                for shard, primary in enumerate(primaries)
            ),
            slots=tuple(SlotView(slot=slot, member=member) for slot, member in self._holders.items()),
        )
        roles = {member: self._role_of(member) for member in range(1, self._servers + 1)}
        for member in self._channels.keys() - set(deaf):
            self.tell(member, ViewPublished(view=view, addresses=self.addresses, roles=roles, workers={}))

    def said(self, *kinds: type) -> list[Any]:
        """What the roles reported of this kind so far."""
        self._listen()
        return self._heard_of(kinds)

    def await_said(self, count: int, *kinds: type) -> None:
        """Wait until there are so many reports of this kind."""
        self._await(lambda: len(self._heard_of(kinds)) >= count, f"{count} times {kinds}")

    def await_joined(self, count: int) -> None:
        """Wait until so many servers and workers are there."""
        self.await_said(count, WorkerReady, ServerListens)

    def finish(self) -> nn.Module:
        """Wait for the workers, let the servers leave, and give the trained model."""
        self.await_said(self.job.workers, WorkerLeft)
        for member in range(1, self._servers + 1):
            self.tell(member, LeaveShards(shards=tuple(range(self.job.strategy.servers))))
            self.tell(member, Finish())
            self._threads[member].join(_WITHIN_S)
        for member, channel in self._channels.items():
            if member > self._servers:
                channel.post(Stop())
                self._threads[member].join(_WITHIN_S)
        self._raise()
        memory = self._final.tensor(0, final_bytes(self._layout), torch.uint8)
        values = self._layout.views(memory[: self._layout.num_bytes]) | final_tables(self._layout, memory)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(values[name])
        return self._model

    def _heard_of(self, kinds: tuple[type, ...]) -> list[Any]:
        return [report for _, report in self.heard if isinstance(report, kinds)]

    def _role_of(self, server: int) -> int:
        return self.job.workers + server - 1

    def _ring(self, role: int) -> EventRing:
        ring = self.rings[role] = self._stack.enter_context(EventRing.create(role=role, capacity=1 << 12))
        return ring

    def _start(self, member: int, target: Callable[[RoleContext], Any], files: Mapping[str, int]) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            self._stack.callback(end.close)
        spec = RoleSpec(
            name=f"member {member}",
            rank=member,
            world=16,
            parent_pid=os.getpid(),
            lifeline=-1,
            status_table=-1,
            row=member,
            descriptors={"job": self._packed, **files},
            path=(),
            python_path=None,
        )
        context = RoleContext(spec, Channel(theirs, "the test"), self._status_table)
        self._channels[member] = Channel(ours, f"member {member}")

        def run() -> None:
            try:
                self.totals[member] = target(context)
            except BaseException as error:
                self._failures.append(error)

        thread = self._threads[member] = threading.Thread(target=run, name=f"member {member}", daemon=True)
        thread.start()

    def _listen(self) -> None:
        for member, channel in self._channels.items():
            for message in channel.receive():
                assert isinstance(message, Note)
                report = REPORTS.read(message.payload)
                self.heard.append((member, report))
                if isinstance(report, ServerListens):
                    self.addresses[member] = report.address

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _WITHIN_S
        while True:
            self._listen()
            self._raise()
            if condition():
                return
            assert time.monotonic() < deadline, f"no {what} within {_WITHIN_S:g} s"
            time.sleep(_LOOK_EVERY_S)

    def _raise(self) -> None:
        if self._failures:
            raise self._failures[0]
