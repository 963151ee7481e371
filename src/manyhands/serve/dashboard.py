"""A live page served from a thread of this process, for as long as a run or a command lasts."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

from manyhands.analyse.view import RunView
from manyhands.errors import ManyhandsError, UserError
from manyhands.link.secure import is_loopback
from manyhands.serve.guard import Guard
from manyhands.serve.server import PageApp, require_web

__all__ = ["LOOPBACK", "Dashboard"]

LOOPBACK = "127.0.0.1"
_log = logging.getLogger("manyhands")
_START_S = 10.0
_FAREWELL_S = 3.0
_STOP_S = 5.0
_LOOK_S = 0.01
_WAITING = 1024
_MAX_HEADER_BYTES = 16 << 10


class Dashboard:
    """Serves views of a run while it is entered; `url` holds the token that opens it. A context manager.

    On the way out every open page gets the newest state and `farewell`, for at most three seconds; then the
    server is gone, and what the pages show stays.
    """

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
        self._socket = _listen(host, port)
        names = {host} if is_loopback(host) else {host, socket.gethostname()}
        guard = Guard(names=frozenset(map(str.lower, names)), any_address=not is_loopback(host))
        self._app = PageApp(source, guard, metrics)
        self._farewell = farewell
        self._failure: BaseException | None = None
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        shown = f"[{shown}]" if ":" in shown else shown
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}/#token={guard.token}"

    def __enter__(self) -> Dashboard:
        import uvicorn

        from manyhands.serve.connections import ACCEPTED_AT_ONCE, Admission, connections_of, room_here

        config = uvicorn.Config(
            self._app,
            log_config=None,  # an access log would write the token
            access_log=False,
            log_level="critical",
            lifespan="off",
            ws="none",
            server_header=False,
            http=connections_of(Admission(room_here())),  # type: ignore[arg-type]
            backlog=ACCEPTED_AT_ONCE,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="dashboard", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if self._failure is not None or time.monotonic() > deadline:
                self.stop()
                raise ManyhandsError(f"the live page did not start within {_START_S:g} s: {self._failure}")
            time.sleep(_LOOK_S)
        # Who waits in the kernel's queue takes no descriptor; uvicorn makes it as short as what it accepts at once.
        self._socket.listen(_WAITING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._app.end(self._farewell)
        deadline = time.monotonic() + _FAREWELL_S
        while self.num_pages and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self.stop()

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException as failure:  # told by whoever waits for the start
            self._failure = failure

    @property
    def num_pages(self) -> int:
        """Pages that are open and live now."""
        return self._app.num_streams

    def stop(self) -> None:
        """End at once, with no word to the pages that are open."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._socket.close()
        if self._thread.is_alive():
            _log.warning("the live page was still answering somebody %.0f s after its end", _STOP_S)


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UserError(f"port {port} is not allowed; 0 (any free one) to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(
            f"the live page cannot listen on {host}:{port} ({error.strerror}); port 0 takes a free one"
        ) from error
