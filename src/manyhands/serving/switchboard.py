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

    body: bytes
    size: int
    answer: asyncio.Future[tuple[int, bytes]]


@dataclass(slots=True)
class _Line:
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
        self._core = Dispatch(limits)
        self._tally = tally
        self._kill = kill
        self._asked: dict[int, _Asked] = {}
        self._lines: dict[int, _Line] = {}
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of inputs in the queue."""
        return self._core.waiting_inputs

    def replicas(self) -> tuple[ReplicaState, ...]:
        """The current state of the workers."""
        busy, free = self._core.busy, self._core.free_workers
        return tuple(
            ReplicaState(
                number=number,
                pid=line.pid,
                state="computing" if number in busy else "free" if number in free else "starting",
                batches=line.batches,
                inputs=line.inputs,
            )
            for number, line in sorted(self._lines.copy().items())  # the page is drawn in another thread
        )

    def attach(self, loop: asyncio.AbstractEventLoop, worker: int, end: socket.socket) -> None:
        """Register a started worker; `end` is this side of its socket. From any thread."""
        loop.call_soon_threadsafe(self._attach, worker, end)

    async def ask(self, body: bytes, size: int) -> tuple[int, bytes]:
        """Return status and JSON of the answer to a request of `size` inputs with body `body`."""
        self._number += 1
        number = self._number
        if self._closed:
            return 503, _ENDING
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._asked[number] = _Asked(body, size, answer)
        self._do(self._core.asked(number, size, time.monotonic()))
        return await answer

    def close(self) -> None:
        """Close all sockets: workers exit at end of file, and pending requests get an error."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for number in list(self._asked):
            self._give(number, 503, _ENDING)
        for line in self._lines.values():
            if line.listening is not None:
                line.listening.cancel()
            if line.writer is not None:
                line.writer.close()

    def _attach(self, worker: int, end: socket.socket) -> None:
        line = self._lines[worker] = _Line()
        line.listening = asyncio.get_running_loop().create_task(self._listen(worker, line, end))

    async def _listen(self, worker: int, line: _Line, end: socket.socket) -> None:
        reader, line.writer = await asyncio.open_connection(sock=end)
        try:
            line.pid = int(json.loads(await self._frame(reader))["ready"])
            self._do(self._core.free(worker, time.monotonic()))
            while True:
                answers = json.loads(await self._frame(reader))
                for number, answer in zip(line.sent, answers, strict=True):
                    status = int(answer.pop("status"))
                    self._give(number, status, json.dumps(answer).encode())
                line.sent = ()
                self._do(self._core.free(worker, time.monotonic()))
        except (asyncio.IncompleteReadError, OSError):  # it is gone; `Replicas` reports why
            pass
        finally:
            line.writer.close()
            if self._lines.pop(worker, None) is not None and not self._closed:
                self._do(self._core.gone(worker, time.monotonic()))

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
                    self._send(worker, requests)
                case RefuseRequest(request, status, sentence):
                    self._give(request, status, json.dumps({"error": sentence}).encode())
                case KillReplica(worker):
                    self._kill(worker)
        self._set_timer()

    def _send(self, worker: int, requests: Sequence[int]) -> None:
        line = self._lines[worker]
        line.sent = requests
        asked = [self._asked[number] for number in requests]
        # Each body is JSON that was validated before, so the array is joined without encoding it again.
        batch = b"[" + b",".join(one.body for one in asked) + b"]"
        size = sum(one.size for one in asked)
        line.batches += 1
        line.inputs += size
        self._tally.batch(size)
        assert line.writer is not None, "a worker that is free has one"
        line.writer.write(LENGTH.pack(len(batch)))
        line.writer.write(batch)

    def _give(self, number: int, status: int, answer: bytes) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result((status, answer))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wakes_at, self._timer = self._core.wakes_at, None
        if wakes_at is not None:
            delay = max(0.0, wakes_at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._look)

    def _look(self) -> None:
        self._timer = None
        self._do(self._core.look(time.monotonic()))
