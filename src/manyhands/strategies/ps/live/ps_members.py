"""The server and worker processes of a run: children of its launcher, or externally started ones of its leader.

Which externally started processes serve and which work:

    a specification    servers are the roles of type ps; workers those of type worker. A chief leads and does not
                       train; without one worker 0 leads, and has a child that trains
    torchrun           the first ranks serve, as many as the strategy has servers; the others work. Rank 0 leads, and
                       has a child that serves
    Ray                a chief leads and does not train; then come the servers, then the workers
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.tensorfile import encode_tensors
from manyhands.engine.computing import worker_environment
from manyhands.errors import UserError
from manyhands.native.segment import Segment
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.external.control_server import ControlServer
from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.local.supervisor import Ended, Event, Hung
from manyhands.places.local.watchdog import Watched
from manyhands.strategies.common.run_launcher import ChildMembers, ExternalMembers, MemberProcesses
from manyhands.strategies.ps.live import remote
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.reports import REPORTS, StepComputed
from manyhands.strategies.ps.live.server_process import serve
from manyhands.strategies.ps.live.server_tables import final_bytes
from manyhands.strategies.ps.live.snapshots import ShardSnapshots
from manyhands.strategies.ps.live.worker_process import work
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.update_files import record_mark, record_of, record_rows, take_record
from manyhands.transport.messages import ProtocolError


class RunMembers(MemberProcesses, Protocol):
    """The servers and workers of a run."""

    def start_server(self, member: int, place: int) -> str:
        """Request the server of this index; returns its name without waiting, like `start_worker`."""


Assemble = Callable[[Watched], AbstractContextManager[RunMembers]]
"""Creates the members of one run; leaving the context ends all of them."""


class RunFiles(NamedTuple):
    """Memory files of the launcher, which its children inherit."""

    final: int  # the final parameters, flat; if workers read in place, the current ones throughout
    buffers: int  # the final buffers of a worker's model
    rings: Mapping[int, EventRing]  # by slot
    server_rings: Sequence[EventRing]  # by server index; the successor of a dead server takes its index


class LocalMembers(ChildMembers):
    """Servers and workers that are children of this process; a context manager."""

    def __init__(self, job: Job, files: RunFiles, watched: Watched) -> None:
        super().__init__(job, job.workers + job.strategy.num_server_processes, watched)
        self._files = files

    def start_server(self, member: int, place: int) -> str:
        files = {"events": self._files.server_rings[place].descriptor}
        return self._start(member, f"server {place}", serve, files)

    def start_worker(self, member: int, slot: int) -> str:
        files = {"events": self._files.rings[slot].descriptor, "buffers": self._files.buffers}
        return self._start(member, f"worker {slot}", partial(work, slot=slot), files)

    def _start(
        self, member: int, name: str, target: Callable[..., Mapping[str, Any]], files: Mapping[str, int]
    ) -> str:
        env = worker_environment(self._job.plan, self._job.threads, loads=target is not serve)
        return self.start_child(member, name, target, {"final": self._files.final, **files}, env)


class PsRanks(NamedTuple):
    """The ranks of the servers and workers of a run; rank 0 leads, and also has a role if it is listed."""

    servers: tuple[int, ...]  # the rank of each server, by server index
    workers: tuple[int, ...]  # the rank of each worker, by slot
    names: tuple[str, ...]  # by rank: the name before the process has connected, such as `ps 1 at hostB:2222`


def ps_ranks(strategy: Ps, place: ProcessPlace) -> PsRanks:
    """Assign ranks to the roles of a strategy that `Ps.placed` has adapted to this place."""
    if place.cluster is not None:
        roles = place.cluster.ranked
        serving, working = (
            tuple(rank for rank, role in enumerate(roles) if role.type == kind) for kind in ("ps", "worker")
        )
        names = tuple(f"{role} at {place.cluster.address(role)}" for role in roles)
        return PsRanks(servers=serving, workers=working, names=names)
    servers = strategy.num_server_processes
    first = int(place.has_chief)
    serving, working = tuple(range(first, first + servers)), tuple(range(first + servers, place.world))
    if first:
        names = (
            "chief",
            *(f"ps {one}" for one in range(servers)),
            *(f"worker {one}" for one in range(len(working))),
        )
    else:
        names = tuple(
            f"server {rank} (rank {rank})" if rank < servers else f"worker {rank - servers} (rank {rank})"
            for rank in range(place.world)
        )
    return PsRanks(servers=serving, workers=working, names=names)


class RunKeeper:
    """Stores what remote members send, in the memory and directory that local children would write."""

    def __init__(self, job: Job, layout: FlatLayout, files: RunFiles, say: Callable[[str], None]) -> None:
        self._run_path, self._layout, self._files, self._say = job.run_path, layout, files, say
        self._snapshots = ShardSnapshots(job.run_path, job.strategy.servers, job.keep_checkpoints)
        self._before: dict[str, int] = {}  # by record: the rows of earlier processes
        self.computed: dict[int, str] = {}  # the name of each worker that has a record on some host

    def take(self, shipment: remote.Shipment, data: bytearray) -> None:
        """Store a shipment; a full disk costs the shipment and not the run."""
        try:
            match shipment.kind:
                case "final":
                    with Segment.attach(os.dup(self._files.final)) as segment:
                        memory = segment.tensor(0, final_bytes(self._layout), torch.uint8)
                        remote.take_final(self._layout, shipment.shard, data, memory)
                        del memory
                case "buffers":
                    try:
                        load(bytes(data))
                    except SafetensorError as error:
                        raise ProtocolError(
                            "buffers", f"{len(data)} bytes are not tensors: {error}"
                        ) from error
                    with open(f"/proc/self/fd/{self._files.buffers}", "wb") as file:
                        file.write(data)
                case "snapshot" if self._snapshots.kept:
                    self._snapshots.save(shipment.shard, remote.unpack_snapshot(data))
                case "record" if self._run_path is not None and shipment.file not in self._before:
                    # The successor of a member that died before the confirmation sends its record again.
                    self._before[shipment.file] = take_record(self._run_path, shipment.file, bytes(data))
        except WriteFailed as error:
            self._say(f"{shipment} was not saved: {error}")

    def snapshot(self, wanted: remote.SnapshotWanted) -> Sequence[Any]:
        found = self._snapshots.load(wanted.shard, wanted.version) if self._snapshots.kept else None
        return [] if found is None else remote.pack_snapshot(found)

    def lost_records(self) -> list[str]:
        """At the end: a sentence for each worker whose record never arrived."""
        run = self._run_path
        if run is None:
            return []
        return [
            f"{record} is on the host of {name}, which died, and no process from there has rejoined: this recording is "
            "missing, so the run cannot be fully replayed or audited"
            for member, name in self.computed.items()
            if record_rows(run, record := record_of(member)) is None
        ]

    def counted(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """A member's counts, plus the rows that its records had before."""

        def rows_of(name: str, rows: int) -> int:
            if not rows and self._run_path is not None:  # it wrote nothing, and so it sent no file
                return record_rows(self._run_path, name) or 0
            return rows + self._before.get(name, 0)

        counts = payload.get("recorded", {})
        return {**payload, "recorded": {name: rows_of(name, rows) for name, rows in counts.items()}}


class RoleMembers(ExternalMembers):
    """All members on control connections, and the leader's child if the leader has a role; a context manager."""

    def __init__(
        self,
        control_server: ControlServer,
        ranks: PsRanks,
        job: Job,
        keeper: RunKeeper,
        local: LocalMembers,
        say: Callable[[str], None],
        _: Watched,
    ) -> None:
        has_child = 0 in (*ranks.servers, *ranks.workers)
        super().__init__(control_server, local if has_child else None, say, job.timeout_s)
        self._ranks, self._job, self._keeper, self._local = ranks, job, keeper, local

    def __exit__(self, *_: object) -> None:
        """Stop the child and all standby processes; the leader tells the members themselves."""
        for rank in self._control_server.members:
            if rank not in self._member_of:
                self._control_server.ask_to_stop(rank)
        super().__exit__()

    def start_server(self, member: int, place: int) -> str:
        """Request the server of this index; its process gets a TakePart once it has connected."""
        rank = self._ranks.servers[place]
        return self._local.start_server(member, place) if rank == 0 else self._await_rank(member, rank)

    def start_worker(self, member: int, slot: int) -> str:
        """Request the worker of this slot; its process gets a TakePart once it has connected."""
        rank = self._ranks.workers[slot]
        return self._local.start_worker(member, slot) if rank == 0 else self._await_rank(member, rank)

    def _await_rank(self, member: int, rank: int) -> str:
        self._want(rank, member)
        return self._ranks.names[rank]

    def _name(self, rank: int) -> str:
        return self._ranks.names[rank]

    def _give_part(self, rank: int, member: int) -> None:
        job, serves = self._job, rank in self._ranks.servers
        part = remote.TakePart(
            member=member,
            serves=serves,
            number=(self._ranks.servers if serves else self._ranks.workers).index(rank),
            token=job.token,
            threads=job.threads,
            resume_version=job.resume_version,
            keeps=job.run_path is not None,
            records=record_mark(Path(job.run_path)) if job.run_path is not None else None,
            buffers=bool(job.buffers) and not serves,
        )
        self._control_server.tell(rank, remote.PARTS.write(part))
        if part.buffers:
            self._control_server.give(rank, str(remote.BUFFERS), list(encode_tensors(job.buffers)))

    def _said(self, rank: int, payload: Mapping[str, Any]) -> list[Event | Hung]:
        try:
            if payload.get("kind") == remote.SnapshotWanted.__name__:
                self._give_snapshot(rank, remote.WANTS.read(payload))
                return []
            REPORTS.read(payload)  # validate it here, since the launcher will parse it
        except ProtocolError as error:
            self._refuse(rank, error)
            return []
        if payload.get("kind") == StepComputed.__name__:
            self._keeper.computed[self._member_of[rank]] = self._ranks.names[rank]
        return super()._said(rank, payload)

    def _give_snapshot(self, rank: int, wanted: remote.SnapshotWanted) -> None:
        servers = self._job.strategy.servers
        if not 0 <= wanted.shard < servers or (wanted.version is not None and wanted.version < 0):
            raise ProtocolError("shard", f"no version {wanted.version} of shard {wanted.shard} of {servers}")
        name = str(remote.Shipment("snapshot", shard=wanted.shard))
        self._control_server.give(rank, name, self._keeper.snapshot(wanted))

    def _receive(self, rank: int, name: str, data: bytearray) -> None:
        try:
            self._keeper.take(remote.Shipment.parse(name, self._job.strategy.servers), data)
        except ProtocolError as error:
            self._refuse(rank, error)

    def _ended(self, rank: int, ended: Ended) -> Ended:
        reported = ended.failure.reported if ended.failure is not None else None
        if ended.failure is not None and reported is not None and reported.kind == UserError.__name__:
            raise ended.failure.error()  # it cannot do its work, here or in any successor: the port is taken, say
        payload = self._keeper.counted(ended.payload) if ended.payload is not None else None
        return ended._replace(name=self._ranks.names[rank], payload=payload)
