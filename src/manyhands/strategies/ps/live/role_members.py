"""Externally started servers and workers of a run, as its leader sees them, and what it keeps of theirs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.tensorfile import encode_tensors
from manyhands.errors import UserError
from manyhands.native.segment import Segment
from manyhands.places.external.control_server import ControlServer
from manyhands.places.local.supervisor import Ended, Event, Hung
from manyhands.strategies.common.run_launcher import ExternalMembers
from manyhands.strategies.ps.external_roles import PsRanks
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.ps_members import LocalMembers, RunFiles
from manyhands.strategies.ps.live.remote import PARTS, WANTS, SnapshotWanted, TakePart
from manyhands.strategies.ps.live.reports import REPORTS, StepComputed
from manyhands.strategies.ps.live.sending import BUFFERS, Shipment, pack_snapshot, take_final, unpack_snapshot
from manyhands.strategies.ps.live.server_tables import final_bytes
from manyhands.strategies.ps.live.snapshots import ShardSnapshots
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.update_files import record_mark, record_of, record_rows, take_record
from manyhands.transport.messages import ProtocolError

__all__ = ["RoleMembers", "RunKeeper"]


class RunKeeper:
    """Stores what remote members send, in the memory and directory that local children would write."""

    def __init__(self, job: Job, layout: FlatLayout, files: RunFiles, say: Callable[[str], None]) -> None:
        self._job, self._layout, self._files, self._say = job, layout, files, say
        self._snapshots = ShardSnapshots(job.run_path, job.strategy.servers, job.keep_checkpoints)
        self._before: dict[str, int] = {}  # by record: the rows of earlier processes
        self._computed: dict[int, str] = {}  # by worker that has computed something: what it is called

    def take(self, shipment: Shipment, data: bytearray) -> None:
        """Store a shipment; a full disk costs the shipment and not the run."""
        try:
            match shipment.kind:
                case "final":
                    with Segment.attach(os.dup(self._files.final)) as segment:
                        memory = segment.tensor(0, final_bytes(self._layout), torch.uint8)
                        take_final(self._layout, shipment.shard, data, memory)
                        del memory
                case "buffers":
                    _require_tensors(data)
                    with open(f"/proc/self/fd/{self._files.buffers}", "wb") as file:
                        file.write(data)
                case "snapshot" if self._snapshots.kept:
                    self._snapshots.save(shipment.shard, unpack_snapshot(data))
                case "record" if self._job.run_path is not None and shipment.file not in self._before:
                    # The successor of a member that died before the confirmation sends its record again.
                    self._before[shipment.file] = take_record(self._job.run_path, shipment.file, bytes(data))
        except WriteFailed as error:
            self._say(f"no {shipment}: {error}")

    def snapshot(self, wanted: SnapshotWanted) -> Sequence[Any]:
        """A shard's snapshot as buffers to send; empty if there is none."""
        found = self._snapshots.load(wanted.shard, wanted.version) if self._snapshots.kept else None
        return [] if found is None else list(pack_snapshot(found))

    def computed(self, member: int, name: str) -> None:
        """Note that a worker has computed something, and so has a record on some host."""
        self._computed[member] = name

    def lost_records(self) -> list[str]:
        """At the end: a sentence for each worker whose record never arrived."""
        run = self._job.run_path
        if run is None:
            return []
        return [
            f"{record} stayed on the host of {name}, which died, and nobody has come from there since: its recording "
            "is missing, and the run can be neither replayed nor audited as a whole"
            for member, name in self._computed.items()
            if record_rows(run, record := record_of(member)) is None
        ]

    def counted(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """A member's counts, plus the rows that its records had before."""
        counts = payload.get("recorded", {})
        return {**payload, "recorded": {name: self._rows(name, rows) for name, rows in counts.items()}}

    def _rows(self, name: str, rows: int) -> int:
        if not rows and self._job.run_path is not None:  # it wrote nothing, and so it sent no file
            return record_rows(self._job.run_path, name) or 0
        return rows + self._before.get(name, 0)


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
        return self._start(
            member, self._ranks.servers[place], lambda: self._local.start_server(member, place)
        )

    def start_worker(self, member: int, slot: int) -> str:
        """Request the worker of this slot; its process gets a TakePart once it has connected."""
        return self._start(member, self._ranks.workers[slot], lambda: self._local.start_worker(member, slot))

    def _start(self, member: int, rank: int, start_child: Callable[[], str]) -> str:
        if rank == 0:
            return start_child()
        self._want(rank, member)
        return self._ranks.names[rank]

    def _name(self, rank: int) -> str:
        return self._ranks.names[rank]

    def _give_part(self, rank: int, member: int) -> None:
        job, serves = self._job, rank in self._ranks.servers
        part = TakePart(
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
        self._control_server.tell(rank, PARTS.write(part))
        if part.buffers:
            self._control_server.give(rank, str(BUFFERS), list(encode_tensors(job.buffers)))

    def _said(self, rank: int, payload: Mapping[str, Any]) -> list[Event | Hung]:
        try:
            if payload.get("kind") == SnapshotWanted.__name__:
                self._give_snapshot(rank, WANTS.read(payload))
                return []
            REPORTS.read(payload)  # validate it here, since the launcher will parse it
        except ProtocolError as error:
            self._refuse(rank, error)
            return []
        if payload.get("kind") == StepComputed.__name__:
            self._keeper.computed(self._member_of[rank], self._ranks.names[rank])
        return super()._said(rank, payload)

    def _give_snapshot(self, rank: int, wanted: SnapshotWanted) -> None:
        servers = self._job.strategy.servers
        if not 0 <= wanted.shard < servers or (wanted.version is not None and wanted.version < 0):
            raise ProtocolError("shard", f"version {wanted.version} of {wanted.shard}, of {servers} shards")
        self._control_server.give(
            rank, str(Shipment("snapshot", shard=wanted.shard)), self._keeper.snapshot(wanted)
        )

    def _receive(self, rank: int, name: str, data: bytearray) -> None:
        try:
            self._keeper.take(Shipment.parse(name, self._job.strategy.servers), data)
        except ProtocolError as error:
            self._refuse(rank, error)

    def _ended(self, rank: int, ended: Ended) -> Ended:
        reported = ended.failure.reported if ended.failure is not None else None
        if ended.failure is not None and reported is not None and reported.kind == UserError.__name__:
            raise ended.failure.error()  # it cannot do its work, here or in any successor: the port is taken, say
        payload = self._keeper.counted(ended.payload) if ended.payload is not None else None
        return ended._replace(name=self._ranks.names[rank], payload=payload)


def _require_tensors(data: bytearray) -> None:
    try:
        load(bytes(data))
    except SafetensorError as error:
        raise ProtocolError("buffers", f"{len(data)} bytes are no tensors: {error}") from error
