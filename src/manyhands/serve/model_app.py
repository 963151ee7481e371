"""A served model as an ASGI application: POST /predict answers, everything else is its page.

POST /predict   {"inputs": [...]} → {"answers": [...]}, one for each input, or {"error": "one sentence"}

400 no JSON, no inputs, or an input that the model cannot take     405 not a POST        408 the body came too slowly
401 the token is missing or wrong       403 another origin         413 too many bytes or inputs
500 the model failed                    503 too many wait, or no worker could answer in time
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.analyse.serving import Answered, ServingTally
from manyhands.errors import format_bytes
from manyhands.serve.guard import Guard, GuardRefusal
from manyhands.serve.server import SECURE_HEADERS, PageApp
from manyhands.serve.switchboard import Switchboard

__all__ = ["BodyLimits", "ModelApp", "RequestRefused", "checked_body"]

PREDICT = "/predict"
_POST = ("POST",)

Receive = Callable[[], Awaitable[Any]]
SendMessage = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """What a request may send."""

    num_bytes: int = 8 << 20
    inputs: int = 1024
    slowest_s: float = 10.0
    """How long a body may take to come."""
    held_bytes: int = 256 << 20
    """Of all requests that have no answer yet."""


class RequestRefused(Exception):
    """A request that gets a status and one sentence instead of an answer."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


class ModelApp:
    """The application; `page` shows what `tally` counts."""

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
        """Answer one request, as ASGI asks."""
        if scope["type"] != "http" or scope["path"] != PREDICT:
            await self._page(scope, receive, send)
            return
        begun = time.monotonic()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._guard.refusal(scope["method"], headers, methods=_POST)
        if refused is not None:  # a stranger's, which is not counted
            await self._respond(send, refused.status, _error(refused.sentence), _extra(refused))
            return
        scope.get("state", {}).get("know", lambda: None)()
        size = 0
        try:
            body = await self._body(headers, receive)
            size = checked_body(body, self._limits)
            status, answer = await self._held(body, size)
        except RequestRefused as refusal:
            status, answer = refusal.status, _error(refusal.sentence)
        self._tally.answered(Answered(time.monotonic(), time.monotonic() - begun, status, size))
        await self._respond(send, status, answer, {"retry-after": "1"} if status == 503 else {})

    async def _held(self, body: bytes, size: int) -> tuple[int, bytes]:
        self._held_bytes += len(body)
        try:
            return await self._switchboard.ask(body, size)
        finally:
            self._held_bytes -= len(body)

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        """The whole body; what is too large is refused before it is read, as far as it says so."""
        most = self._limits.num_bytes
        too_large = RequestRefused(
            413, f"A request has at most {format_bytes(most)}; send fewer inputs at a time."
        )
        told = headers.get("content-length", "")
        if told.isdecimal() and int(told[:20]) > most:
            raise too_large
        if self._held_bytes + int(told[:20] if told.isdecimal() else 0) > self._limits.held_bytes:
            raise RequestRefused(503, "Too many requests are being answered; try again in a moment.")
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.slowest_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestRefused(400, "The connection ended before the request did.")
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            sentence = f"The request did not come whole within {self._limits.slowest_s:g} s."
            raise RequestRefused(408, sentence) from None

    async def _respond(
        self, send: SendMessage, status: int, body: bytes, more: Mapping[str, str] | None = None
    ) -> None:
        shown = {
            **SECURE_HEADERS,
            "content-type": "application/json",
            "content-length": str(len(body)),
            **(more or {}),
        }
        if 400 <= status < 500:  # what is left of its body is not read
            shown["connection"] = "close"
        pairs = [(name.encode(), value.encode()) for name, value in shown.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})


def checked_body(body: bytes, limits: BodyLimits) -> int:
    """How many inputs a request's body has; refused where it is no `{"inputs": [...]}`."""
    wanted = 'send {"inputs": [...]}'
    try:
        value = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"The body is no JSON ({str(error)[:100]}); {wanted}.") from error
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


def _extra(refused: GuardRefusal) -> dict[str, str]:
    return {"allow": "POST"} if refused.status == 405 else {}
