"""Serves an ASGI application from a thread of this process, on a socket that is opened at once."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from manyhands.errors import ManyhandsError, UserError
from manyhands.observe.analyse.view import RunView
from manyhands.serving.page_app import Guard, PageApp, require_web
from manyhands.transport.security import is_loopback

LOOPBACK = "127.0.0.1"
_log = logging.getLogger("manyhands")
_START_S, _STOP_S, _FAREWELL_S, _LOOK_S = 10.0, 5.0, 3.0, 0.01
_WAITING = 1024
_MAX_HEADER_BYTES = 16 << 10


class Listening:
    """A listening socket, its guard, and the URL with the guard's token."""

    def __init__(
        self, host: str, port: int, what: str, *, names: Iterable[str] = (), token: str | None = None
    ) -> None:
        self.what = what  # what messages call it
        if not 0 <= port <= 65535:
            raise UserError(f"port {port} is not allowed; give 0 (any free port) to 65535")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.socket = socket.create_server((host, port), family=family)
        except OSError as error:
            why = f"{what} cannot listen on {host}:{port} ({error.strerror}); port 0 selects a free one"
            raise UserError(why) from error
        # Connections have it, too. Without it, the end of an answer waits 40 ms for the client to confirm its start.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        known = {host, *names} if is_loopback(host) else {host, socket.gethostname(), *names}
        given = {} if token is None else {"token": token}
        self.guard = Guard(names=frozenset(map(str.lower, known)), any_address=not is_loopback(host), **given)
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self.socket.getsockname()[1]}"
        self.url = f"{self.address}/#token={self.guard.token}"


class WebThread:
    """Serves an application on `listening` from `start` until `stop`; `loop` is its event loop."""

    def __init__(self, app: Any, listening: Listening, room: int) -> None:
        import uvicorn

        from manyhands.serving.connections import ACCEPTED_AT_ONCE, Admission, PageConnection

        self._listening = listening
        self._failure: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        config = uvicorn.Config(
            app,
            log_config=None,  # an access log would contain the token
            access_log=False,
            log_level="critical",
            lifespan="off",
            ws="none",
            server_header=False,
            http=partial(PageConnection, Admission(room)),  # type: ignore[arg-type]
            backlog=ACCEPTED_AT_ONCE,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name=listening.what, daemon=True)

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if self._failure is not None or time.monotonic() > deadline:
                self.stop()
                late = f"did not start within {_START_S:g} s"
                raise ManyhandsError(f"{self._listening.what} {late}: {self._failure}")
            time.sleep(_LOOK_S)
        # Connections in the kernel's queue take no descriptor; uvicorn sets the queue to its accept limit.
        self._listening.socket.listen(_WAITING)

    def stop(self) -> None:
        """Stop at once, without notifying connected clients."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._listening.socket.close()
        if self._thread.is_alive():
            _log.warning("%s was still answering %.0f s after it was closed", self._listening.what, _STOP_S)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._listening.socket])

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as failure:  # reported by the thread that waits for the start
            self._failure = failure


class Dashboard:
    """Serves views of a run while entered; on exit open pages get the newest state and `farewell`, within 3 s."""

    def __init__(
        self,
        source: Callable[[], RunView],
        metrics: Callable[[RunView], str],
        *,
        host: str = LOOPBACK,
        port: int = 0,
        farewell: str = "the server has ended",
    ) -> None:
        require_web()
        self._listening = Listening(host, port, "the live page")
        self._app = PageApp(source, self._listening.guard, metrics)
        self._farewell = farewell
        self.url = self._listening.url

    def __enter__(self) -> Dashboard:
        from manyhands.serving.connections import room_here

        self._web = WebThread(self._app, self._listening, room_here())
        self._web.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._app.end(self._farewell)
        deadline = time.monotonic() + _FAREWELL_S
        while self._app.num_streams and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self.stop()

    def stop(self) -> None:
        """Stop at once, without notifying open pages."""
        self._web.stop()
