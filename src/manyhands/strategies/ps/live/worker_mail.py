"""A worker's messages to servers: each sent with its payload once its server is connected, and recorded."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import NOBODY, EventKind
from manyhands.strategies.ps.live.message_events import message_number, wire_of_link
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.worker_payloads import WorkerPayloads
from manyhands.strategies.ps.live.worker_state import WorkerState
from manyhands.strategies.ps.ps_messages import Message, Parameters, Push, ReadRows, RowValues
from manyhands.transport.hub.hub import Hub

__all__ = ["WorkerMail"]


class WorkerMail:
    """The message traffic of one worker in one slot, over the connections of `hub`."""

    def __init__(self, hub: Hub, body: WorkerState, job: Job, ring: EventRing) -> None:
        self.payloads = WorkerPayloads(body, job)
        self.roles: dict[int, int] = {}
        """Of servers in events, by member."""

        self._hub = hub
        self._body = body
        self._ring = ring
        self._wire = wire_of_link(job.strategy)
        self._shards = job.strategy.servers
        self._unsent: defaultdict[int, list[Message]] = defaultdict(list)

    def send(self, to: int, message: Message) -> None:
        """Send now, or queue until that server is connected."""
        if to in self._hub.members():
            self._post(to, message)
        else:
            self._unsent[to].append(message)

    def joined(self, member: int) -> None:
        """Send a newly connected server its queued messages."""
        for message in self._unsent.pop(member, []):
            self.send(member, message)

    def came(self, member: int, message: Any, num_bytes: int) -> None:
        """Record a message from a server."""
        self._record(EventKind.RECEIVE, time.monotonic_ns(), member, message, num_bytes)

    def _post(self, to: int, message: Any) -> None:
        payload, num_bytes = self.payloads.sent_with(to, message)
        now_ns = time.monotonic_ns()
        self._hub.send(to, message, payload)
        self._body.bytes_sent += num_bytes
        self._body.messages_sent += 1
        self._record(EventKind.SEND, now_ns, to, message, num_bytes)

    def _record(self, kind: EventKind, now_ns: int, server: int, message: Any, num_bytes: int) -> None:
        if isinstance(message, Push | ReadRows | Parameters | RowValues):
            self._ring.record(
                kind,
                now_ns,
                step=message.batch if isinstance(message, Push) else self._body.context.step - 1,
                peer=self.roles.get(server, NOBODY),
                num_bytes=num_bytes,
                count=1,
                message=message_number(message, self._shards),
                wire=self._wire,
            )
