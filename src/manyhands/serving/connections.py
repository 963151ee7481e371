"""Connection limits of a page server: bounded in number, and no idle unauthenticated peers.

    connection opens ──► admission.come(it) ──► the connection to close: the oldest of an unknown peer
    a good token     ──► admission.know(it)     from here on it is never displaced
    connection ends  ──► admission.gone(it)

A peer is unknown until it has shown the run's token. Unknown peers cannot keep new ones out, as each new connection
displaces the oldest of them, and they cannot stay: a connection without a complete request within `REQUEST_S` is
closed, even if it keeps sending. While a client reads its answer, however slowly, the time does not run.
"""

from __future__ import annotations

import asyncio
import os
import resource
from typing import Any, Generic, TypeVar

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MAX_CONNECTIONS = 64  # connections of a page's server, where its process has descriptors to spare
ACCEPTED_AT_ONCE = 8  # connections that are accepted before the first of them is admitted
REQUEST_S = 3.0  # for a request to come, from the connection or the end of the answer before it

Who = TypeVar("Who")

_LEAST = 4
_SHARE = 8  # a page takes one of so many free descriptors; the others are for the run


class Admission(Generic[Who]):
    """The current connections, oldest first; pure decisions."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._pending: dict[Who, None] = {}
        self._known: set[Who] = set()

    def come(self, who: Who) -> Who | None:
        """Admit a connection; return the one to close for it: the oldest unknown peer, possibly the new one."""
        self._pending[who] = None
        if len(self._pending) + len(self._known) <= self._room:
            return None
        oldest = next(iter(self._pending))
        del self._pending[oldest]
        return oldest

    def know(self, who: Who) -> None:
        if who in self._pending:
            del self._pending[who]
            self._known.add(who)

    def gone(self, who: Who) -> None:
        self._pending.pop(who, None)
        self._known.discard(who)


def room_here(most: int = MAX_CONNECTIONS, share: int = _SHARE) -> int:
    """How many connections leave a run the descriptors to recover: one of every `share` free ones, at most `most`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return most
    free = limit - len(os.listdir("/proc/self/fd"))
    return max(_LEAST, min(most, free // share))


class PageConnection(H11Protocol):
    """One connection: it may be closed to free capacity, and closes itself if no request arrives in time."""

    def __init__(
        self,
        admission: Admission[PageConnection],
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        # The application calls `know`, which it finds in its scope's state, for a request with a good token.
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
        # Only a complete request stops the timer: uvicorn's keep-alive is extended by any byte.
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_clock()

    def on_response_complete(self) -> None:
        self._await_request()
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete:  # a request was already pending
            self._stop_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._admission.gone(self)
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._stop_clock()
        unread = self.transport.get_write_buffer_size()
        self._deadline = self.loop.call_later(REQUEST_S, self._look, unread)

    def _look(self, unread: int) -> None:
        """Abort unless the client has since read some of the answer, of which `unread` bytes were left."""
        if self.transport.get_write_buffer_size() < unread:
            self._await_request()
        else:
            self.transport.abort()

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
