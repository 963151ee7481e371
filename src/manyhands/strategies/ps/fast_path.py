"""The fast path for the common push-pull of a worker at a shard, without the messages, entries and actions in
between.

Most push-pulls are alike: the worker holds its slot, its update is the next of that slot, no other worker is
waited for, there is no backup to ask, and the update is an optimizer step by itself. `look` recognises such a
push-pull; `commit` and `answer` then leave the shard in the state in which its push and its read, handled one
after the other, would have left it, and return what their actions say. For every other push-pull they change
nothing and return None, and the shard's `handle` decides. A test compares the two.

Pure, like the code it replaces. It accesses the private fields of `ShardReplica`, `ShardCore` and `Steps` as one
of their methods would.
"""

from __future__ import annotations

from typing import NamedTuple

from manyhands.strategies.ps.actions import Apply, Keep, Log, SendMessage, UpdateFactor
from manyhands.strategies.ps.log_rows import StepRow, UpdateRow
from manyhands.strategies.ps.ps_messages import Ack, Outcome, ReadRows, RowValues, WorkKind
from manyhands.strategies.ps.push_pull import PushPull, PushPullAnswer
from manyhands.strategies.ps.shard_core import Hold
from manyhands.strategies.ps.shard_replica import ReplicaRole, ShardReplica
from manyhands.strategies.ps.slots import SlotRecord

__all__ = ["LaneStep", "ShardLane"]

_PRIMARY, _TRAIN, _TRAINS = ReplicaRole.PRIMARY, WorkKind.TRAIN, int(WorkKind.TRAIN)

_LINE = (
    '{"row":"step","shard":%d,"term":%d,"sequence":%d,"version":%d,"rate":%r,"updates":[{"slot":%d,"clock":%d,'
    '"batch":%d,"part":%d,"parts":%d,"member":%d,"read_version":%d,"staleness":%d,"weight":%r,"factor":1.0,'
    '"read_term":%d,"rows_version":%d}]}'
)


class LaneStep(NamedTuple):
    """The optimizer step of one push-pull; its gradient has the factor 1."""

    turn: PushPull
    record: SlotRecord
    staleness: int
    rate: float
    """The factor on the learning rate."""
    term: int
    sequence: int
    version: int
    """The shard's version after the step."""

    @property
    def row(self) -> StepRow:
        """The step's row of the log."""
        turn = self.turn
        update = UpdateRow(
            slot=turn.slot,
            clock=turn.clock,
            batch=turn.batch,
            part=turn.part,
            parts=turn.parts,
            member=turn.member,
            read_version=turn.read_version,
            staleness=self.staleness,
            weight=turn.weight,
            factor=1.0,
            read_term=turn.read_term,
            rows_version=turn.rows_version,
        )
        return StepRow(
            shard=turn.shard,
            term=self.term,
            sequence=self.sequence,
            version=self.version,
            rate=self.rate,
            updates=(update,),
        )

    @property
    def line(self) -> str:
        """The row as `row_to_json` writes it, in a tenth of the time."""
        turn = self.turn
        return _LINE % (
            turn.shard,
            self.term,
            self.sequence,
            self.version,
            self.rate,
            turn.slot,
            turn.clock,
            turn.batch,
            turn.part,
            turn.parts,
            turn.member,
            turn.read_version,
            self.staleness,
            turn.weight,
            turn.read_term,
            turn.rows_version,
        )

    @property
    def actions(self) -> tuple[Keep, Apply, Log, SendMessage]:
        """The actions that `handle` would have returned for the push."""
        turn = self.turn
        name = {"shard": turn.shard, "slot": turn.slot, "clock": turn.clock}
        factor = UpdateFactor(slot=turn.slot, clock=turn.clock, factor=1.0)
        return (
            Keep(**name, copy=False),
            Apply(
                shard=turn.shard,
                contributions=(factor,),
                rate=self.rate,
                batches=(turn.batch,),
                version=self.version,
            ),
            Log(row=self.row),
            SendMessage(to=turn.member, message=Ack(**name, outcome=Outcome.APPLIED)),
        )


class ShardLane:
    """The fast path of one server's replica of one shard."""

    def __init__(self, replica: ShardReplica) -> None:
        self._replica = replica
        config, policy = replica.config, replica.config.policy
        self._rate, self._by_clock, self._leads = policy.rate, policy.by_clock, config.leads
        self._in_turn = config.leads and not policy.by_clock
        self._stepwise, self._steps = policy.stepwise, config.steps
        by_itself = policy.each_alone or (policy.stepwise and policy.lockstep)
        self._serves = by_itself and not policy.outlives_read and not config.confirms

    def look(self, turn: PushPull) -> LaneStep | None:
        """What `commit` would do with this push-pull, or None if it is not the common case; changes nothing."""
        replica = self._replica
        slot, clock = turn.slot, turn.clock
        core = replica.core
        steps, table = core.steps, core.table
        record = table.records.get(slot)
        if (
            not self._serves
            or record is None
            or record.next_clock != clock
            or replica._holders.get(slot) != turn.member
            or replica.role is not _PRIMARY
            or replica._unconfirmed.newest(slot) != turn.member
            or clock >= record.end
            or turn.parts != 1
            or not 0 < turn.weight <= 1
            or slot in replica._held
            or replica._backup
            or replica._in_flight
            or replica._taken
            or replica._hellos
            or replica._view.gone
            or core.awaiting
            or steps._waiting
            or steps._free
            or any(replica._waiting_for.values())
        ):
            return None
        if self._by_clock and core._place(slot, clock).kind is not _TRAIN:
            return None
        if self._stepwise and (
            steps.step != clock or steps._arrived or table.generation_at(clock).slots != (slot,)
        ):
            return None
        version = steps.version
        read_version = steps.included(turn.read_version, turn.read_term) if steps.lives else turn.read_version
        staleness = version - read_version
        return LaneStep(
            turn, record, staleness, self._rate(staleness), core.term, core.sequence + 1, version + 1
        )

    def rows(self, message: ReadRows, sender: int) -> RowValues | None:
        """Like `handle` for a row request of the member that holds the slot; None for any other. Changes nothing."""
        replica, slot = self._replica, message.slot
        if (
            message.member != sender
            or replica.role is not _PRIMARY
            or replica._holders.get(slot) != sender
            or replica._unconfirmed.newest(slot) != sender
            or replica.core.awaiting
        ):
            return None
        return RowValues(
            shard=message.shard, slot=slot, clock=message.clock, version=replica.core.steps.version
        )

    def commit(self, step: LaneStep) -> None:
        """Take the push; `step` is what `look` just returned, with no state change in between."""
        turn, record, replica = step.turn, step.record, self._replica
        slot, clock, core = turn.slot, turn.clock, replica.core
        steps = core.steps
        core.sequence = step.sequence
        core._next_batch = max(core._next_batch, turn.batch + 1)
        record.remember(clock, turn.batch)
        core.table.move(record, clock + 1)
        if slot in core._open and not any(given > clock for given in record.recent):
            core._open.discard(slot)
        steps.drained = core._next_batch >= self._steps and not core._open
        steps.version = step.version
        if self._stepwise:
            steps.step = clock + 1
        replica._mark = core.mark

    def answer(self, step: LaneStep) -> PushPullAnswer | None:
        """Answer the read of a committed push-pull; None if it has to wait or ends the worker's part."""
        turn, record, core = step.turn, step.record, self._replica.core
        slot, clock = turn.slot, turn.clock + 1
        if self._in_turn:
            batch = record.recent.get(clock, -1)
            if batch < 0:
                batch = core._next_batch
                if batch >= self._steps or not core.table.is_active(slot):
                    return None
                core.sequence += 1
                record.remember(clock, batch)
                core._next_batch = batch + 1
                core._open.add(slot)
            return PushPullAnswer(
                turn.shard, slot, clock, core.steps.version, core.term, -1, _TRAINS, clock, batch, 0, 1
            )
        work = core.answer(slot, clock)
        if isinstance(work, Hold):
            return None
        version, term = core.steps.version, core.term
        return PushPullAnswer(
            turn.shard,
            slot,
            clock,
            version,
            term,
            -1,
            int(work.kind),
            work.clock,
            work.batch,
            work.part,
            work.parts,
        )
