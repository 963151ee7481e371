"""A worker's messages to and from servers, with payloads and records; each waits until its server is connected."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import numpy as np

from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import NOBODY, EventKind
from manyhands.strategies.ps.live.area import AreaPart
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.push_order import HostGate, PushOrder
from manyhands.strategies.ps.live.shard_encoding import as_tensor
from manyhands.strategies.ps.live.worker_state import WorkerState
from manyhands.strategies.ps.ps_messages import (
    Fenced,
    HostPush,
    Message,
    NotPrimary,
    Parameters,
    Push,
    Read,
    ReadRows,
    Refused,
    RowsUnknown,
    RowValues,
    SendAlone,
    ValuesAhead,
    Welcome,
)
from manyhands.strategies.ps.strategy import Ps
from manyhands.transport.hub.hub import Hub
from manyhands.transport.link.wire import Wire, wire_of
from manyhands.transport.messages import ProtocolError

_MAX_NUMBER = 2**32 - 1
_ORDERED_FROM_BYTES = 1 << 20  # below this, waiting for another worker takes longer than its push
_FOR_WORKERS = (
    Welcome,
    Parameters,
    ValuesAhead,
    RowValues,
    RowsUnknown,
    Refused,
    SendAlone,
    NotPrimary,
    Fenced,
)
_ABOUT_ROWS = (ReadRows, RowValues)
_NUMBERED = (Push, ReadRows, Parameters, RowValues)


def message_number(message: Push | Read | Parameters | ReadRows | RowValues, num_shards: int) -> int:
    """The number of an update's message to or from a shard, which both ends record; those about rows have others."""
    about_rows = isinstance(message, _ABOUT_ROWS)
    return (2 * (message.clock * num_shards + message.shard) + about_rows) % _MAX_NUMBER + 1


def wire_of_link(strategy: Ps) -> int:
    """The link and codec of gradients and parameters, as events encode them."""
    return wire_of(Wire.TCP if strategy.link == "tcp" else Wire.MEMORY, strategy.codec)


def require_shard(shard: int, num_shards: int) -> None:
    if not 0 <= shard < num_shards:
        raise ProtocolError("shard", f"there is no shard {shard} of {num_shards}")


class WorkerMail:
    """The message traffic of one worker in one slot, over the connections of `hub`."""

    def __init__(self, hub: Hub, body: WorkerState, job: Job, ring: EventRing) -> None:
        self.roles: dict[int, int] = {}  # of servers in events, by member
        self.sums: list[AreaPart] = []  # by shard: the gradients of this host, added up
        self._ahead: dict[int, tuple[int, int, int]] = {}
        """By shard: the sender and version of values that came before their answer, and how many bytes."""
        self._hub = hub
        self._body = body
        self._ring = ring
        self._wire = wire_of_link(job.strategy)
        self._shards, self._is_inline = job.strategy.servers, job.strategy.link == "tcp"
        self._unsent: defaultdict[int, list[Message]] = defaultdict(list)
        self._order: PushOrder | None = None
        if job.orders_pushes and body.layout.num_bytes >= _ORDERED_FROM_BYTES:
            self._order = PushOrder(hub, self._send, HostGate(job.gate), job.workers)

    def send(self, to: int, message: Message) -> None:
        """Send in the order of pushes, or now; queue until that server is connected."""
        if self._order is not None and isinstance(message, Push) and not message.skip:
            self._order.add(to, message)
        else:
            self._send(to, message)

    def go_on(self) -> None:
        """Call after every poll of the hub."""
        if self._order is not None:
            self._order.go_on()

    def close(self) -> None:
        if self._order is not None:
            self._order.close()

    def _send(self, to: int, message: Message) -> None:
        if to not in self._hub.members():
            self._unsent[to].append(message)
            return
        payload, num_bytes = self._payload(to, message)
        now_ns = time.monotonic_ns()
        self._hub.send(to, message, payload)
        self._body.bytes_sent += num_bytes
        self._body.messages_sent += 1
        self.record(EventKind.SEND, now_ns, to, message, num_bytes)

    def joined(self, member: int) -> None:
        """Send a newly connected server its queued messages."""
        for message in self._unsent.pop(member, []):
            self.send(member, message)

    def record(self, kind: EventKind, now_ns: int, server: int, message: Any, num_bytes: int) -> None:
        message = message.parts[0] if isinstance(message, HostPush) else message
        if isinstance(message, _NUMBERED):
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

    def _payload(self, to: int, message: Any) -> tuple[list[Any], int]:
        """The payload of a message to server `to`, and the number of bytes that move because of it."""
        body, rows, payload, num_bytes = self._body, [], [], 0
        if isinstance(message, Push | HostPush) and not (isinstance(message, Push) and message.skip):
            part = (self.sums if isinstance(message, HostPush) else body.parts)[message.shard]
            gradient = body.encoded[message.shard] if body.encoded else part.gradient.memory
            num_bytes = gradient.nbytes
            if self._is_inline:
                payload = [part.flags.numpy(), gradient.numpy()]
                num_bytes += part.flags.nbytes
            if not body.tables.exist:
                return payload, num_bytes
            rows = body.tables.push(to, message.shard)
        elif isinstance(message, ReadRows):
            rows = body.tables.request(to, message.shard)
        return payload + rows, num_bytes + sum(memoryview(one).nbytes for one in rows)

    def receive_buffer(self, message: Any, num_bytes: int, *, is_awaited: bool) -> memoryview | None:
        """Where an answer's payload is received: awaited parameters go straight into the model."""
        if isinstance(message, RowValues):
            self._body.tables.require_size(message.shard, num_bytes)
        if not isinstance(message, Parameters | ValuesAhead) or not is_awaited:
            return None
        values = self._body.parts[message.shard].values
        if isinstance(message, ValuesAhead) or message.ahead:
            begin = message.begin if isinstance(message, ValuesAhead) else message.ahead
            if begin < 0 or begin + num_bytes > values.nbytes:
                raise ProtocolError(
                    "payload_bytes", f"{num_bytes} bytes from {begin} on are not in the shard"
                )
            return memoryview(values.numpy())[begin : begin + num_bytes]  # type: ignore[arg-type]
        if self._body.coding.codes_values:
            most = self._body.coding.most_bytes(message.shard)
            if num_bytes > most:
                raise ProtocolError(
                    "payload_bytes", f"{num_bytes} bytes of parameters; at most {most} are allowed"
                )
        elif values.nbytes == num_bytes:
            return memoryview(values.numpy())  # type: ignore[arg-type]
        return None

    def require_known(self, message: Any) -> None:
        """ProtocolError for a message that no worker is sent, or of an unknown shard."""
        if not isinstance(message, _FOR_WORKERS):
            raise ProtocolError("message", f"a worker does not accept a {type(message).__name__}")
        require_shard(message.shard, self._shards)

    def take_ahead(self, member: int, message: ValuesAhead, payload: memoryview) -> None:
        """Note which values were received in the model before their answer."""
        begun, until = (member, message.version), message.begin + payload.nbytes
        if message.begin and self._ahead.get(message.shard) != (*begun, message.begin):
            raise ProtocolError("begin", f"the values before byte {message.begin} have not arrived")
        self._ahead[message.shard] = (*begun, until)

    def take(self, member: int, message: Parameters, payload: memoryview) -> None:
        """Copy awaited parameters that were received elsewhere into the model."""
        if message.ahead:
            name, whole = (
                (member, message.version, message.ahead),
                self._body.parts[message.shard].values.nbytes,
            )
            if self._ahead.get(message.shard) != name or message.ahead + payload.nbytes != whole:
                raise ProtocolError("ahead", f"{message.ahead} bytes of these values have not arrived before")
            return
        if not payload:
            return
        values = self._body.parts[message.shard].values
        if self._body.coding.codes_values:
            into = self._body.layout.range_in(values, message.shard)
            self._body.coding.decode(message.shard, as_tensor(payload), into)
            return
        if payload.nbytes != values.nbytes:
            raise ProtocolError(
                "payload_bytes", f"{payload.nbytes} bytes of parameters; {values.nbytes} are expected"
            )
        came = np.frombuffer(payload, np.uint8)
        if came.ctypes.data != values.data_ptr():
            values.numpy()[:] = came
