"""A live page served from a thread of this process, for the duration of a run or a command."""

from __future__ import annotations

import time
from collections.abc import Callable

from manyhands.observe.analyse.view import RunView
from manyhands.serving.hosting import LOOPBACK, Listening, WebThread
from manyhands.serving.page_app import PageApp, require_web

__all__ = ["LOOPBACK", "Dashboard"]

_FAREWELL_S = 3.0
_LOOK_S = 0.01


class Dashboard:
    """Serves views of a run while entered; `url` includes the token. A context manager.

    On exit every open page gets the newest state and `farewell`, within at most three seconds; then the server stops,
    and the pages keep their content.
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
        while self.num_pages and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self.stop()

    @property
    def num_pages(self) -> int:
        """The number of live pages that are open."""
        return self._app.num_streams

    def stop(self) -> None:
        """Stop at once, without notifying open pages."""
        self._web.stop()
