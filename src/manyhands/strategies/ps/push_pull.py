"""A push-pull as two plain tuples: a push with the read behind it, and the parameters that answer both.

    worker ──PushPull──► the primary of a shard   Push c and Read c+1
           ◄──PushPullAnswer──                           Ack c and Parameters for c+1

They carry the fields of those messages and nothing else: where the case is not the common one, each end converts them
to the messages that its core takes. They are tuples because one is made for every message, and creating a frozen
dataclass takes many times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from manyhands.strategies.ps.actions import SendMessage
from manyhands.strategies.ps.ps_messages import Message, Parameters, Push, Read, Work, WorkKind
from manyhands.transport.messages import ProtocolError

__all__ = ["PushPull", "PushPullAnswer", "in_push_pulls"]

_KINDS = {int(kind): kind for kind in WorkKind}


class PushPull(NamedTuple):
    """A Push with a gradient, and the Read of the next clock, in one message."""

    shard: int
    slot: int
    member: int
    clock: int
    """The clock of the push."""
    read_version: int
    batch: int
    part: int
    parts: int
    weight: float
    read_term: int
    rows_version: int

    @staticmethod
    def of(first: Message, second: Message) -> PushPull | None:
        """The push-pull that two messages to one server form; None if they do not."""
        if not isinstance(first, Push) or not isinstance(second, Read) or first.skip:
            return None
        if (second.shard, second.slot, second.member) != (first.shard, first.slot, first.member):
            return None
        if second.clock != first.clock + 1:
            return None
        return PushPull(
            first.shard,
            first.slot,
            first.member,
            first.clock,
            first.read_version,
            first.batch,
            first.part,
            first.parts,
            first.weight,
            first.read_term,
            first.rows_version,
        )

    @property
    def push(self) -> Push:
        """The Push in it."""
        return Push(
            shard=self.shard,
            slot=self.slot,
            member=self.member,
            clock=self.clock,
            read_version=self.read_version,
            batch=self.batch,
            part=self.part,
            parts=self.parts,
            weight=self.weight,
            read_term=self.read_term,
            rows_version=self.rows_version,
        )

    @property
    def read(self) -> Read:
        """The Read in it."""
        return Read(shard=self.shard, slot=self.slot, member=self.member, clock=self.clock + 1)


class PushPullAnswer(NamedTuple):
    """The Parameters that answer a push-pull, whose push is durable."""

    shard: int
    slot: int
    clock: int
    """The clock that was read for."""
    version: int
    term: int
    waited_for: int
    kind: int
    """The kind of its Work; the following fields are of the Work, too."""
    work_clock: int
    batch: int
    part: int
    parts: int

    @staticmethod
    def of(parameters: Parameters) -> PushPullAnswer:
        """The same message as a flat tuple."""
        work = parameters.work
        return PushPullAnswer(
            parameters.shard,
            parameters.slot,
            parameters.clock,
            parameters.version,
            parameters.term,
            parameters.waited_for,
            int(work.kind),
            work.clock,
            work.batch,
            work.part,
            work.parts,
        )

    @property
    def parameters(self) -> Parameters:
        """The Parameters message; ProtocolError for an unknown kind of work."""
        kind = _KINDS.get(self.kind)
        if kind is None:
            raise ProtocolError("PushPullAnswer.kind", f"{self.kind} is no WorkKind")
        work = Work(kind=kind, clock=self.work_clock, batch=self.batch, part=self.part, parts=self.parts)
        return Parameters(
            shard=self.shard,
            slot=self.slot,
            clock=self.clock,
            version=self.version,
            work=work,
            term=self.term,
            waited_for=self.waited_for,
        )


def in_push_pulls(actions: Sequence[Any]) -> Iterator[tuple[Any, PushPull | None]]:
    """Each of a worker's actions, with a push and the read behind it joined into a push-pull.

    A push-pull is yielded with the action that sends its push.
    """
    index, count = 0, len(actions)
    while index < count:
        action, turn = actions[index], None
        index += 1
        if index < count and isinstance(action, SendMessage):
            following = actions[index]
            if isinstance(following, SendMessage) and following.to == action.to:
                turn = PushPull.of(action.message, following.message)
        yield action, turn
        index += turn is not None
