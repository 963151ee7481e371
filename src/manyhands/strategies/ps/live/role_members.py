"""Externally started servers and workers on control connections; one of them may be a child of the leader.

Starting a member means sending TakePart to a process: as soon as the process of that role has connected, and
again when another of the same role replaces one that died. A lost member is reported as dead in any case: its
messages are ignored, and it is told so if it still lives.

    worker 1 on hostB    joins  ──►  rank 2 is there          start_worker(member=4, slot=1)  ──►  TakePart
    kill -9              lost   ──►  member 4 has ended       start_worker(member=6, slot=1)       … waits
    worker 1 on hostB    joins  ──►  rank 2 is there again                                    ──►  TakePart
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.tensorfile import encode_tensors
from manyhands.errors import PeerTimeout, UserError, printable
from manyhands.native.segment import Segment
from manyhands.places.external.control_server import (
    ControlEvent,
    ControlServer,
    Delivered,
    ProcessRejected,
    Warned,
)
from manyhands.places.local.failure import Failure
from manyhands.places.local.supervisor import Ended, Event, Hung, Said, Started
from manyhands.strategies.ps.external_roles import PsRanks
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.ps_members import LocalMembers, RunFiles
from manyhands.strategies.ps.live.remote import PARTS, WANTS, SnapshotWanted, TakePart
from manyhands.strategies.ps.live.reports import REPORTS, StepComputed
from manyhands.strategies.ps.live.sending import BUFFERS, Shipment, pack_snapshot, take_final, unpack_snapshot
from manyhands.strategies.ps.live.server_tables import final_bytes
from manyhands.strategies.ps.live.snapshots import ShardSnapshots
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.update_files import has_record, record_mark, record_of, record_rows, take_record
from manyhands.transport.messages import ProtocolError

__all__ = ["RoleMembers", "RunKeeper"]

_LOOK_S: Final = 0.02


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
                    self._take_final(shipment.shard, data)
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

    def _take_final(self, shard: int, data: bytearray) -> None:
        with Segment.attach(os.dup(self._files.final)) as segment:
            memory = segment.tensor(0, final_bytes(self._layout), torch.uint8)
            take_final(self._layout, shard, data, memory)
            del memory

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
            if not has_record(run, record := record_of(member))
        ]

    def counted(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """A member's counts, plus the rows that its records had before."""
        counts = payload.get("recorded", {})
        return {**payload, "recorded": {name: self._rows(name, rows) for name, rows in counts.items()}}

    def _rows(self, name: str, rows: int) -> int:
        if not rows and self._job.run_path is not None:  # it wrote nothing, and so it sent no file
            return record_rows(self._job.run_path, name)
        return rows + self._before.get(name, 0)


@dataclass(slots=True)
class _Wanted:
    """A requested member that has not connected yet."""

    member: int
    number: int
    serves: bool
    since_s: float


class RoleMembers:
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
        self._control_server, self._ranks, self._job, self._keeper = control_server, ranks, job, keeper
        self._local, self._say = local, say
        self._has_child = 0 in (*ranks.servers, *ranks.workers)
        self._wanted: dict[int, _Wanted] = {}  # by rank
        self._at: dict[int, int] = {}  # by member, the rank that it is
        self._member_of: dict[int, int] = {}  # by rank
        self._untold: list[Event | Hung] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._has_child:
                stack.enter_context(self._local)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the child and all standby processes; the leader tells the members themselves."""
        for rank in self._control_server.members:
            if rank not in self._member_of:
                self._control_server.ask_to_stop(rank)
        self._stack.close()

    # ── what the launcher asks ────────────────────────────────────────────────────────────────────────────────────

    @property
    def members(self) -> tuple[int, ...]:
        """The members that are connected, without those still awaited."""
        return (*self._at, *(self._local.members if self._has_child else ()))

    def together(self) -> AbstractContextManager[None]:
        """A no-op: all processes except the leader's child have been started already."""
        return nullcontext()

    def start_server(self, member: int, place: int) -> str:
        """Request the server of this index; its process gets a TakePart once it has connected."""
        return self._want(_Wanted(member, place, True, time.monotonic()))

    def start_worker(self, member: int, slot: int) -> str:
        """Request the worker of this slot; its process gets a TakePart once it has connected."""
        return self._want(_Wanted(member, slot, False, time.monotonic()))

    def poll(self, timeout_s: float) -> Sequence[Event | Hung]:
        """The events so far; PeerTimeout that names a role whose process was not started in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._has_child:
                self._untold += self._local.poll(0.0)
            for event in self._control_server.poll(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
                self._untold += self._hear(event)
            self._require_in_time()
            if self._untold or time.monotonic() >= deadline:
                untold, self._untold = self._untold, []
                return untold

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send over the control connection, or the child's channel; a no-op if the member has ended."""
        rank = self._at.get(member)
        if rank is not None:
            self._control_server.tell(rank, payload)
        elif self._is_child(member):
            self._local.tell(member, payload)

    def kill(self, member: int) -> None:
        """Dismiss the member: its messages are ignored from now on, and it is told so."""
        rank = self._at.get(member)
        if rank is not None:
            self._control_server.dismiss(rank, "the leader went on without it")
        elif self._is_child(member):
            self._local.kill(member)

    def ask_to_stop(self, member: int) -> None:
        """Ask the member to leave, if it has connected."""
        rank = self._at.get(member)
        if rank is not None:
            self._control_server.ask_to_stop(rank)
        elif self._is_child(member):
            self._local.ask_to_stop(member)

    def _is_child(self, member: int) -> bool:
        return self._has_child and member in self._local.members

    # ── parts ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _want(self, wanted: _Wanted) -> str:
        rank = self._ranks.of(wanted.number, serves=wanted.serves)
        if rank == 0:
            start = self._local.start_server if wanted.serves else self._local.start_worker
            return start(wanted.member, wanted.number)
        self._wanted[rank] = wanted
        if rank in self._control_server.members:
            self._give_part(rank)
        return self._ranks.names[rank]

    def _give_part(self, rank: int) -> None:
        wanted = self._wanted.pop(rank, None)
        if wanted is None:
            return  # it stands by until its predecessor's end is reported
        self._at[wanted.member], self._member_of[rank] = rank, wanted.member
        job = self._job
        part = TakePart(
            member=wanted.member,
            serves=wanted.serves,
            number=wanted.number,
            token=job.token,
            threads=job.threads,
            resume_version=job.resume_version,
            keeps=job.run_path is not None,
            records=record_mark(Path(job.run_path)) if job.run_path is not None else None,
            buffers=bool(job.buffers) and not wanted.serves,
        )
        self._control_server.tell(rank, PARTS.write(part))
        if part.buffers:
            self._control_server.give(rank, str(BUFFERS), list(encode_tensors(job.buffers)))
        self._untold.append(Started(wanted.member, self._control_server.line(rank).pid))

    def _require_in_time(self) -> None:
        now_s = time.monotonic()
        for rank, wanted in self._wanted.items():
            waited_s = now_s - wanted.since_s
            if waited_s > self._job.timeout_s:
                remote = "".join(f"; {sentence}" for sentence in self._control_server.rejected[-3:])
                raise PeerTimeout(
                    f"{self._ranks.names[rank]} did not come within {waited_s:.0f} s; start it, or see on its host why "
                    f"it ended{remote}",
                    peer=-1,
                )

    # ── what comes over the lines ─────────────────────────────────────────────────────────────────────────────────

    def _hear(self, event: ControlEvent) -> list[Event | Hung]:
        match event:
            case Started(member=rank):
                self._give_part(rank)
            case Said(member=rank, payload=payload):
                return self._hear_said(rank, payload)
            case Delivered(member=rank, name=name, data=data):
                self._take(rank, name, data)
            case Ended(member=rank):
                return self._end(rank, event)
            case ProcessRejected(sentence=sentence) | Warned(sentence=sentence):
                self._say(sentence)
        return []

    def _hear_said(self, rank: int, payload: Mapping[str, Any]) -> list[Event | Hung]:
        member = self._member_of.get(rank)
        if member is None:
            return []
        try:
            if payload.get("kind") == SnapshotWanted.__name__:
                self._give_snapshot(rank, WANTS.read(payload))
                return []
            REPORTS.read(payload)  # validate it here, since the launcher will parse it
        except ProtocolError as error:
            self._refuse(rank, error)
            return []
        if payload.get("kind") == StepComputed.__name__:
            self._keeper.computed(member, self._ranks.names[rank])
        return [Said(member, payload)]

    def _give_snapshot(self, rank: int, wanted: SnapshotWanted) -> None:
        servers = self._job.strategy.servers
        if not 0 <= wanted.shard < servers or (wanted.version is not None and wanted.version < 0):
            raise ProtocolError("shard", f"version {wanted.version} of {wanted.shard}, of {servers} shards")
        self._control_server.give(
            rank, str(Shipment("snapshot", shard=wanted.shard)), self._keeper.snapshot(wanted)
        )

    def _take(self, rank: int, name: str, data: bytearray) -> None:
        try:
            self._keeper.take(Shipment.parse(name, self._job.strategy.servers), data)
        except ProtocolError as error:
            self._refuse(rank, error)

    def _refuse(self, rank: int, error: Exception) -> None:
        """Dismiss a member that violated the protocol; the run continues without it."""
        self._control_server.dismiss(rank, str(error))
        self._say(f"{self._ranks.names[rank]} sent what nobody may send: {printable(str(error))}")

    def _end(self, rank: int, ended: Ended) -> list[Event | Hung]:
        member = self._member_of.pop(rank, None)
        failure = ended.failure
        if failure is not None and _is_refusal(failure):
            raise failure.error()
        if member is None:
            return []  # it had no part yet: another may come in its place
        del self._at[member]
        payload = self._keeper.counted(ended.payload) if ended.payload is not None else None
        told = replace(ended, member=member, name=self._ranks.names[rank], payload=payload)
        return [replace(told, failure=replace(failure, rank=member)) if failure is not None else told]


def _require_tensors(data: bytearray) -> None:
    try:
        load(bytes(data))
    except SafetensorError as error:
        raise ProtocolError("buffers", f"{len(data)} bytes are no tensors: {error}") from error


def _is_refusal(failure: Failure) -> bool:
    """Whether a role cannot do its work, here or in any successor, for example because the port is taken."""
    return failure.reported is not None and failure.reported.kind == UserError.__name__
