"""The live page as an ASGI application: the page, its events, metrics for scrapers and the report.

    GET /          the page; with ?token=… it keeps the token in a cookie and comes again without it
    GET /events    server-sent events: the sections that changed, about twice a second
    GET /metrics   the run in Prometheus' text form
    GET /report    the page as one file, to keep

All of them show one `RunView` that is made when somebody asks and is shared by all who ask at the same time; a
server that nobody looks at does nothing. Nothing is queued for a slow reader: it gets the newest when it is ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from manyhands.errors import ManyhandsError, UserError
from manyhands.observe.view import RunView
from manyhands.seeing.guard import Guard
from manyhands.seeing.live import POLICY, as_event, live_page
from manyhands.seeing.page import report, sections

if TYPE_CHECKING:
    from starlette.responses import Response

__all__ = ["PageApp", "require_web"]

MAX_STREAMS = 16
"""Pages that may be live at the same time."""

_PERIOD_S = 0.5
_HEARTBEAT_S = 5.0
_FRESH_S = 0.4  # for how long a view is shared
_END_CHECK_S = 0.05

_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

_COME_AGAIN = (
    '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/><meta http-equiv="refresh" content="0; url=/"/>'
    '<title>manyhands</title></head><body><p>Go on to <a href="/">the page</a>.</p></body></html>'
)


def require_web() -> None:
    """Say what to install where the packages that serve pages are missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise UserError("the live page needs the web extra: pip install 'manyhands[web]'") from None


class PageApp:
    """The application; call `end` when the run is over and the server is about to go."""

    def __init__(
        self,
        source: Callable[[], RunView],
        guard: Guard,
        metrics: Callable[[RunView], str],
        *,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._source = source
        self._guard = guard
        self._metrics = metrics
        self._period_s = period_s
        self._lock = asyncio.Lock()
        self._view: RunView | None = None
        self._sections: dict[str, str] = {}
        self._seen_at = -float("inf")
        self._farewell: str | None = None
        self.num_streams = 0

    def end(self, farewell: str) -> None:
        """Let every live page get the newest state and this sentence, and end; from any thread."""
        self._farewell = farewell

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Answer one request, as ASGI asks."""
        if scope["type"] != "http":
            return
        response = await self._answer(scope)
        for name, value in _HEADERS.items():
            response.headers[name] = value
        await response(scope, receive, send)  # type: ignore[arg-type]

    async def _answer(self, scope: Mapping[str, Any]) -> Response:
        from starlette.responses import HTMLResponse, PlainTextResponse

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"]
        offered = _offered(scope) if path == "/" else None
        refused = self._guard.refusal(scope["method"], headers, offered)
        if refused is not None:
            allow = {"allow": "GET, HEAD"} if refused.status == 405 else None
            return PlainTextResponse(refused.sentence + "\n", refused.status, allow)
        answers = {
            "/": self._page,
            "/events": self._events,
            "/metrics": self._scrape,
            "/report": self._report,
        }
        answer = answers.get(path)
        if answer is None:
            return PlainTextResponse("There is no such page here; / is the run.\n", 404)
        if path == "/events" and scope["method"] == "HEAD":
            return PlainTextResponse("", media_type="text/event-stream")
        if offered is None:
            try:
                return await answer()
            except ManyhandsError as error:
                return PlainTextResponse(f"{error}\n", 500)
        # Not an HTTP redirect: one that began at a link of another site would come without the strict cookie.
        response = HTMLResponse(_COME_AGAIN)
        response.set_cookie(self._guard.cookie, self._guard.token, httponly=True, samesite="strict", path="/")
        return response

    async def _page(self) -> Response:
        from starlette.responses import HTMLResponse

        return HTMLResponse(live_page(await self._newest()))

    async def _scrape(self) -> Response:
        from starlette.responses import PlainTextResponse

        text = self._metrics(await self._newest())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _report(self) -> Response:
        from starlette.responses import HTMLResponse

        return HTMLResponse(
            report(await self._newest()),
            headers={"content-disposition": 'attachment; filename="report.html"'},
        )

    async def _events(self) -> Response:
        from starlette.responses import PlainTextResponse, StreamingResponse

        if self.num_streams >= MAX_STREAMS:
            return PlainTextResponse(f"{MAX_STREAMS} pages are open already; close one.\n", 503)
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def stream(self) -> AsyncIterator[bytes]:
        """What one live page gets: all sections, then those that changed, a heartbeat, and the farewell."""
        self.num_streams += 1
        try:
            sent: dict[str, str] = {}
            spoke_at = time.monotonic()
            yield b"retry: 2000\n\n"
            while True:
                farewell = self._farewell  # looked at before the view, so that the last view is newer
                await self._newest(at_once=farewell is not None)
                changed = {key: text for key, text in self._sections.items() if sent.get(key) != text}
                if changed or time.monotonic() - spoke_at > _HEARTBEAT_S:
                    sent.update(changed)
                    spoke_at = time.monotonic()
                    yield as_event("sections", changed) if changed else b": still here\n\n"
                if farewell is not None:
                    yield as_event("end", farewell)
                    return
                await self._pause()
        finally:
            self.num_streams -= 1

    async def _pause(self) -> None:
        until = time.monotonic() + self._period_s
        while self._farewell is None and (rest := until - time.monotonic()) > 0:
            await asyncio.sleep(min(_END_CHECK_S, rest))

    async def _newest(self, *, at_once: bool = False) -> RunView:
        """The view that was made last, or a new one where that is too old; made in a thread, for it reads files."""
        async with self._lock:
            if (
                self._view is None
                or at_once
                or time.monotonic() - self._seen_at > min(_FRESH_S, self._period_s)
            ):
                view = await asyncio.to_thread(self._source)
                if view != self._view:
                    self._view, self._sections = view, await asyncio.to_thread(sections, view)
                self._seen_at = time.monotonic()
            return self._view


def _offered(scope: Mapping[str, Any]) -> str | None:
    values = parse_qs(scope["query_string"].decode("latin-1")).get("token")
    return values[0] if values else None
