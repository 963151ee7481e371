"""The events that parameter-server processes record for messages: both ends give a message the same number.

worker                                         server
SEND push           ──────────►                RECEIVE push, APPLY
RECEIVE parameters  ◄──────────  (HOLD, then)  SEND parameters
"""

from __future__ import annotations

import time

from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import NO_STEP, NOBODY, EventKind
from manyhands.strategies.ps.live.worker_mail import message_number, wire_of_link
from manyhands.strategies.ps.log_rows import StepRow
from manyhands.strategies.ps.ps_messages import HostPush, Parameters, Push, Read, ReadRows, RowValues
from manyhands.strategies.ps.strategy import Ps

_WITH_PAYLOAD = (Push, ReadRows)
_READING = (Push, Read)


class ServerRecords:
    """One server's events; workers are identified by their slots."""

    def __init__(self, ring: EventRing, strategy: Ps) -> None:
        self._ring = ring
        self._num_shards = strategy.servers
        self._wire = wire_of_link(strategy)
        self._asked_ns: dict[tuple[int, int], int] = {}  # by slot and shard, when its Read came
        self._received_ns = 0  # when the message in hand had been taken in
        self._done_ns = 0  # until when this server's time is accounted for

    def saved(self, begin_ns: int) -> None:
        self._done_ns = time.monotonic_ns()
        self._ring.record(EventKind.CHECKPOINT, begin_ns, self._done_ns - begin_ns)

    def began(self, message: object) -> int:
        now_ns = self._done_ns = time.monotonic_ns()
        self._received_ns = 0
        for one in message.parts if isinstance(message, HostPush) else (message,):
            if isinstance(one, _READING) and (isinstance(one, Read) or one.pulls):
                self._asked_ns[one.slot, one.shard] = now_ns
        return now_ns

    def handled(self, message: object, begin_ns: int, num_bytes: int) -> None:
        message = message.parts[0] if isinstance(message, HostPush) else message
        if isinstance(message, _WITH_PAYLOAD):
            self._ring.record(
                EventKind.RECEIVE,
                begin_ns,
                (self._received_ns or time.monotonic_ns()) - begin_ns,
                step=message.batch if isinstance(message, Push) else NO_STEP,
                peer=message.slot,
                num_bytes=num_bytes,
                message=message_number(message, self._num_shards),
                wire=self._wire,
            )

    def applied(self, row: StepRow, begin_ns: int, duration_ns: int) -> None:
        self._received_ns = self._received_ns or begin_ns
        self._done_ns = begin_ns + duration_ns
        for index, update in enumerate(row.updates):
            is_last = index == len(row.updates) - 1
            self._ring.record(
                EventKind.APPLY,
                begin_ns,
                duration_ns if is_last else 0,
                step=update.batch,
                peer=update.slot,
                count=row.shard,
                value=update.staleness,
            )

    def answered(self, answer: Parameters | RowValues, num_bytes: int) -> None:
        """Record an answer to a worker, prepared since the last recorded activity ended."""
        now_ns = time.monotonic_ns()
        if not self._received_ns:
            self._received_ns = self._done_ns = now_ns
        begin_ns, self._done_ns = self._done_ns, now_ns
        step = answer.work.batch if isinstance(answer, Parameters) else NO_STEP
        if isinstance(answer, Parameters):
            asked_ns = self._asked_ns.pop((answer.slot, answer.shard), now_ns)
            if answer.waited_for != NOBODY:
                self._ring.record(
                    EventKind.HOLD,
                    asked_ns,
                    now_ns - asked_ns,
                    step=step,
                    peer=answer.slot,
                    count=answer.shard,
                    value=answer.waited_for,
                )
        self._ring.record(
            EventKind.SEND,
            begin_ns,
            now_ns - begin_ns,
            step=step,
            peer=answer.slot,
            num_bytes=num_bytes,
            count=1,
            value=answer.ahead if isinstance(answer, Parameters) else 0,
            message=message_number(answer, self._num_shards),
            wire=self._wire,
        )
