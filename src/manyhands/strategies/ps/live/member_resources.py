"""The resources that a member of a parameter-server run needs from its host; the code that starts it provides them."""

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
from manyhands.places.local.control import RoleContext
from manyhands.places.local.packed_job import load
from manyhands.places.local.status import NOBODY, State
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.server_tables import final_bytes, leave_tables
from manyhands.strategies.ps.live.snapshots import ShardSnapshot, ShardSnapshots
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import ShardStore

__all__ = ["MemberContext", "MemberResources", "Snapshots"]


class MemberContext(Protocol):
    """A member's connection to the launcher: a child's inherited channel, or a control connection from another host."""

    name: str
    rank: int  # the member number
    step: int

    def send(self, payload: Mapping[str, Any]) -> None:
        """Send a report to the launcher, as JSON, in order."""

    def mark(self, step: int, state: State, waiting_for: int = NOBODY) -> None:
        """Update this member's row in the status table."""

    def received(self) -> list[Mapping[str, Any]]:
        """The launcher's messages since the last call; does not block."""

    def stop_requested(self) -> bool:
        """Whether the launcher asked this member to stop, or is gone; reads the channel."""

    @property
    def stopping(self) -> bool:
        """Like `stop_requested`, from what was read so far."""

    def control_fileno(self) -> int:
        """A descriptor that is readable when the launcher has sent something."""


class Snapshots(Protocol):
    """Where a server's shards are saved during the run."""

    @property
    def kept(self) -> bool:
        """Whether snapshots are saved at all."""

    def save(self, shard: int, snapshot: ShardSnapshot) -> None:
        """Save one; a WriteFailed leaves the older ones as they are."""

    def load(self, shard: int, version: int | None = None) -> ShardSnapshot | None:
        """The newest good one, or that of `version`; None if there is none."""


@dataclass(frozen=True, kw_only=True)
class MemberResources:
    """The resources of one member; the caller closes the ring and the memory that it obtains."""

    job: Callable[[], Job]  # the job description, common to all members
    events: Callable[[], EventRing]  # the member's event ring
    shared: Callable[[], Segment]
    """The memory in which all members of a host read parameters; used under lockstep on one host only."""

    snapshots: Callable[[Job], Snapshots]  # where its shards are saved; servers only
    leave_shard: Callable[[FlatLayout, int, ShardStore], None]
    """Hand over the parameters of a shard as the run ends; servers only."""

    leave_buffers: Callable[[Mapping[str, Tensor]], None]
    """Hand over the model's buffers as the run ends; workers only, and the last one wins."""

    @classmethod
    def inherited(cls, context: RoleContext) -> MemberResources:
        """The resources of a child of the launcher: the descriptors that it inherited."""

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
                fcntl.flock(file, fcntl.LOCK_EX)  # else two workers' writes could mix
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
