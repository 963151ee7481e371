"""The server's side of its workers' sockets, in the event loop of the web server: what both kinds of workers share."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from manyhands.errors import ManyhandsError
from manyhands.observe.analyse.serving_view import ReplicaState, ServingTally
from manyhands.serving.model_parts import LENGTH, frame_length

ENDING = "The server is shutting down; try again when it is back."


class _Core(Protocol):
    """Decides for a switchboard."""

    @property
    def wakes_at(self) -> float | None: ...

    @property
    def waiting_inputs(self) -> int: ...

    def look(self, now: float) -> Sequence[Any]: ...


@dataclass(slots=True)
class WorkerConnection:
    """The server's side of a worker connection."""

    pid: int = 0  # 0 until it is ready
    writer: asyncio.StreamWriter | None = None
    sent: Sequence[int] = ()
    batches: int = 0
    inputs: int = 0
    listening: asyncio.Task[None] | None = field(default=None, repr=False)

    def send(self, message: bytes) -> None:
        assert self.writer is not None, "a worker that is ready has one"
        self.writer.write(LENGTH.pack(len(message)))
        self.writer.write(message)


class WorkerSwitchboard(ABC):
    """Carries out what `core` decides; `attach`, `refuse` and `replicas` may be called by other threads."""

    core: _Core

    def __init__(self, tally: ServingTally, kill: Callable[[int], None]) -> None:
        self._tally, self._kill = tally, kill
        self._connections: dict[int, WorkerConnection] = {}
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ending = self._closed = False

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether a worker can answer, now or after its batch."""

    @property
    @abstractmethod
    def unanswered(self) -> int:
        """Requests that have no answer yet."""

    @abstractmethod
    async def ask(self, body: bytes | bytearray, size: int) -> tuple[int, bytes]:
        """Return status and JSON of the answer to a request of `size` inputs with body `body`."""

    @abstractmethod
    def _state(self, worker: int) -> str: ...

    @abstractmethod
    def _ready(self, worker: int) -> None:
        """It has loaded its model."""

    @abstractmethod
    def _heard(self, worker: int, message: Any) -> None: ...

    @abstractmethod
    def _gone(self, worker: int) -> None: ...

    @abstractmethod
    def _act(self, action: Any) -> None: ...

    @abstractmethod
    def _refuse_all(self) -> None:
        """Answer pending requests with the sentence that the server is ending."""

    def replicas(self) -> tuple[ReplicaState, ...]:
        return tuple(
            ReplicaState(
                number=number,
                pid=connection.pid,
                state=self._state(number),
                batches=connection.batches,
                inputs=connection.inputs,
            )
            for number, connection in sorted(self._connections.copy().items())  # drawn in another thread
        )

    def attach(self, loop: asyncio.AbstractEventLoop, worker: int, end: socket.socket) -> None:
        """Register a started worker; `end` is this side of its socket. From any thread."""

        def listen() -> None:
            connection = self._connections[worker] = WorkerConnection()
            connection.listening = loop.create_task(self._listen(worker, connection, end))

        loop.call_soon_threadsafe(listen)

    def refuse(self) -> None:
        """Refuse requests from here on; those that have come still get their answers. From any thread."""
        self._ending = True

    def close(self) -> None:
        """Close all sockets: workers exit at end of file, and pending requests get an error."""
        self._ending = self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._refuse_all()
        for connection in self._connections.values():
            if connection.listening is not None:
                connection.listening.cancel()
            if connection.writer is not None:
                connection.writer.close()

    async def _listen(self, worker: int, connection: WorkerConnection, end: socket.socket) -> None:
        reader, connection.writer = await asyncio.open_connection(sock=end)
        try:
            connection.pid = int(json.loads(await self._frame(reader))["ready"])
            self._ready(worker)
            while True:
                self._heard(worker, json.loads(await self._frame(reader)))
        except (asyncio.IncompleteReadError, OSError):  # it is gone; `Replicas` reports why
            pass
        finally:
            connection.writer.close()
            if self._connections.pop(worker, None) is not None and not self._closed:
                self._gone(worker)

    @staticmethod
    async def _frame(reader: asyncio.StreamReader) -> bytes:
        head = await reader.readexactly(LENGTH.size)
        try:
            length = frame_length(head)
        except ManyhandsError as error:
            raise OSError(str(error)) from error  # no worker of ours: as if it were gone
        return await reader.readexactly(length)

    def _do(self, actions: Sequence[Any]) -> None:
        for action in actions:
            self._act(action)
        if self._timer is not None:
            self._timer.cancel()
        wakes_at, self._timer = self.core.wakes_at, None
        if wakes_at is not None and not self._closed:
            delay = max(0.0, wakes_at - time.monotonic())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay, lambda: self._do(self.core.look(time.monotonic())))
