"""The ASGI application of a trained model: requests are checked and read within limits, then passed to the workers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from manyhands.errors import format_bytes
from manyhands.observe.analyse.serving_view import Answered, ServingTally
from manyhands.serving.model_parts import MAX_FRAME_BYTES
from manyhands.serving.page_app import SECURE_HEADERS, PageApp, Receive, RequestRefused, SendMessage
from manyhands.serving.routes import MODEL_ROUTES, PAGE_ROUTES, TEXT_ROUTES, Route
from manyhands.serving.text_switchboard import TextSwitchboard, answer_text
from manyhands.serving.worker_switchboard import WorkerSwitchboard
from manyhands.wire.nesting import MOST_NESTED, json_depth


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """Limits of a request's body."""

    num_bytes: int = 8 << 20
    inputs: int = 1024
    slowest_s: float = 10.0  # how long a body may take to come
    held_bytes: int = MAX_FRAME_BYTES // 2
    """Of all requests that have no answer yet; what fits here fits into one batch, too."""
    refused_bytes: int = 64 << 20  # that are still taken in, and dropped, after a request was refused
    refused_s: float = 3.0  # for how long


class ModelApp:
    """The ASGI application; `page` shows the counters of `tally`."""

    def __init__(
        self,
        switchboard: WorkerSwitchboard,
        page: PageApp[Any],
        tally: ServingTally,
        limits: BodyLimits,
        description: Mapping[str, Any],
    ) -> None:
        self._switchboard, self._page, self._tally, self._limits = switchboard, page, tally, limits
        self._routes = {**MODEL_ROUTES, **(TEXT_ROUTES if isinstance(switchboard, TextSwitchboard) else {})}
        self._description = json.dumps(description).encode()
        self._held_bytes = 0

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: SendMessage) -> None:
        if scope["type"] != "http" or scope["path"] in PAGE_ROUTES:
            await self._page(scope, receive, send)
            return
        route = self._routes.get(scope["path"], Route(about="", method=scope["method"]))
        begun = time.monotonic()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self._page.guard.check(
                scope["method"], headers, methods=route.methods, needs_token=route.needs_token
            )
            if scope["path"] not in self._routes:
                asks = " or ".join(path for path, one in self._routes.items() if one.method == "POST")
                raise RequestRefused(404, f"There is nothing at this address; ask with POST {asks}.")
        except RequestRefused as refused:  # of an unknown peer, and not counted
            said = _error(refused.sentence)
            await self._refuse_unread(refused.status, said, refused.headers, receive, send)
            return
        if route.needs_token:
            scope.get("state", {}).get("know", lambda: None)()
        if route.method == "POST":
            await self._answer(begun, scope["path"], headers, receive, send)
        else:
            status, content = self._status(scope["path"])
            await _begin(send, status, content, {} if route.needs_token else {"connection": "close"})
            await send({"type": "http.response.body", "body": content})

    def _status(self, path: str) -> tuple[int, bytes]:
        if path == "/openapi.json":
            return 200, self._description
        is_well = path == "/healthz" or self._switchboard.is_ready
        return (200, b'{"status": "ok"}') if is_well else (503, b'{"status": "no worker can answer"}')

    async def _answer(
        self, begun: float, path: str, headers: Mapping[str, str], receive: Receive, send: SendMessage
    ) -> None:
        body, size = _Body(), 0
        answer: bytes | None
        try:
            await self._read(body, headers, receive)
            if path in TEXT_ROUTES and isinstance(self._switchboard, TextSwitchboard):
                fields, size = checked_object(body.content), 1
                status, answer = await answer_text(self._switchboard, fields, receive, send)
            else:
                size = checked_body(body.content, self._limits)
                status, answer = await self._switchboard.ask(body.content, size)
        except RequestRefused as refusal:
            status, answer = refusal.status, _error(refusal.sentence)
        finally:
            self._held_bytes -= len(body.content)
        self._tally.answered(Answered(time.monotonic(), time.monotonic() - begun, status, size))
        if answer is None:  # sent already
            return
        more = {"retry-after": "1"} if status == 503 else {}
        if body.is_whole:
            await _begin(send, status, answer, more)
            await send({"type": "http.response.body", "body": answer})
        else:
            await self._refuse_unread(status, answer, more, receive, send)

    async def _read(self, body: _Body, headers: Mapping[str, str], receive: Receive) -> None:
        """Read the whole body; one that declares too large a size is rejected before it is read."""
        most = self._limits.num_bytes
        sentence = f"A request has at most {format_bytes(most)}; send fewer inputs at a time."
        too_large = RequestRefused(413, sentence)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > most:
            raise too_large
        try:
            async with asyncio.timeout(self._limits.slowest_s):
                while not body.is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestRefused(400, "The connection ended before the request did.")
                    body.content += message.get("body", b"")
                    body.is_whole = not message.get("more_body", False)
                    self._held_bytes += len(message.get("body", b""))
                    if len(body.content) > most:
                        raise too_large
                    if self._held_bytes > self._limits.held_bytes:
                        sentence = "Too many requests are being answered; try again in a moment."
                        raise RequestRefused(503, sentence)
        except TimeoutError:
            sentence = f"The request did not arrive completely within {self._limits.slowest_s:g} s."
            raise RequestRefused(408, sentence) from None

    async def _refuse_unread(
        self, status: int, answer: bytes, more: Mapping[str, str], receive: Receive, send: SendMessage
    ) -> None:
        """Answer a request before its body was read, then drain the body for a while.

        Most clients read the answer only after sending everything. If the connection were closed before, it would be
        reset and they would never see the reason.
        """
        await _begin(send, status, answer, {**more, "connection": "close"})
        await send({"type": "http.response.body", "body": answer, "more_body": True})
        left = self._limits.refused_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.refused_s):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
        await send({"type": "http.response.body", "body": b""})


@dataclass(slots=True)
class _Body:
    """The part of a request's body received so far."""

    content: bytearray = field(default_factory=bytearray)
    is_whole: bool = False


async def _begin(send: SendMessage, status: int, body: bytes, more: Mapping[str, str]) -> None:
    length = {"content-type": "application/json", "content-length": str(len(body))}
    pairs = [(name.encode(), value.encode()) for name, value in {**SECURE_HEADERS, **length, **more}.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


def checked_body(body: bytes | bytearray, limits: BodyLimits) -> int:
    """Return the number of inputs of a body; rejects one that is not `{"inputs": [...]}`."""
    wanted = 'send {"inputs": [...]}'
    value = _parsed(body, wanted)
    inputs = value.get("inputs") if isinstance(value, dict) else None
    if not isinstance(inputs, list) or not inputs:
        raise RequestRefused(400, f"The body has no array of inputs; {wanted}.")
    if len(inputs) > limits.inputs:
        why = f"A request has at most {limits.inputs:,} inputs, not {len(inputs):,}; send fewer at a time."
        raise RequestRefused(413, why)
    return len(inputs)


def checked_object(body: bytes | bytearray) -> dict[str, Any]:
    """The fields of a body for /generate."""
    wanted = 'send {"prompt": …}'
    value = _parsed(body, wanted)
    if not isinstance(value, dict):
        raise RequestRefused(400, f"The body is no object; {wanted}.")
    return value


def _parsed(body: bytes | bytearray, wanted: str) -> Any:
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"The body is not JSON ({str(error)[:100]}); {wanted}.") from error
    if json_depth(bytes(body)) > MOST_NESTED:
        raise RequestRefused(400, f"The body is nested more than {MOST_NESTED} deep; {wanted}.")
    return value


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number in JSON; null says that one is missing")


def _error(sentence: str) -> bytes:
    return json.dumps({"error": sentence}).encode()
