"""The payloads of a worker: those of its messages, and the destinations of those of the answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.shard_encoding import as_tensor
from manyhands.strategies.ps.live.validation import require_shard
from manyhands.strategies.ps.live.worker_state import WorkerState
from manyhands.strategies.ps.ps_messages import Parameters, Push, ReadRows, RowValues
from manyhands.transport.messages import ProtocolError

__all__ = ["WorkerPayloads"]


class WorkerPayloads:
    """The payloads of one worker process."""

    def __init__(self, body: WorkerState, job: Job) -> None:
        self._body = body
        self._shards, self._is_inline = job.strategy.servers, job.strategy.link == "tcp"

    def sent_with(self, to: int, message: Any) -> tuple[list[Any], int]:
        """The payload of a message to server `to`, and the number of bytes that move because of it."""
        body = self._body
        if isinstance(message, Push) and not message.skip:
            part = body.parts[message.shard]
            travels = body.encoded[message.shard] if body.encoded else part.gradient.memory
            payload, num_bytes = [], travels.nbytes
            if self._is_inline:
                payload = [part.flags.numpy(), travels.numpy()]
                num_bytes += part.flags.nbytes
            if not body.tables.exist:
                return payload, num_bytes
            rows = body.tables.push(to, message.shard)
            return payload + rows, num_bytes + _num_bytes(rows)
        if isinstance(message, ReadRows):
            rows = body.tables.request(to, message.shard)
            return rows, _num_bytes(rows)
        return [], 0

    def room(self, message: Any, num_bytes: int, *, is_awaited: bool) -> memoryview | None:
        """The receive buffer of an answer's payload: awaited parameters go straight into the model."""
        if isinstance(message, RowValues):
            self._body.tables.require_size(message.shard, num_bytes)
        if not isinstance(message, Parameters) or not is_awaited:
            return None
        values = self._body.parts[message.shard].values
        if self._body.coding.codes_values:
            self._require_at_most(message.shard, num_bytes)
        elif values.nbytes == num_bytes:
            return memoryview(values.numpy())  # type: ignore[arg-type]
        return None

    def require_known(self, message: Any) -> None:
        """ProtocolError for an answer of an unknown shard."""
        if isinstance(message, Parameters | RowValues):
            require_shard(message.shard, self._shards)

    def take(self, message: Parameters, payload: memoryview) -> None:
        """Copy awaited parameters that were received elsewhere into the model."""
        if not payload:
            return
        values = self._body.parts[message.shard].values
        if self._body.coding.codes_values:
            into = self._body.layout.range_in(values, message.shard)
            self._body.coding.decode(message.shard, as_tensor(payload), into)
            return
        if payload.nbytes != values.nbytes:
            raise ProtocolError(
                "payload_bytes", f"{payload.nbytes} bytes of parameters where {values.nbytes} are expected"
            )
        came = np.frombuffer(payload, np.uint8)
        if came.ctypes.data != values.data_ptr():
            values.numpy()[:] = came

    def _require_at_most(self, shard: int, num_bytes: int) -> None:
        most = self._body.coding.most_bytes(shard)
        if num_bytes > most:
            raise ProtocolError(
                "payload_bytes", f"{num_bytes} bytes of parameters, where at most {most} can be"
            )


def _num_bytes(parts: list[Any]) -> int:
    return sum(memoryview(one).nbytes for one in parts)
