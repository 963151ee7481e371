"""The server's fast path: a common push-pull from its arrival to its answer, in as few calls as possible.

`ShardLane` says whether a push-pull qualifies. Then the gradient is checked, the optimizer steps, the row is
logged, the state advances and the answer is sent, in the same order as for every other push. Only the recording
of events is deferred until the worker has its answer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from manyhands.strategies.ps.fast_path import ShardLane
from manyhands.strategies.ps.live.message_events import ServerRecords
from manyhands.strategies.ps.live.parameter_delivery import OutgoingParameters
from manyhands.strategies.ps.live.payloads import Gradients
from manyhands.strategies.ps.live.row_payloads import UnknownSets
from manyhands.strategies.ps.live.stores import Stores
from manyhands.strategies.ps.ps_messages import ReadRows
from manyhands.strategies.ps.push_pull import PushPull
from manyhands.strategies.ps.server_core import ServerCore
from manyhands.strategies.ps.shard_store import ShardStore
from manyhands.transport.hub.hub import Hub

__all__ = ["Dealt", "LiveLane"]


class Dealt(Enum):
    """How much of a push-pull was handled."""

    NOTHING = auto()
    """Nothing has changed: the core must handle it."""
    PUSH = auto()
    """The push is applied and logged; the core must handle the read, which has to wait or ends the worker's part."""
    ALL = auto()


class LiveLane:
    """The fast paths of all shards of which this server process is a replica."""

    def __init__(
        self,
        core: ServerCore,
        stores: Stores,
        gradients: Gradients,
        outgoing: OutgoingParameters,
        records: ServerRecords,
        *,
        log: Callable[[int, str], None] | None,
        staleness: dict[int, Counter[int]],
        checkpoint_every: int,
    ) -> None:
        """`log` writes a line of a shard, None if nothing is recorded; `staleness` counts steps by staleness, by
        shard.

        A push-pull that a checkpoint follows is not taken by the fast path.
        """
        self._core, self._stores, self._gradients = core, stores, gradients
        self._outgoing, self._records = outgoing, records
        self._log, self._staleness, self._every = log, staleness, checkpoint_every
        self._lanes: dict[int, ShardLane] = {}

    def take(self, hub: Hub, member: int, turn: PushPull, payload: memoryview) -> Dealt:
        """Handle a push-pull of `member` if it is the common case."""
        begin_ns = time.monotonic_ns()
        shard = turn.shard
        lane = self._lanes.get(shard) or self._new(shard)
        store = self._stores.known(shard)
        if lane is None or store is None or turn.member != member or not self._gradients.is_newest(turn):
            return Dealt.NOTHING
        step = lane.look(turn)
        if step is None or (self._every and step.version % self._every == 0):
            return Dealt.NOTHING
        where = self._gradients.addresses(turn, payload) if store.turns else None
        out = 0 if where is None else where[2]
        apply_ns = time.monotonic_ns()
        if where is not None:
            applied = store.turn(where[0], where[1], step.rate, out)
        else:
            applied = self._apply(store, turn, payload, step.rate)
        if not applied:
            return Dealt.NOTHING
        applied_ns = time.monotonic_ns()
        if self._log is not None:
            self._log(shard, step.line)
        lane.commit(step)
        answer = lane.answer(step)
        num_bytes = 0
        if answer is not None:
            values: list[Any] = [] if out else self._outgoing.payload(hub, member, shard)
            hub.send(member, answer, values)
            if values:
                hub.send_off()  # held-back messages are not copied, and the next answer may reuse the memory
            num_bytes = self._outgoing.num_bytes(shard, values)
        self._staleness[shard][step.staleness] += 1
        self._records.took(turn, step.staleness, (begin_ns, apply_ns, applied_ns), payload.nbytes)
        if answer is None:
            return Dealt.PUSH
        self._records.gave(answer, applied_ns, num_bytes)
        return Dealt.ALL

    def give_rows(self, hub: Hub, member: int, message: ReadRows, payload: memoryview) -> bool:
        """Answer a row request if it is the common case; otherwise return False and send nothing."""
        begin_ns = time.monotonic_ns()
        lane, store = self._lanes.get(message.shard), self._stores.known(message.shard)
        answer = lane.rows(message, member) if lane is not None else None
        if answer is None or store is None:
            return False
        tables = self._gradients.tables
        try:
            asked = tables.asked(message.shard, payload, message.whole)
        except UnknownSets:
            return False
        received_ns = time.monotonic_ns()
        values = tables.values(store, asked, member, has_all=hub.sent(member))
        hub.send(member, answer, values)
        hub.send_off()
        num_bytes = sum(memoryview(one).nbytes for one in values)
        self._records.gave_rows(message, answer, (begin_ns, received_ns), (payload.nbytes, num_bytes))
        return True

    def _apply(self, store: ShardStore, turn: PushPull, payload: memoryview, rate: float) -> bool:
        """Take the user's optimizer step; False, with nothing changed, for a gradient that the core would refuse."""
        try:
            contribution = self._gradients.of(turn, payload, borrow=True)
            if contribution is None or store.first_bad(contribution) is not None:
                return False
        except (UnknownSets, IndexError, ValueError):
            return False
        store.apply([contribution], rate)
        return True

    def _new(self, shard: int) -> ShardLane | None:
        replica = self._core.replicas.get(shard)
        if replica is None:
            return None
        lane = self._lanes[shard] = ShardLane(replica)
        return lane
