"""A server or worker in an externally started process: on another host, or beside the leader.

The control connection tells it which member it is. It does what a child of the launcher would do, and sends what
a child would leave in the launcher's memory or directory, each under a name (`Shipment`):

    its shards' snapshots    as they are due, for the leader to keep; its successor requests them from there
    parameters and buffers   at the end
    records of updates       into the run's directory if this host sees it, else into a local folder that its
                             successor finds, from where they are sent at the end
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import select
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from manyhands.data.store.tensorfile import encode_tensors, read_tensors
from manyhands.errors import Aborted, PeerTimeout
from manyhands.native.segment import Segment
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.external.control_connection import ControlConnection
from manyhands.places.local.control import TypedNotes
from manyhands.places.local.status import NOBODY, State
from manyhands.strategies.ps.live.ps_job import Job, MemberContext, MemberResources
from manyhands.strategies.ps.live.server_process import serve_with
from manyhands.strategies.ps.live.server_tables import final_tables
from manyhands.strategies.ps.live.snapshots import ShardSnapshot, ShardSnapshots, pack_install, unpack_install
from manyhands.strategies.ps.live.worker_process import work_with
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import ShardStore
from manyhands.strategies.ps.update_files import RecordMark, is_record, record_files, record_mark
from manyhands.transport.messages import ProtocolError

_LOOK_S: Final = 0.5
_STANDS_BY_S: Final = 60.0
_CHUNK_BYTES: Final = 1 << 20
_HEAD: Final = struct.Struct("<QQ")
_NAME: Final = re.compile(r"(final|snapshot) (\d{1,9})|(buffers)|record (.+)")
_log = logging.getLogger("manyhands")


class TakePart(NamedTuple):
    """The leader tells a process which member it is, and the run's data that only the leader knows."""

    member: int
    serves: bool
    number: int  # the index of a server, the slot of a worker
    token: str
    threads: int
    resume_version: int | None
    keeps: bool  # whether the leader keeps snapshots and records
    records: RecordMark | None  # by which this host checks whether it sees the run directory of the leader
    buffers: bool  # whether the initial buffers of a resumed run follow


class SnapshotWanted(NamedTuple):
    """A server that is about to serve this shard requests its newest snapshot (None), or that of a version."""

    shard: int
    version: int | None


PARTS: Final = TypedNotes(TakePart)
WANTS: Final = TypedNotes(SnapshotWanted)


def take_part(line: ControlConnection, job: Job) -> Mapping[str, Any]:
    """Run as the member that the leader assigns, to its end; returns its counts.

    `job` is what this process was started with, without what only the leader knows. Aborted if the run ended
    before.
    """
    context, resources, part, records = receive_part(line, job)
    try:
        counted = (
            serve_with(context, resources) if part.serves else work_with(context, resources, part.number)
        )
        if records is not None:
            records.send(line, job.timeout_s)
    except Aborted:
        over = line.over
        if over is None:
            raise
        if records is not None and not over.is_lost and over.rank != line.rank:  # it will have no successor
            records.remove()
        raise Aborted(over.sentence) from None  # the connection knows the reason
    return counted


def receive_part(
    line: ControlConnection, job: Job
) -> tuple[MemberContext, MemberResources, TakePart, _Records | None]:
    """Wait for the part that the leader assigns; `job` becomes that of `resources`."""
    context = _ControlMember(line)
    part = context.await_part()
    records = _Records(part, line.name) if part.keeps else None
    job = replace(
        job,
        token=part.token,
        threads=part.threads,
        run_path=records.path if records is not None else None,
        resume_version=part.resume_version,
        buffers=_buffers(line, job.timeout_s) if part.buffers else {},
    )
    return context, _resources(line, job, keeps=part.keeps), part, records


class _ControlMember:
    """The member context at the remote end of a control connection, which brings a TakePart and then orders."""

    def __init__(self, line: ControlConnection) -> None:
        self.name, self.rank, self.step = line.name, NOBODY, 0
        self._line = line
        self._orders: list[Mapping[str, Any]] = []
        self.send, self.stop_requested = line.send, line.stop_requested
        self.control_fileno = line.control_fileno

    def await_part(self) -> TakePart:
        """Wait for the TakePart as long as the leader lives; the leader itself waits for members only so long.

        A process whose role is already taken stands by until that one dies, and logs so every minute.
        """
        reported_s = time.monotonic()
        while not self._line.stop_requested():
            if time.monotonic() - reported_s >= _STANDS_BY_S:
                reported_s = time.monotonic()
                _log.warning("%s is waiting: %s has no work for it yet", self.name, self._line.leader)
            received = self._line.received()
            if received:
                first, *self._orders = received
                part: TakePart = PARTS.read(first)
                self.rank = part.member
                return part
            select.select([self._line.control_fileno()], [], [], _LOOK_S)
        over = self._line.over
        raise Aborted(
            over.sentence if over is not None else f"the run ended before {self.name} received any work"
        )

    def mark(self, step: int, state: State, waiting_for: int = NOBODY) -> None:
        self.step = step
        self._line.mark(step, state, waiting_for)

    def received(self) -> list[Mapping[str, Any]]:
        orders, self._orders = self._orders, []
        return [*orders, *self._line.received()]

    @property
    def stopping(self) -> bool:
        return self._line.stopping


def _resources(line: ControlConnection, job: Job, *, keeps: bool) -> MemberResources:
    def shared() -> Segment:
        raise AssertionError("members of several hosts read no parameters in place")

    def leave_shard(layout: FlatLayout, shard: int, store: ShardStore) -> None:
        line.give(str(Shipment("final", shard=shard)), final_chunks(layout, shard, store))

    def leave_buffers(state: Mapping[str, Tensor]) -> None:
        line.give(str(BUFFERS), list(encode_tensors(state)))

    return MemberResources(
        job=lambda: job,
        events=lambda: EventRing.attach(os.dup(line.ring.descriptor)),
        shared=shared,
        snapshots=lambda job: _SentSnapshots(line, job, kept=keeps),
        leave_shard=leave_shard,
        leave_buffers=leave_buffers,
    )


def _buffers(line: ControlConnection, timeout_s: float) -> dict[str, Tensor]:
    data = line.take(str(BUFFERS), timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "buffers"
        path.write_bytes(data)
        return dict(read_tensors(path))


class _SentSnapshots(ShardSnapshots):
    """Snapshots that the leader keeps."""

    def __init__(self, line: ControlConnection, job: Job, *, kept: bool) -> None:
        super().__init__(None, job.strategy.servers)
        self._line, self._timeout_s, self.kept = line, job.timeout_s, kept
        self._leaving: dict[int, threading.Event] = {}  # by shard: whether the last one has left

    def save(self, shard: int, snapshot: ShardSnapshot) -> None:
        """Send a snapshot once the previous one has left: each is as large as the shard."""
        before = self._leaving.get(shard)
        if before is not None and not before.wait(self._timeout_s):
            raise PeerTimeout(
                f"{self._line.leader} did not accept a snapshot within {self._timeout_s:.0f} s", peer=0
            )
        left = self._leaving[shard] = threading.Event()
        self._line.give(str(Shipment("snapshot", shard=shard)), _then(pack_snapshot(snapshot), left))

    def load(self, shard: int, version: int | None = None) -> ShardSnapshot | None:
        self._line.send(WANTS.write(SnapshotWanted(shard=shard, version=version)))
        data = self._line.take(str(Shipment("snapshot", shard=shard)), self._timeout_s)
        return unpack_snapshot(data) if data else None


def _then(chunks: Iterable[Any], left: threading.Event) -> Iterator[Any]:
    try:
        yield from chunks
    finally:
        left.set()


class _Records:
    """Where a member's update records go: the run's directory if this host sees it, else a local folder.

    The folder is named after the run and the role, so that the successor of a dead process finds what it wrote.
    """

    def __init__(self, part: TakePart, name: str) -> None:
        received = part.records
        self._is_own = received is None or record_mark(Path(received.run)) != received
        if received is not None and not self._is_own:
            self.path = Path(received.run)
            return
        digest = hashlib.sha256(f"{part.token} {name}".encode()).hexdigest()[:32]
        self.path = Path(tempfile.gettempdir()) / f"manyhands-{digest}"
        (self.path / "updates").mkdir(mode=0o700, parents=True, exist_ok=True)

    def send(self, line: ControlConnection, timeout_s: float) -> None:
        """Send everything written here, by predecessors too, and remove it once the leader has it.

        PeerTimeout if the leader does not take a file in time; Aborted if the run is over, and all files are
        kept.
        """
        if not self._is_own:
            return
        for path in record_files(self.path):
            left, since_s = threading.Event(), time.monotonic()
            line.give(str(Shipment("record", file=path.name)), _then(_chunks(path), left))
            while not left.wait(_LOOK_S):
                if line.over is not None:
                    raise Aborted(line.over.sentence)
                if time.monotonic() - since_s >= timeout_s:
                    raise PeerTimeout(
                        f"{line.leader} did not accept {path.name} within {timeout_s:.0f} s", peer=0
                    )
        line.store.check(["records"])  # the reply follows all that was sent: the leader has it
        self.remove()

    def remove(self) -> None:
        if self._is_own:
            shutil.rmtree(self.path, ignore_errors=True)


def _chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


# ── what members and the launcher send each other as a whole ──────────────────────────────────────────────────────────
# Raw tensors or safetensors, no code. Names are validated here, so that nothing is written outside its place.


@dataclass(frozen=True, slots=True)
class Shipment:
    """An item to send: `final` parameters or a `snapshot` of a shard, a model's `buffers`, a `record` of updates."""

    kind: str
    shard: int = -1
    file: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.shard if self.shard >= 0 else self.file}".strip()

    @classmethod
    def parse(cls, name: str, shards: int) -> Shipment:
        """The shipment of that name; ProtocolError for an invalid name."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ProtocolError("name", f"{name[:80]!r} is not an item that members send")
        kind, shard, buffers, file = match.groups()
        if buffers:
            return BUFFERS
        if file is not None:
            if not is_record(file):
                raise ProtocolError("name", f"{file[:80]!r} is not a record of updates")
            return cls("record", file=file)
        if int(shard) >= shards:
            raise ProtocolError("name", f"{name!r}: there is no such shard of {shards}")
        return cls(kind, shard=int(shard))


BUFFERS: Final = Shipment("buffers")


def final_chunks(layout: FlatLayout, shard: int, store: ShardStore) -> list[Any]:
    """A shard's parameters: its range of the flat layout, and its rows of every table in their order."""
    dense = store.values.memory.clone()
    rows = [
        store.tables[table.name].gather(table.placed(layout.shards).rows(shard)) for table in layout.tables
    ]
    return [dense.numpy(), *(one.contiguous().view(torch.uint8).numpy() for one in rows if one.numel())]


def take_final(layout: FlatLayout, shard: int, data: bytearray, memory: Tensor) -> None:
    """Store what `final_chunks` gave where local children store theirs; ProtocolError for another size."""
    begin, end = layout.bounds[shard]
    tables = final_tables(layout, memory)
    own = {table.name: table.placed(layout.shards).rows(shard) for table in layout.tables}
    sizes = [len(own[name]) * values[:1].nbytes for name, values in tables.items()]
    expected = end - begin + sum(sizes)
    if len(data) != expected:
        raise ProtocolError("bytes", f"shard {shard} has {expected} bytes, but {len(data)} arrived")
    came = torch.from_numpy(np.frombuffer(data, np.uint8))
    memory[begin:end] = came[: end - begin]
    at = end - begin
    for (name, values), size in zip(tables.items(), sizes, strict=True):
        if size:
            rows = came[at : at + size].clone().view(values.dtype)
            values[own[name]] = rows.view(len(own[name]), *values.shape[1:])
        at += size


def pack_snapshot(snapshot: ShardSnapshot) -> list[Any]:
    """A shard at one version, as buffers to be sent in order."""
    core = snapshot.core.encode()
    return [_HEAD.pack(snapshot.version, len(core)), core, *pack_install(snapshot.state, snapshot.held)]


def unpack_snapshot(data: bytearray) -> ShardSnapshot:
    """What `pack_snapshot` packed; ProtocolError for anything else."""
    try:
        version, length = _HEAD.unpack_from(data)
        core = bytes(data[_HEAD.size : _HEAD.size + length]).decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError("payload", f"not a snapshot of a shard: {error}") from error
    state, held = unpack_install(memoryview(data)[_HEAD.size + length :])
    return ShardSnapshot(version=version, state=state, held=held, core=core)
