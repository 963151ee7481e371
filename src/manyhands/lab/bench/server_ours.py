"""Our side of the server benchmark: a real server process, and the worker's end of the protocol in this one.

The server is `strategies.ps.live`'s own role with all that it does in training; only what a worker does between two
exchanges, computing, is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from numpy.typing import NDArray

from manyhands.engine.computing import TrainingPlan
from manyhands.errors import ManyhandsError, PeerTimeout
from manyhands.lab.bench.server_work import PARAMETER, Array
from manyhands.native.segment import Segment
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.local.host import threads_per_role
from manyhands.places.local.packed_job import pack
from manyhands.places.local.supervisor import Ended, Role, Said, Started, Supervisor
from manyhands.strategies.ps import ps_messages as messages
from manyhands.strategies.ps.actions import SendMessage
from manyhands.strategies.ps.client_core import ClientAction, ClientCore, Compute
from manyhands.strategies.ps.live.area import WorkerArea
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.reports import ORDERS, REPORTS, ServerListens, ViewPublished
from manyhands.strategies.ps.live.server_process import serve
from manyhands.strategies.ps.live.server_tables import final_bytes
from manyhands.strategies.ps.live.worker_tables import WorkerTables
from manyhands.strategies.ps.strategy import Ps
from manyhands.task import Task
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import Arrived, Lost

_SERVER = 1
_FIRST_WORKER = 2
_ENDLESS = 1 << 40  # steps of a training that the benchmark never sees the end of
_LOOK_S = 0.2
_LAST_WORDS_S = 2.0
_LINKS = {"shared": "shared memory", "tcp": "TCP"}


class OurServer:
    """One server process of ours, for up to so many workers; a context manager."""

    def __init__(self, task: Task, strategy: Ps, workers: int, timeout_s: float) -> None:
        self._job = Job(
            plan=TrainingPlan(task=task, steps=_ENDLESS, seed=0, evaluate_every=0, checkpoint_every=0),
            strategy=strategy,
            fingerprint="server benchmark",
            workers=workers,
            timeout_s=timeout_s,
            threads=threads_per_role(workers),
            run_path=None,
            keep_checkpoints=1,
            resume_version=None,
        )
        self._stack = ExitStack()
        self.ends: list[WorkerEnd] = []
        self.pid = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            supervisor = stack.enter_context(Supervisor(num_members=1 + self._job.workers))
            packed = pack(self._job)
            env = {"OMP_NUM_THREADS": str(self._job.threads)}
            stack.callback(os.close, packed)
            _, _, layout = self._job.build()
            self._final = stack.enter_context(Segment.create(final_bytes(layout), "the parameters"))
            ring = stack.enter_context(EventRing.create(role=0))
            files = {"job": packed, "final": self._final.descriptor, "events": ring.descriptor}
            supervisor.start(Role(name="server", target=serve, descriptors=files, env=env), _SERVER)
            stack.callback(supervisor.kill, _SERVER)  # it has nothing to leave in order
            address = self._await_address(supervisor, time.monotonic() + self._job.timeout_s)
            members = range(_FIRST_WORKER, _FIRST_WORKER + self._job.workers)
            view = messages.View(
                epoch=1,
                shards=(messages.ShardView(shard=0, epoch=1, primary=_SERVER),),
                slots=tuple(
                    messages.SlotView(slot=slot, member=member) for slot, member in enumerate(members)
                ),
            )
            published = ViewPublished(view=view, addresses={_SERVER: address}, roles={}, workers={})
            supervisor.tell(_SERVER, ORDERS.write(published))
            supervisor.poll(0)
            self._supervisor, self._view, self._address = supervisor, view, address
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add_worker(self) -> WorkerEnd:
        slot = self._view.slots[len(self.ends)]
        end = self._stack.enter_context(WorkerEnd(self._job, slot.slot, slot.member, self))
        end.join(self._view, self._address)
        self.ends.append(end)
        return end

    def parameters(self) -> Segment:
        """What workers read in the server's memory, where the strategy has them do that."""
        return Segment.attach(os.dup(self._final.descriptor))

    def last_words(self) -> str:
        ended = [event for event in self._supervisor.poll(_LAST_WORDS_S) if isinstance(event, Ended)]
        return "; ".join(event.failure.sentence for event in ended if event.failure is not None)

    def _await_address(self, supervisor: Supervisor, deadline_s: float) -> str:
        while time.monotonic() < deadline_s:
            for event in supervisor.poll(_LOOK_S):
                match event:
                    case Started(pid=pid):
                        self.pid = pid
                    case Said(payload=payload):
                        report = REPORTS.read(payload)
                        if isinstance(report, ServerListens):
                            return report.address
                    case Ended(failure=failure):
                        raise ManyhandsError(f"the server did not start: {failure}")
        raise ManyhandsError("the server did not start in time")


class WorkerEnd:
    """A worker that does not compute: it pushes a gradient that it is given, and pulls what comes of it."""

    def __init__(self, job: Job, slot: int, member: int, server: OurServer) -> None:
        self.name = f"manyhands, {_LINKS[job.strategy.link]}, {job.strategy.consistency}"
        self._job = job
        self._server = server
        _, built, layout = job.build(slot)
        self._parameter = built.model.get_parameter(PARAMETER)
        self._shared = job.shared_parameters(server.parameters, layout)
        self._area = WorkerArea.create(layout, self._shared.values if self._shared is not None else None)
        self._part = self._area.part(0)
        self._tables = WorkerTables(built.model, layout, job.plan.task.sparse)
        self._tables.begin()
        self._rows = torch.empty(0, dtype=torch.int64)
        self._values, self._gradient = (
            layout.views(buffer).get(PARAMETER) for buffer in (self._area.values, self._area.gradients)
        )
        self._part.flags.copy_(layout.flags(0, {PARAMETER}))
        self._is_shared = job.strategy.link == "shared"
        self._core = ClientCore(slot=slot, member=member, num_shards=1)
        self._hub: Hub = job.hub(member, "worker", destination=self._destination)
        self._computing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hub.close()
        self._area.close()
        if self._shared is not None:
            self._shared.close()

    def join(self, view: messages.View, address: str) -> None:
        (server,) = {place.primary for place in view.shards}
        self._hub.connect(server, address)
        self._listen_until(lambda: server in self._hub.members())
        if self._is_shared:
            self._hub.share(server, self._area.segment, self._core.member)
        self._do(self._core.view(view))
        self._listen_until(lambda: self._computing)

    def give(self, pushed: Sequence[NDArray[Any]]) -> None:
        *rows, gradient = (torch.from_numpy(array) for array in pushed)
        if self._gradient is not None:
            self._gradient.copy_(gradient)
            return
        (self._rows,) = rows
        self._tables.begin()
        self._tables.choose(self._rows)
        self._parameter.grad = torch.sparse_coo_tensor(
            self._rows[None], gradient, self._parameter.shape, is_coalesced=True, check_invariants=False
        )
        self._tables.collect(share=1.0)

    def exchange(self) -> None:
        self._computing = False
        self._do(self._core.computed(weight=1.0))
        self._listen_until(lambda: self._computing)
        if self._tables.exist:
            self._tables.begin()
            self._do(self._core.read_rows(self._tables.choose(self._rows)))
            self._listen_until(lambda: not self._core.waiting_for)

    @property
    def pulled(self) -> Array:
        pulled = self._parameter.detach()[self._rows] if self._values is None else self._values
        values: Array = pulled.numpy()
        return values

    def _listen_until(self, done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + self._job.timeout_s
        while not done():
            for event in self._hub.poll(_LOOK_S):
                match event:
                    case Arrived(message=message):
                        if isinstance(message, messages.RowValues):
                            self._tables.take(message.shard, event.payload)
                        elif isinstance(message, messages.RowsUnknown):
                            self._tables.forgotten(message.names)
                        self._do(self._core.handle(message, event.member))
                        event.release()
                    case Lost(reason=reason):
                        raise ManyhandsError(f"the server is gone: {self._server.last_words() or reason}")
            if time.monotonic() > deadline_s:
                raise PeerTimeout(f"the server did not answer within {self._job.timeout_s:g} s", peer=_SERVER)

    def _do(self, actions: list[ClientAction]) -> None:
        for action in actions:
            match action:
                case SendMessage(to=to, message=message):
                    self._hub.send(to, message, self._payload(to, message))
                case Compute():
                    self._computing = True
                case _:
                    raise ManyhandsError(f"the server does not serve: {action}")

    def _payload(self, to: int, message: messages.Message) -> list[Any]:
        match message:
            case messages.Push():
                part = self._part
                inline = [] if self._is_shared else [part.flags.numpy(), part.gradient.memory.numpy()]
                return inline + self._tables.push(to, message.shard) if self._tables.exist else inline
            case messages.ReadRows():
                return self._tables.request(to, message.shard)
            case _:
                return []

    def _destination(self, member: int, message: Any, num_bytes: int) -> memoryview | None:
        del member
        if isinstance(message, messages.Parameters) and self._part.values.nbytes == num_bytes:
            return memoryview(self._part.values.numpy())  # type: ignore[arg-type]
        return None
