"""An elastic run among externally started processes, on any hosts: the leader's members, and one such process.

    leader                                             process of rank 2
      Started(rank 2)      start(member=5, slot=2) ──►   TakeSlot(member=5, slot=2)
      kill -9              Ended(member=5)
      start(member=8, slot=2)      … waits
      Started(rank 2)      ───────────────────────────►  TakeSlot(member=8, slot=2)      started again, by anybody

The slot of a worker is its rank. The leader's own, slot 0, is a child of the leader: a worker that is lost must not
take with it who leads. What a child would leave in the leader's memory or directory, others send: weights at the end,
and the checkpoints that are due while the lowest worker is elsewhere.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.checkpoint import CheckpointStore, Loaded, Snapshot
from manyhands.data.store.portable import pack_tree, unpack_tree
from manyhands.data.store.tensorfile import encode_tensors
from manyhands.errors import Aborted, ManyhandsError
from manyhands.native.threads import with_threads
from manyhands.places.external.control_connection import ControlConnection
from manyhands.places.external.control_server import ControlEvent, Delivered, ProcessRejected, Warned
from manyhands.places.external.process_group import GroupMember, ProcessGroup
from manyhands.places.local.host import host_identity, threads_per_role
from manyhands.places.local.notes import TypedNotes
from manyhands.places.local.supervisor import Ended, Event, Hung, Said, Started
from manyhands.strategies.allreduce.elastic.elastic_members import LocalElasticMembers
from manyhands.strategies.allreduce.elastic.elastic_messages import EpochView
from manyhands.strategies.allreduce.elastic.linked import LinkedEpochs, Wiring
from manyhands.strategies.allreduce.elastic.member_process import ElasticJob, ElasticPart, train
from manyhands.strategies.allreduce.elastic.state import write_file

__all__ = ["ElasticKeeper", "ExternalElasticMembers", "TakeSlot", "take_slot", "wiring_of"]

_LOOK_S: Final = 0.02
_WAIT_S: Final = 0.5
_THIS_HOST: Final = "127.0.0.1"
_START, _WEIGHTS, _CHECKPOINT = "start", "weights", "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSlot:
    """The leader tells a process which member it is, with the settings that only the leader knows."""

    member: int
    slot: int
    threads: int
    resumes: bool
    """Whether the checkpoint that the run begins with follows."""

    checkpoints: str | None
    """The leader's checkpoint folder, if the run keeps one; only the leader can write there."""


PARTS: Final = TypedNotes(TakeSlot)


def wiring_of(party: ProcessGroup | GroupMember) -> Wiring:
    """Return how other members reach a process of this run."""
    return Wiring(address=party.address or _THIS_HOST, token=party.token, security=party.security)


# ── the leader ────────────────────────────────────────────────────────────────────────────────────────────────────────


class ElasticKeeper:
    """Stores what remote members send to the leader, where its own child would leave it."""

    def __init__(self, weights: int, checkpoints: CheckpointStore | None, say: Callable[[str], None]) -> None:
        self.checkpoints = checkpoints
        self._weights, self._say = weights, say

    def take(self, name: str, data: bytearray) -> None:
        """Store what was sent; a full disk loses it, but does not fail the run."""
        if name == _WEIGHTS:
            write_file(self._weights, [bytes(data)])
        elif name == _CHECKPOINT and self.checkpoints is not None:
            tree = unpack_tree(data)
            try:
                self.checkpoints.save(
                    Snapshot(**{**tree, "may_hold_infinity": frozenset(tree["may_hold_infinity"])})
                )
            except WriteFailed as error:
                self._say(str(error))
        else:
            raise ManyhandsError(f"{name[:80]!r} is nothing that a worker sends")


class ExternalElasticMembers:
    """Externally started members over control connections, and the leader's child; see `ElasticMembers`."""

    def __init__(
        self,
        process_group: ProcessGroup,
        child: LocalElasticMembers,
        keeper: ElasticKeeper,
        start: Loaded | None,
        say: Callable[[str], None],
    ) -> None:
        self._control_server, self._child, self._keeper, self._say = (
            process_group.control_server,
            child,
            keeper,
            say,
        )
        self._start: Mapping[str, Any] | None = None
        if start is not None:
            self._start = {
                "step": start.step,
                "model": start.model,
                "optimizer": start.optimizer,
                "extra": start.extra,
            }
        self._wanted: dict[int, int] = {}  # by rank: the member assigned to it
        self._at: dict[int, int] = {}  # by member: its rank
        self._untold: list[Event | Hung] = []

    def __enter__(self) -> Self:
        self._child.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the child; the control server notifies the connected processes."""
        self._child.__exit__()

    @property
    def members(self) -> tuple[int, ...]:
        """The members that are connected; one that is still awaited is not among them."""
        return (*self._at, *self._child.members)

    def start(self, member: int, slot: int) -> str:
        """Request a member; the process of that rank gets its slot once it is connected."""
        if slot == 0:
            return self._child.start(member, slot)
        self._wanted[slot] = member
        if slot in self._control_server.members:
            self._give_part(slot)
        return f"worker {slot}"

    def begin(self, view: EpochView) -> None:
        """Nothing is sent besides the view; from here on new members get their state from a donor."""
        del view
        self._start = None

    def abort(self) -> None:
        """Nothing to do here: each member ends its waits when it is told to leave."""

    def poll(self, timeout_s: float) -> Sequence[Event | Hung]:
        """Return what happened to the members."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._untold += self._child.poll(0.0)
            for event in self._control_server.poll(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
                self._untold += self._hear(event)
            if self._untold or time.monotonic() >= deadline:
                untold, self._untold = self._untold, []
                return untold

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send over the control connection or the child's channel; does nothing if the member is not connected."""
        if member in self._at:
            self._control_server.tell(self._at[member], payload)
        elif member in self._child.members:
            self._child.tell(member, payload)

    def kill(self, member: int) -> None:
        """Stop listening to a member and tell it so; one that is not connected is no longer awaited."""
        if member in self._at:
            self._control_server.dismiss(self._at[member], "the run goes on without it, or is over")
        elif member in self._child.members:
            self._child.kill(member)
        self._wanted = {rank: wanted for rank, wanted in self._wanted.items() if wanted != member}

    def _give_part(self, rank: int) -> None:
        member = self._wanted.pop(rank, None)
        if member is None:
            return  # it stands by until the end of the one before it is told
        self._at[member] = rank
        kept = self._keeper.checkpoints
        part = TakeSlot(
            member=member,
            slot=rank,
            threads=threads_per_role(self._workers_beside(rank)),
            resumes=self._start is not None,
            checkpoints=str(kept.folder) if kept is not None else None,
        )
        self._control_server.tell(rank, PARTS.write(part))
        if self._start is not None:
            self._control_server.give(rank, _START, pack_tree(self._start))
        self._untold.append(Started(member, self._control_server.line(rank).pid))

    def _workers_beside(self, rank: int) -> int:
        """Return the number of workers on its host, itself included."""
        host = self._control_server.host_of(rank)
        others = sum(self._control_server.host_of(other) == host for other in self._control_server.members)
        return others + (host == host_identity())

    def _hear(self, event: ControlEvent) -> list[Event | Hung]:
        match event:
            case Started(member=rank):
                self._give_part(rank)
            case Said(member=rank, payload=payload):
                return [Said(member, payload) for member, at in self._at.items() if at == rank]
            case Delivered(member=rank, name=name, data=data):
                self._take(rank, name, data)
            case Ended(member=rank):
                return self._end(rank, event)
            case ProcessRejected(sentence=sentence) | Warned(sentence=sentence):
                self._say(sentence)
        return []

    def _take(self, rank: int, name: str, data: bytearray) -> None:
        try:
            self._keeper.take(name, data)
        except (ManyhandsError, KeyError, TypeError) as error:
            self._control_server.dismiss(rank, f"it sent what nobody may send: {error}")

    def _end(self, rank: int, ended: Ended) -> list[Event | Hung]:
        member = next((member for member, at in self._at.items() if at == rank), None)
        if member is None:
            return []  # it had no part yet: another may come in its place
        del self._at[member]
        failure = ended.failure
        told = replace(ended, member=member)
        return [replace(told, failure=replace(failure, rank=member)) if failure is not None else told]


# ── a process that it leads ───────────────────────────────────────────────────────────────────────────────────────────


def take_slot(party: GroupMember, job: ElasticJob) -> Mapping[str, Any]:
    """Be the worker that the leader assigns, to the end, and return its report. Aborted if the run ended before.

    `job` has the settings of this process, without those that only the leader knows.
    """
    line = party.line
    part, early = _await_part(line)
    start = Loaded.of(unpack_tree(line.take(_START, job.timeout_s))) if part.resumes else None
    mine = ElasticPart(
        context=line,
        member=part.member,
        slot=part.slot,
        ring=line.ring,
        checkpoints=_SentCheckpoints(line, Path(part.checkpoints)) if part.checkpoints is not None else None,
        leave_weights=lambda weights: line.give(_WEIGHTS, _copied(encode_tensors(weights))),
        resume=lambda: start,
        early=early,
    )
    try:
        with with_threads(part.threads):
            return train(job, mine, LinkedEpochs(wiring_of(party), job.timeout_s))
    except Aborted:
        if line.over is not None:  # it knows more than that this one was to stop
            raise Aborted(line.over.sentence) from None
        raise


def _await_part(line: ControlConnection) -> tuple[TakeSlot, Sequence[Mapping[str, Any]]]:
    """Wait for `TakeSlot` as long as the leader lives; return it with later messages of the leader."""
    while not line.stop_requested():
        if told := line.received():
            part: TakeSlot = PARTS.read(told[0])
            return part, told[1:]
        select.select([line.control_fileno()], [], [], _WAIT_S)
    over = line.over
    raise Aborted(over.sentence if over is not None else f"the run ended before {line.name} had a part in it")


class _SentCheckpoints(CheckpointStore):
    """Checkpoints that are sent to the leader, which stores them in its folder."""

    def __init__(self, line: ControlConnection, folder: Path) -> None:
        super().__init__(folder)
        self._line = line

    def save(self, snapshot: Snapshot, spare_from: int | None = None) -> Path:
        """Send a checkpoint and return the path it will have; the leader reports what goes wrong in writing it."""
        del spare_from
        tree = {
            "step": snapshot.step,
            "model": dict(snapshot.model),
            "optimizer": dict(snapshot.optimizer),
            "extra": dict(snapshot.extra),
            "score": snapshot.score,
            "may_hold_infinity": sorted(snapshot.may_hold_infinity),
        }
        self._line.give(_CHECKPOINT, _copied(pack_tree(tree)))
        return self.path_of(snapshot.step)


def _copied(chunks: Iterator[Any]) -> list[bytes]:
    """Yield copied chunks: they are sent while the tensors behind them may change."""
    return [bytes(chunk) for chunk in chunks]
