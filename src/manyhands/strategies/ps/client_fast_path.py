"""The worker's fast path for the common case: one shard, which has welcomed it, and an answer that says to train.

It is the counterpart of `ShardLane` for `ClientCore`: `turn` and `answered` leave the core as `computed` and
`handle` would, without the messages and actions in between, or change nothing and return None. A test compares
the two.

Pure. It accesses the private fields of `ClientCore` as one of its methods would.
"""

from __future__ import annotations

from manyhands.strategies.ps.client_core import ClientCore, Compute
from manyhands.strategies.ps.ps_messages import LEAD, Read, Work, WorkKind
from manyhands.strategies.ps.push_pull import PushPull, PushPullAnswer

__all__ = ["ClientLane"]

_TRAINS = int(WorkKind.TRAIN)


class ClientLane:
    """The fast path of one worker."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self._lead = core._shards[LEAD]
        self._serves = len(core._shards) == 1 and not core._confirms

    def turn(self, *, weight: float) -> tuple[int, PushPull] | None:
        """Like `computed` for a gradient of this weight: the server, and the push-pull to send to it."""
        core, lead = self._core, self._lead
        work = core._computing
        if work is None or not lead.welcome or core._left or not self._serves:
            return None
        clock = work.clock
        turn = lead.push = PushPull(
            LEAD,
            core.slot,
            core.member,
            clock,
            lead.version,
            work.batch,
            work.part,
            work.parts,
            weight,
            lead.term,
            lead.rows_version,
        )
        core._computing, core._clock = None, clock + 1
        lead.rows_version, lead.pushed = -1, True
        lead.read = Read(shard=LEAD, slot=core.slot, member=core.member, clock=clock + 1)
        return lead.primary, turn

    def answered(self, answer: PushPullAnswer, source: int) -> Compute | None:
        """Like `handle` for the Parameters in an answer from member `source`: what to compute."""
        core, lead, clock = self._core, self._lead, answer.clock
        if answer.kind != _TRAINS or answer.work_clock != clock or answer.shard != LEAD:
            return None
        if not self._serves or clock < lead.settled or not core.awaits(answer, source):
            return None
        work = Work(
            kind=WorkKind.TRAIN, clock=clock, batch=answer.batch, part=answer.part, parts=answer.parts
        )
        lead.settled = core._clock = clock
        lead.version, lead.term, lead.work = answer.version, answer.term, work
        lead.push = lead.read = None
        core._computing = work
        return Compute(work=work, versions=(answer.version,))
