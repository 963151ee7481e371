"""What a member of a run on parameter servers asks of its host, by name; how it gets there is its starter's matter."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands.data.store.tensorfile import encode_tensors
from manyhands.native.segment import Segment
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.local.context import RoleContext
from manyhands.places.local.packed_job import load
from manyhands.places.local.status import NOBODY, State
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.server_tables import final_bytes, leave_tables
from manyhands.strategies.ps.live.snapshots import ShardSnapshot, ShardSnapshots
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import ShardStore

__all__ = ["MemberContext", "MemberResources", "Snapshots"]


class MemberContext(Protocol):
    """A member's way to the launcher: a child's inherited channel, or a line from another host."""

    name: str
    rank: int
    """Its number among the members."""

    step: int

    def send(self, payload: Mapping[str, Any]) -> None:
        """Tell the launcher something, as JSON, in order."""

    def mark(self, step: int, state: State, waiting_for: int = NOBODY) -> None:
        """Show what this member is doing."""

    def received(self) -> list[Mapping[str, Any]]:
        """What the launcher said since the last call; does not wait."""

    def stop_requested(self) -> bool:
        """Whether the launcher asked to leave, or is gone."""

    @property
    def stopping(self) -> bool:
        """The same of what was read so far."""

    def control_fileno(self) -> int:
        """A descriptor that is readable when the launcher said something."""


class Snapshots(Protocol):
    """Where a server's shards are kept while the run goes on."""

    @property
    def kept(self) -> bool:
        """Whether there is such a place."""

    def save(self, shard: int, snapshot: ShardSnapshot) -> None:
        """Keep one; a WriteFailed leaves the older ones as they are."""

    def load(self, shard: int, version: int | None = None) -> ShardSnapshot | None:
        """The newest good one, or that of `version`; None where there is none."""


@dataclass(frozen=True, kw_only=True)
class MemberResources:
    """One member's; whoever asks for the ring or the memory closes it."""

    job: Callable[[], Job]
    """What all members are told."""

    events: Callable[[], EventRing]
    """Where it records what it does."""

    shared: Callable[[], Segment]
    """The memory that all members of a host read parameters in, where they do so: under lockstep, on one host."""

    snapshots: Callable[[Job], Snapshots]
    """Where its shards are kept. A server's alone."""

    leave_shard: Callable[[FlatLayout, int, ShardStore], None]
    """Hand over the parameters of a shard as the run ends. A server's alone."""

    leave_buffers: Callable[[Mapping[str, Tensor]], None]
    """Hand over the model's buffers as the run ends; the last who does wins. A worker's alone."""

    @classmethod
    def inherited(cls, context: RoleContext) -> MemberResources:
        """Of a child of the launcher: by the descriptors that it was started with."""

        def final() -> Segment:
            return Segment.attach(os.dup(context.descriptor("final")))

        def leave_shard(layout: FlatLayout, shard: int, store: ShardStore) -> None:
            with final() as segment:
                memory = segment.tensor(0, final_bytes(layout), torch.uint8)
                begin, end = layout.bounds[shard]
                store.read_into(memory[begin:end])
                leave_tables(layout, shard, store, memory)
                del memory

        def leave_buffers(state: Mapping[str, Tensor]) -> None:
            with open(f"/proc/self/fd/{context.descriptor('buffers')}", "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # or those of two who finish at once would be mixed
                file.truncate()
                for chunk in encode_tensors(state):
                    file.write(chunk)

        return cls(
            job=lambda: load(context.descriptor("job")),
            events=lambda: EventRing.attach(context.descriptor("events")),
            shared=final,
            snapshots=lambda job: ShardSnapshots(job.run_path, job.strategy.servers, job.keep_checkpoints),
            leave_shard=leave_shard,
            leave_buffers=leave_buffers,
        )
