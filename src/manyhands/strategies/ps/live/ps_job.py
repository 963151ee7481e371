"""The job of a parameter-server run, common to all its processes, and what each of them gets from its host."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from manyhands.data.store.tensorfile import encode_tensors
from manyhands.engine.computing import Built, Computer, TrainingPlan
from manyhands.native.segment import Segment
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.local.control import RoleContext
from manyhands.places.local.packed_job import load
from manyhands.places.local.status import NOBODY, State
from manyhands.strategies.common.tables.row_filters import require_filters
from manyhands.strategies.ps import host_group, ps_messages
from manyhands.strategies.ps.live.area import SharedParameters
from manyhands.strategies.ps.live.server_tables import final_bytes, leave_tables
from manyhands.strategies.ps.live.snapshots import ShardSnapshots
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import Averaging, ShardStore
from manyhands.strategies.ps.strategy import Ps
from manyhands.transport.hub.handshake import Credentials
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import Settings, spin_for
from manyhands.transport.liveness import LivenessTimes
from manyhands.transport.messages import MessageCoder
from manyhands.transport.security import Security

CODEC = MessageCoder(
    {
        1: ps_messages.Hello,
        2: ps_messages.Welcome,
        3: ps_messages.Read,
        4: ps_messages.Parameters,
        5: ps_messages.Push,
        6: ps_messages.HostPush,
        7: ps_messages.Refused,
        8: ps_messages.Fenced,
        9: ps_messages.NotPrimary,
        10: ps_messages.Chosen,
        11: ps_messages.ChosenKept,
        12: ps_messages.Forward,
        13: ps_messages.Forwarded,
        14: ps_messages.Install,
        15: ps_messages.Yield,
        16: ps_messages.ReadRows,
        17: ps_messages.RowValues,
        18: ps_messages.RowsUnknown,
        19: ps_messages.CopyShard,
        20: ps_messages.SendAlone,
        21: host_group.Expects,
        22: host_group.Offer,
        23: host_group.SumSent,
        24: host_group.Alone,
        25: host_group.Fetched,
        26: ps_messages.ValuesAhead,
    }
)

AHEAD_BYTES = 512 << 10  # parameters are sent ahead in parts of at least this size
UNSENT_BYTES = 512 << 10  # of a push, what the kernel still has to send when the next one may begin


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, as all its processes know it; packed once by the launcher and read by its children only."""

    plan: TrainingPlan
    strategy: Ps
    fingerprint: str  # the task's fingerprint; processes of another task are rejected
    workers: int  # the number of slots at the start
    timeout_s: float
    threads: int = 1
    token: str = field(default_factory=lambda: os.urandom(32).hex())  # a secret that all processes share
    run_path: Path | None = None
    keep_checkpoints: int = 1
    resume_version: int | None = None  # resume from the shards' snapshots of this version
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """The initial buffers of workers' models, by name, when the run resumes."""
    skip_nonfinite: bool = False  # skip an update whose gradient is not finite, instead of ending the run
    security: Security = field(default_factory=Security.loopback)  # what protects connections to other hosts
    listens_at: str = ""  # where a server listens, as the hub writes it; empty: wherever its link allows
    reached_at: str = ""  # the address at which others reach it, if different
    by_host: bool = False  # whether workers of one host push as one, and fetch as one, where that is right
    taps: ClassVar[bool] = True  # whether a worker takes each gradient as soon as backward has it

    @property
    def confirms(self) -> bool:
        """Whether a push counts only once its worker has confirmed that every shard has it."""
        return self.shard_config().confirms

    @property
    def adds_up(self) -> bool:
        """Whether workers of one host form a group."""
        return self.by_host and self.strategy.adds_up and not self.plan.task.sparse

    @property
    def answers_ahead(self) -> bool:
        """Whether servers may send parameters of a step whose gradients are still arriving."""
        return self.strategy.link == "tcp" and self.strategy.adds_up and not self.plan.task.sparse

    @property
    def orders_pushes(self) -> bool:
        """Whether pushes leave one after another: over a cable, where each is answered without all others."""
        return self.by_host and self.strategy.link == "tcp" and not self.strategy.consistency.lockstep

    @property
    def gate(self) -> str:
        """The name of the run's gate among processes of one host, which nobody else can guess."""
        return f"manyhands-{hashlib.sha256(b'gate' + self.token.encode()).hexdigest()[:32]}"

    @property
    def averaging(self) -> Averaging | None:
        """How shards average pushed parameters; None if gradients are pushed."""
        if not self.strategy.averages:
            return None
        return Averaging(workers=self.workers, together=self.strategy.consistency.stepwise)

    def shared_parameters(self, final: Callable[[], Segment], layout: FlatLayout) -> SharedParameters | None:
        """The copy of the parameters that all processes share, in the memory that `final` gives, if workers read there.

        They do where no shard steps before every worker has pushed, so that nobody reads values that are changing;
        not if workers step their parameters locally.
        """
        return SharedParameters(final(), layout) if self.strategy.reads_in_place else None

    def hub(self, member: int, role: str, **options: Any) -> Hub:
        credentials = Credentials(
            member=member, role=role, token=self.token.encode(), fingerprint=self.fingerprint
        )
        # The launcher decides liveness, since it sees the processes; links only detect cut connections.
        settings = Settings(
            liveness=LivenessTimes(silence_s=self.timeout_s),
            spin_s=spin_for(self.workers + self.strategy.num_server_processes),
            queue_bytes=1 << 34,
            connect_s=self.timeout_s,
            security=self.security,
            progress_bytes=AHEAD_BYTES if role == "server" and self.answers_ahead else 0,
            unsent_bytes=UNSENT_BYTES if role == "worker" and self.orders_pushes else 0,
        )
        return Hub(credentials, CODEC, settings=settings, **options)

    def shard_config(self, shard: int = 0) -> ShardConfig:
        return ShardConfig(
            shard=shard,
            num_shards=self.strategy.servers,
            policy=self.strategy.consistency,
            steps=self.plan.steps,
            slots=tuple(range(self.workers)),
        )

    def build(self, worker_rank: int = 0) -> tuple[Computer, Built, FlatLayout]:
        """Build the model before the first step and its layout; equal in every process."""
        computer = Computer(self.plan, worker_rank)
        built = computer.build()
        strategy, sparse = self.strategy, self.plan.task.sparse
        layout = FlatLayout.of(
            built.model, built.optimizer, strategy.servers, sparse, strategy.facts.stepping
        )
        tables = [(table.name, table.position) for table in layout.tables]
        require_filters(strategy.filter, built.optimizer, tables)
        return computer, built, layout


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


@dataclass(frozen=True, kw_only=True)
class MemberResources:
    """The resources of one member; the caller closes the ring and the memory that it obtains."""

    job: Callable[[], Job]  # the job description, common to all members
    events: Callable[[], EventRing]  # the member's event ring
    shared: Callable[[], Segment]
    """The memory in which all members of a host read parameters; used under lockstep on one host only."""
    snapshots: Callable[[Job], ShardSnapshots]  # where its shards are saved; servers only
    leave_shard: Callable[[FlatLayout, int, ShardStore], None]  # hand over a shard at the end; servers only
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
