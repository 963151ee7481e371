"""The live page as an ASGI application, and the guard of its server: the page, its events, metrics and the report.

    GET /          the page's frame, the same for everybody: it needs no token and says nothing of the run
    GET /events    what fills it: the sections that changed, about twice a second, in the form of server-sent events
    GET /metrics   the run in Prometheus' text form
    GET /report    the page as one file, to keep

All of them show one `RunView`, made on request and shared by simultaneous requests; without requests the server does
nothing. Nothing is queued for a slow reader: it gets the newest when it is ready. A connection that has shown no token
is closed after one answer.

The token is in the address's fragment (`/#token=…`), which browsers keep to themselves. The page's script (`live.js`)
moves it into the tab's session storage, which belongs to this port alone, and sends it as a header. The script changes
only what differs, element by element, so that the scroll position and the keyboard's focus stay. It sends requests to
its own server alone, and keeps the last content when that is gone.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from manyhands.errors import ManyhandsError, UserError
from manyhands.observe.analyse.view import RunView
from manyhands.observe.draw.page import PAGE_STYLE, report, sections, title_of
from manyhands.observe.draw.paper import document
from manyhands.serving.routes import PAGE_ROUTES

if TYPE_CHECKING:
    from starlette.responses import Response

View = TypeVar("View")
Receive = Callable[[], Awaitable[Any]]  # of ASGI
SendMessage = Callable[[Any], Awaitable[None]]

MAX_STREAMS = 16  # pages that may be live at the same time

_PERIOD_S = 0.5
_HEARTBEAT_S = 5.0
_FRESH_S = 0.4  # seconds for which a view is shared
_END_CHECK_S = 0.05

_STYLE = PAGE_STYLE + files("manyhands.serving").joinpath("live.css").read_text()
_SCRIPT = files("manyhands.serving").joinpath("live.js").read_text()


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


SECURE_HEADERS = {
    # what a browser lets the page do: run this script, use this style, ask its own server
    "content-security-policy": f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def require_web() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise UserError("the live page needs the web extra: pip install 'manyhands[web]'") from None


# Access control. Web pages of other origins run in the same browser and can reach loopback addresses, so listening on
# 127.0.0.1 does not protect by itself. A request must meet five conditions: its length is given in one way only; its
# `Host` is a name and a port of this server (which excludes DNS rebinding); its `Origin`, if any, is that host; its
# method fits the path; and it has the run's token in a header. Cookies are not used: a browser sends the cookies of
# 127.0.0.1 to every port of that address, including servers of other users. Content that is the same for everyone and
# reveals nothing of the run needs no token.

READING = ("GET", "HEAD")  # methods of what is shown

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::[0-9]{0,5})?", re.ASCII)
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class RequestRefused(Exception):
    """A request that gets an HTTP status, headers and one sentence instead of an answer."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The rules for one server: pure decisions about the method, the headers and the address of a request.

    `names` are the host names it is reached by, besides those of loopback. With `any_address` every literal IP
    address will do as well: a name is what an attacker can re-bind, an address is not.
    """

    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    names: frozenset[str] = frozenset()
    any_address: bool = False

    def check(
        self,
        method: str,
        headers: Mapping[str, str],
        *,
        needs_token: bool = True,
        methods: tuple[str, ...] = READING,
    ) -> None:
        """RequestRefused where a rule is broken; header names are in lower case, `methods` are those allowed."""
        if "content-length" in headers and "transfer-encoding" in headers:
            # Request smuggling: a proxy may use one length and this server the other.
            why = "A request has Content-Length or Transfer-Encoding, not both; leave one of them out."
            raise RequestRefused(400, why)
        host = headers.get("host", "")
        found = _HOST.fullmatch(host.lower())  # `::1` of `[::1]:80`, `localhost` of `LocalHost:80`
        if host and found is None:
            why = "The Host header is not a name and a port; use the address that was printed."
            raise RequestRefused(400, why)
        name = (found[1] or found[2]) if found is not None else ""
        ours = name in _LOOPBACK_NAMES or name in self.names or (self.any_address and _is_address(name))
        if not ours:
            why = "The Host header does not name this server; use the address that it printed."
            raise RequestRefused(403, why)
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            raise RequestRefused(403, "Pages of other origins cannot read this one.")
        if method not in methods:
            why = f"This address only allows {methods[0]}."
            raise RequestRefused(405, why, allow=", ".join(methods))
        if needs_token and not self.has_token(headers):
            raise RequestRefused(
                401,
                "The token is missing or wrong; open the complete address that was printed, or send "
                "Authorization: Bearer TOKEN.",
                www_authenticate="Bearer",
            )

    def has_token(self, headers: Mapping[str, str]) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(bearer.encode(), self.token.encode())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Drawn(Generic[View]):
    """The renderers of a kind of view: as a page, by section, and as a file."""

    title: Callable[[View], str]
    sections: Callable[[View], dict[str, str]]
    report: Callable[[View], str]


RUN_PAGE: Drawn[RunView] = Drawn(title=title_of, sections=sections, report=report)  # that of a run


def live_page() -> str:
    lead = (
        '<div id="bar"><p id="line" class="quiet" role="status">connecting</p>'
        '<button id="save" type="button">Save as a report</button></div>\n'
        "<noscript><p>The live page needs its script; <code>manyhands show RUN --as file</code> writes a page without "
        "one.</p></noscript>\n"
    )
    return document("manyhands", (), style=_STYLE, lead=lead, script=_SCRIPT)


def as_event(name: str, value: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(value)}\n\n".encode()


class PageApp(Generic[View]):
    """The ASGI application; call `end` when the run is over and the server is about to stop."""

    def __init__(
        self,
        source: Callable[[], View],
        guard: Guard,
        metrics: Callable[[View], str],
        *,
        drawn: Drawn[View] = RUN_PAGE,  # type: ignore[assignment] # views of a run, unless told otherwise
        period_s: float = _PERIOD_S,
    ) -> None:
        self._source, self.guard, self._metrics = source, guard, metrics
        self._drawn, self._period_s = drawn, period_s
        self._lock = asyncio.Lock()
        self._view: View | None = None
        self._sections: dict[str, str] = {}
        self._viewed_at = -float("inf")
        self._farewell: str | None = None
        self.num_streams = 0  # pages that are live now

    def end(self, farewell: str) -> None:
        """Send every live page the newest state and this sentence, then end its stream; from any thread."""
        self._farewell = farewell

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: SendMessage) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        has_token = self.guard.has_token(headers)
        if has_token:
            scope.get("state", {}).get("know", lambda: None)()
        # Counted before anything is awaited, so that concurrent requests cannot exceed the limit.
        streams = scope["path"] == "/events" and scope["method"] == "GET" and has_token
        is_full = streams and self.num_streams >= MAX_STREAMS
        self.num_streams += streams and not is_full
        try:
            response = await self._answer(scope, headers, is_full=is_full)
            for name, value in SECURE_HEADERS.items():
                response.headers[name] = value
            if not has_token or response.status_code == 400:  # the start of the next request may be unknown
                response.headers["connection"] = "close"
            await response(scope, receive, send)  # type: ignore[arg-type]
        finally:
            self.num_streams -= streams and not is_full

    async def _answer(
        self, scope: Mapping[str, Any], headers: Mapping[str, str], *, is_full: bool
    ) -> Response:
        from starlette.responses import HTMLResponse, PlainTextResponse, StreamingResponse

        path = scope["path"]
        try:
            needs_token = path not in PAGE_ROUTES or PAGE_ROUTES[path].needs_token
            self.guard.check(scope["method"], headers, needs_token=needs_token)
        except RequestRefused as refused:
            return PlainTextResponse(refused.sentence + "\n", refused.status, refused.headers)
        if path not in PAGE_ROUTES:
            return PlainTextResponse("No such page; the run is at /.\n", 404)
        if path == "/events" and scope["method"] == "HEAD":
            return PlainTextResponse("", media_type="text/event-stream")
        if is_full:
            return PlainTextResponse(f"{MAX_STREAMS} pages are already open; close one.\n", 503)
        if path == "/":
            return HTMLResponse(live_page())
        if path == "/events":
            return StreamingResponse(self.stream(), media_type="text/event-stream")
        try:
            view = await self._newest()
            if path == "/report":
                named = {"content-disposition": 'attachment; filename="report.html"'}
                return HTMLResponse(self._drawn.report(view), headers=named)
            prometheus = "text/plain; version=0.0.4; charset=utf-8"
            return PlainTextResponse(self._metrics(view), media_type=prometheus)
        except ManyhandsError as error:
            return PlainTextResponse(f"{error}\n", 500)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the events of one live page: title, all sections, then changed ones, heartbeats, the farewell."""
        sent: dict[str, str] = {}
        title, spoke_at = "", time.monotonic()
        while True:
            farewell = self._farewell  # read before the view, so that the last view is newer
            view = await self._newest(at_once=farewell is not None)
            if title != self._drawn.title(view):
                title = self._drawn.title(view)
                yield as_event("title", title)
            changed = {key: text for key, text in self._sections.items() if sent.get(key) != text}
            if changed or time.monotonic() - spoke_at > _HEARTBEAT_S:
                sent.update(changed)
                spoke_at = time.monotonic()
                yield as_event("sections", changed) if changed else b": still here\n\n"
            if farewell is not None:
                yield as_event("end", farewell)
                return
            until = time.monotonic() + self._period_s
            while self._farewell is None and (rest := until - time.monotonic()) > 0:
                await asyncio.sleep(min(_END_CHECK_S, rest))

    async def _newest(self, *, at_once: bool = False) -> View:
        """Return the latest view, or a new one where it is too old; made in a thread, because it reads files."""
        async with self._lock:
            old = time.monotonic() - self._viewed_at > min(_FRESH_S, self._period_s)
            if self._view is None or at_once or old:
                view = await asyncio.to_thread(self._source)
                if view != self._view:
                    self._view, self._sections = view, await asyncio.to_thread(self._drawn.sections, view)
                self._viewed_at = time.monotonic()
            return self._view
