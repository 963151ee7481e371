"""Which connections a page's server keeps: as many as it has room for, and none that a stranger only holds.

    connection opens ──► admission.come(it) ──► whoever has to make room: the stranger that is there the longest
    a good token     ──► admission.know(it)     from here on nobody displaces it
    connection ends  ──► admission.gone(it)

Whoever has not shown the run's token is a stranger. Strangers cannot keep newcomers out, as each of these frees a
place, and they cannot stay: who has not asked for something within `REQUEST_S` is closed, however busily it sends.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

__all__ = ["ACCEPTED_AT_ONCE", "MAX_CONNECTIONS", "REQUEST_S", "Admission", "connections_of", "room_here"]

MAX_CONNECTIONS = 64
"""Connections of a page's server, where its process has descriptors to spare."""

ACCEPTED_AT_ONCE = 8
"""Connections that are accepted before the first of them is admitted."""

REQUEST_S = 3.0
"""How long a request may take to come: from the connection, or from the end of the answer before it."""

Who = TypeVar("Who")

_LEAST = 4
_SHARE = 8  # a page takes one of so many descriptors that are free; the others are the run's


class Admission(Generic[Who]):
    """Who is connected, the longest there first; pure decisions."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._pending: dict[Who, None] = {}
        self._known: set[Who] = set()

    def come(self, who: Who) -> Who | None:
        """Take in a newcomer; whom to close for it: the oldest stranger, which may be the newcomer itself."""
        self._pending[who] = None
        if len(self._pending) + len(self._known) <= self._room:
            return None
        oldest = next(iter(self._pending))
        del self._pending[oldest]
        return oldest

    def know(self, who: Who) -> None:
        """It has shown the token."""
        if who in self._pending:
            del self._pending[who]
            self._known.add(who)

    def gone(self, who: Who) -> None:
        """Its connection has ended."""
        self._pending.pop(who, None)
        self._known.discard(who)


def room_here(most: int = MAX_CONNECTIONS, share: int = _SHARE) -> int:
    """How many connections this process can keep without taking the descriptors that a run needs to recover.

    At most `most`, and one of `share` descriptors that are free.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return most
    free = limit - len(os.listdir("/proc/self/fd"))
    return max(_LEAST, min(most, free // share))


def connections_of(admission: Admission[Any]) -> Callable[..., asyncio.Protocol]:
    """What uvicorn makes for each connection to a server that admits by these rules."""
    return partial(_Connection, admission)


class _Connection(H11Protocol):
    """One connection, which may be closed to make room, and which closes itself where no request comes in time.

    The application finds `know` in its scope's state, and calls it where a request has a good token.
    """

    def __init__(
        self,
        admission: Admission[_Connection],
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "know": lambda: admission.know(self)}, _loop)
        self._admission = admission
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        displaced = self._admission.come(self)
        if displaced is not None:
            displaced.transport.abort()
        self._await_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Only a whole request stops the clock: uvicorn's own keep-alive is put off by any byte.
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_clock()

    def on_response_complete(self) -> None:
        self._await_request()
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete:  # a request was waiting already
            self._stop_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._admission.gone(self)
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._stop_clock()
        self._deadline = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
