"""The processes of an elastic run as its launcher sees them: children, or externally started on any hosts.

The slot of an externally started worker is its rank. The leader's own, slot 0, is a child of the leader: a worker
that is lost must not take with it who leads. What a child would leave in the leader's memory or directory, others
send: weights at the end, and the checkpoints that are due while the lowest worker is elsewhere.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.checkpoint import CheckpointStore, Loaded, Snapshot
from manyhands.data.store.state_tree import pack_tree, unpack_tree
from manyhands.engine.computing import worker_environment
from manyhands.errors import ManyhandsError
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.external.process_group import ProcessGroup
from manyhands.places.local.host import host_identity, threads_per_role
from manyhands.places.local.supervisor import Ended, Event, Hung
from manyhands.places.local.watchdog import Watched
from manyhands.strategies.allreduce.elastic.elastic_membership import EpochView
from manyhands.strategies.allreduce.elastic.epochs import EpochFiles, send_files, write_file
from manyhands.strategies.allreduce.elastic.member_process import (
    CHECKPOINT,
    PARTS,
    START,
    WEIGHTS,
    ElasticJob,
    TakeSlot,
    work,
)
from manyhands.strategies.common.run_launcher import ChildMembers, ExternalMembers, MemberProcesses

__all__ = ["ElasticMembers", "ExternalElasticMembers", "LocalElasticMembers"]


class ElasticMembers(MemberProcesses, Protocol):
    """The members of a run, wherever they run."""

    def begin(
        self, view: EpochView
    ) -> None: ...  # give its members its resources, before the view is announced
    def abort(self) -> None: ...  # end every wait in the newest epoch; its members are notified separately


class LocalElasticMembers(ChildMembers):
    """Children of this process, which share memory; a context manager.

    `rings` has one ring for each possible slot; `weights` is where the final weights are left.
    """

    def __init__(
        self, job: ElasticJob, rings: Sequence[EventRing], weights: int, num_members: int, watched: Watched
    ) -> None:
        super().__init__(job, num_members, watched)
        self._rings, self.weights = rings, weights
        self._connections: dict[int, socket.socket] = {}
        self._files: EpochFiles | None = None

    def close(self) -> None:
        try:
            super().close()
        finally:
            for connection in self._connections.values():
                connection.close()
            if self._files is not None:
                self._files.close()

    def start_worker(self, member: int, slot: int) -> str:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = {"events": self._rings[slot].descriptor, "weights": self.weights, "files": theirs.fileno()}
        env = worker_environment(self._job.plan, self._job.threads)
        with theirs:
            self._connections[member] = ours
            return self.start_child(member, f"worker {slot}", partial(work, slot=slot), files, env)

    def begin(self, view: EpochView) -> None:
        if self._files is not None:
            self._files.close()
        self._files = EpochFiles(len(view.seats), self._job.strategy, with_state=view.has_fresh)
        for rank, seat in enumerate(view.seats):
            connection = self._connections.get(seat.member)
            try:
                if connection is not None:
                    send_files(connection, view.epoch, self._files.of(rank))
            except OSError:  # it is dead or not reading: either way it does not enter this epoch
                self.kill(seat.member)
        self._files.passed.close()

    def abort(self) -> None:
        assert self._files is not None, "an epoch that is ended was begun"
        self._files.group.abort()

    def poll(self, timeout_s: float) -> list[Event | Hung]:
        events = super().poll(timeout_s)
        for event in events:
            if isinstance(event, Ended):
                self._connections.pop(event.member).close()
        return events


class ExternalElasticMembers(ExternalMembers):
    """Externally started members over control connections, and the leader's child; see `ElasticMembers`."""

    def __init__(
        self,
        process_group: ProcessGroup,
        child: LocalElasticMembers,
        checkpoints: CheckpointStore | None,
        start: Loaded | None,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(process_group.control_server, child, say)
        self._local, self._checkpoints = child, checkpoints
        names = ("step", "model", "optimizer", "extra")
        self._start = {name: getattr(start, name) for name in names} if start is not None else None

    def start_worker(self, member: int, slot: int) -> str:
        if slot == 0:
            return self._local.start_worker(member, slot)
        self._want(slot, member)
        return self._name(slot)

    def begin(self, view: EpochView) -> None:
        del view
        self._start = None

    def abort(self) -> None:
        """Nothing to do here: each member ends its waits when it is told to leave."""

    def _name(self, rank: int) -> str:
        return f"worker {rank}"

    def _give_part(self, rank: int, member: int) -> None:
        kept, control_server = self._checkpoints, self._control_server
        host = control_server.host_of(rank)
        workers = sum(control_server.host_of(other) == host for other in control_server.members)
        part = TakeSlot(
            member=member,
            slot=rank,
            threads=threads_per_role(workers + (host == host_identity())),
            resumes=self._start is not None,
            checkpoints=str(kept.folder) if kept is not None else None,
        )
        control_server.tell(rank, PARTS.write(part))
        if self._start is not None:
            control_server.give(rank, START, pack_tree(self._start))

    def _receive(self, rank: int, name: str, data: bytearray) -> None:
        """Store what a member sent where a child would leave it; a full disk loses it, but does not fail the run."""
        try:
            if name == WEIGHTS:
                write_file(self._local.weights, [bytes(data)])
            elif name == CHECKPOINT and self._checkpoints is not None:
                tree = unpack_tree(data)
                infinite = frozenset(tree.pop("may_hold_infinity"))
                self._checkpoints.save(Snapshot(**tree, may_hold_infinity=infinite))
            else:
                raise ManyhandsError(f"{name[:80]!r} is nothing that a worker sends")
        except WriteFailed as error:
            self._say(str(error))
        except (ManyhandsError, KeyError, TypeError) as error:
            self._refuse(rank, error)
