"""Connects requests with workers: the driver of `Dispatch` in the event loop of the web server.

It makes no decisions: it reports events to the core, sends the batches that the core returns, and answers requests.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manyhands.observe.analyse.serving_view import ReplicaState, ServingTally
from manyhands.serving.batching import (
    BatchAction,
    BatchLimits,
    Dispatch,
    KillReplica,
    RefuseRequest,
    SendBatch,
)
from manyhands.serving.model_replica import LENGTH, MAX_FRAME_BYTES

__all__ = ["Switchboard"]

_ENDING = json.dumps({"error": "The server is ending; ask it again when it is back."}).encode()


@dataclass(slots=True)
class _Asked:
    """A request without an answer yet."""

    body: bytes | bytearray
    size: int
    answer: asyncio.Future[tuple[int, bytes]]


@dataclass(slots=True)
class _WorkerConnection:
    """The server's side of a worker connection."""

    pid: int = 0  # 0 until it is ready
    writer: asyncio.StreamWriter | None = None
    sent: Sequence[int] = ()
    batches: int = 0
    inputs: int = 0
    listening: asyncio.Task[None] | None = field(default=None, repr=False)


class Switchboard:
    """Call all methods but `attach` from the event loop's thread; `kill` may be called there, too."""

    def __init__(self, limits: BatchLimits, tally: ServingTally, kill: Callable[[int], None]) -> None:
        self.core = Dispatch(limits)
        self._tally, self._kill = tally, kill
        self._asked: dict[int, _Asked] = {}
        self._connections: dict[int, _WorkerConnection] = {}
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def replicas(self) -> tuple[ReplicaState, ...]:
        # Copies: the page is drawn in another thread.
        busy, free = self.core.busy.copy(), self.core.free_workers.copy()
        return tuple(
            ReplicaState(
                number=number,
                pid=connection.pid,
                state="computing" if number in busy else "free" if number in free else "starting",
                batches=connection.batches,
                inputs=connection.inputs,
            )
            for number, connection in sorted(self._connections.copy().items())
        )

    def attach(self, loop: asyncio.AbstractEventLoop, worker: int, end: socket.socket) -> None:
        """Register a started worker; `end` is this side of its socket. From any thread."""

        def listen() -> None:
            connection = self._connections[worker] = _WorkerConnection()
            connection.listening = loop.create_task(self._listen(worker, connection, end))

        loop.call_soon_threadsafe(listen)

    async def ask(self, body: bytes | bytearray, size: int) -> tuple[int, bytes]:
        """Return status and JSON of the answer to a request of `size` inputs with body `body`."""
        if self._closed:
            return 503, _ENDING
        self._number += 1
        number = self._number
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._asked[number] = _Asked(body, size, answer)
        self._do(self.core.asked(number, size, time.monotonic()))
        return await answer

    def close(self) -> None:
        """Close all sockets: workers exit at end of file, and pending requests get an error."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for number in list(self._asked):
            self._give(number, 503, _ENDING)
        for connection in self._connections.values():
            if connection.listening is not None:
                connection.listening.cancel()
            if connection.writer is not None:
                connection.writer.close()

    async def _listen(self, worker: int, connection: _WorkerConnection, end: socket.socket) -> None:
        reader, connection.writer = await asyncio.open_connection(sock=end)
        try:
            connection.pid = int(json.loads(await self._frame(reader))["ready"])
            self._do(self.core.free(worker, time.monotonic()))
            while True:
                answers = json.loads(await self._frame(reader))
                for number, answer in zip(connection.sent, answers, strict=True):
                    status = int(answer.pop("status"))
                    self._give(number, status, json.dumps(answer).encode())
                connection.sent = ()
                self._do(self.core.free(worker, time.monotonic()))
        except (asyncio.IncompleteReadError, OSError):  # it is gone; `Replicas` reports why
            pass
        finally:
            connection.writer.close()
            if self._connections.pop(worker, None) is not None and not self._closed:
                self._do(self.core.gone(worker, time.monotonic()))

    @staticmethod
    async def _frame(reader: asyncio.StreamReader) -> bytes:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise OSError(f"a frame announces {length} bytes")
        return await reader.readexactly(length)

    def _do(self, actions: Sequence[BatchAction]) -> None:
        for action in actions:
            match action:
                case SendBatch(worker, requests):
                    connection = self._connections[worker]
                    connection.sent = requests
                    asked = [self._asked[number] for number in requests]
                    # Each body is JSON that was validated before: the array is joined without encoding it again.
                    batch = b"[" + b",".join(one.body for one in asked) + b"]"
                    size = sum(one.size for one in asked)
                    connection.batches += 1
                    connection.inputs += size
                    self._tally.batch(size)
                    assert connection.writer is not None, "a worker that is free has one"
                    connection.writer.write(LENGTH.pack(len(batch)))
                    connection.writer.write(batch)
                case RefuseRequest(request, status, sentence):
                    self._give(request, status, json.dumps({"error": sentence}).encode())
                case KillReplica(worker):
                    self._kill(worker)
        if self._timer is not None:
            self._timer.cancel()
        wakes_at, self._timer = self.core.wakes_at, None
        if wakes_at is not None:
            delay = max(0.0, wakes_at - time.monotonic())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay, lambda: self._do(self.core.look(time.monotonic())))

    def _give(self, number: int, status: int, answer: bytes) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result((status, answer))
