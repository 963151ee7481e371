"""A served model as an ASGI application: POST /predict answers, everything else is its page.

POST /predict   {"inputs": [...]} → {"answers": [...]}, one for each input, or {"error": "one sentence"}

400 no JSON, no inputs, an input that the model cannot take, or headers that contradict themselves
405 not a POST                          408 the body came too slowly
401 the token is missing or wrong       403 another origin         413 too many bytes or inputs
500 the model failed                    503 too many wait, or no worker could answer in time
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from manyhands.errors import format_bytes
from manyhands.observe.analyse.serving_view import Answered, ServingTally
from manyhands.serving.access import Guard
from manyhands.serving.batching import Switchboard
from manyhands.serving.model_replica import MAX_FRAME_BYTES
from manyhands.serving.page_app import SECURE_HEADERS, PageApp
from manyhands.wire.nesting import MOST_NESTED, json_depth

__all__ = ["BodyLimits", "ModelApp", "RequestRefused", "checked_body"]

PREDICT = "/predict"
_POST = ("POST",)

Receive = Callable[[], Awaitable[Any]]
SendMessage = Callable[[Any], Awaitable[None]]


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


class RequestRefused(Exception):
    """A request that gets a status and one sentence instead of an answer."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


class ModelApp:
    """The ASGI application; `page` shows the counters of `tally`."""

    def __init__(
        self,
        switchboard: Switchboard,
        page: PageApp[Any],
        guard: Guard,
        tally: ServingTally,
        limits: BodyLimits,
    ) -> None:
        self._switchboard, self._page, self._guard = switchboard, page, guard
        self._tally, self._limits = tally, limits
        self._held_bytes = 0

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: SendMessage) -> None:
        if scope["type"] != "http" or scope["path"] != PREDICT:
            await self._page(scope, receive, send)
            return
        begun = time.monotonic()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._guard.refusal(scope["method"], headers, methods=_POST)
        if refused is not None:  # of an unknown peer, and not counted
            allow = {"allow": "POST"} if refused.status == 405 else {}
            await self._refuse_unread(refused.status, _error(refused.sentence), allow, receive, send)
            return
        scope.get("state", {}).get("know", lambda: None)()
        body, size = _Body(), 0
        try:
            await self._read(body, headers, receive)
            size = checked_body(body.content, self._limits)
            status, answer = await self._switchboard.ask(body.content, size)
        except RequestRefused as refusal:
            status, answer = refusal.status, _error(refusal.sentence)
        finally:
            self._held_bytes -= len(body.content)
        self._tally.answered(Answered(time.monotonic(), time.monotonic() - begun, status, size))
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
            sentence = f"The request did not come whole within {self._limits.slowest_s:g} s."
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
    try:
        value = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"The body is no JSON ({str(error)[:100]}); {wanted}.") from error
    if json_depth(bytes(body)) > MOST_NESTED:
        raise RequestRefused(
            400, f"The body is nested more than {MOST_NESTED} deep, as no input is; {wanted}."
        )
    inputs = value.get("inputs") if isinstance(value, dict) else None
    if not isinstance(inputs, list) or not inputs:
        raise RequestRefused(400, f"The body has no array of inputs; {wanted}.")
    if len(inputs) > limits.inputs:
        raise RequestRefused(
            413, f"A request has at most {limits.inputs:,} inputs, not {len(inputs):,}; send fewer at a time."
        )
    return len(inputs)


def _error(sentence: str) -> bytes:
    return json.dumps({"error": sentence}).encode()
