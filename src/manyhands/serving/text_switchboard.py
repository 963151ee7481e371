"""Texts over HTTP: the driver of `TextDispatch`, and the answers of POST /generate.

    {"prompt": …, "tokens": …, …}                    → {"text": …, "tokens": …}
    {"prompt": …, "tokens": …, …, "stream": true}    → server-sent events: text, …, text, end

A request whose client is gone is cancelled; one that fails before its first text has the status of its failure, and one
that fails later ends with the event `error`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from manyhands.errors import UserError
from manyhands.observe.analyse.serving_view import ServingTally
from manyhands.serving.batching import BatchLimits, KillReplica, RefuseRequest
from manyhands.serving.page_app import SECURE_HEADERS, Receive, RequestRefused, SendMessage, as_event
from manyhands.serving.text_dispatch import CancelText, SendText, TextAction, TextDispatch
from manyhands.serving.text_generator import Prompt, TextGenerator
from manyhands.serving.worker_switchboard import ENDING, WorkerSwitchboard
from manyhands.workloads.language.sampling import Sampling

_SEND_S = 5.0  # for a client to take the rest of its text


@dataclass(slots=True, eq=False)
class _Writing:
    """A text without an end yet."""

    message: dict[str, Any]
    events: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    given: int = 0  # letters that its reader has
    again: int = 0  # letters that a worker has written


class TextSwitchboard(WorkerSwitchboard):
    """Gives texts to workers, and what they write to the requests."""

    core: TextDispatch

    def __init__(
        self,
        generator: TextGenerator,
        limits: BatchLimits,
        tally: ServingTally,
        kill: Callable[[int], None],
    ) -> None:
        super().__init__(tally, kill)
        self.core = TextDispatch(limits)
        self._generator = generator
        self._writing: dict[int, _Writing] = {}

    @property
    def is_ready(self) -> bool:
        return not self._ending and bool(self.core.workers)

    @property
    def unanswered(self) -> int:
        return len(self._writing)

    @property
    def deadline_s(self) -> float:
        return self.core.limits.deadline_s

    async def ask(self, body: bytes | bytearray, size: int) -> tuple[int, bytes]:
        del size  # the texts of one request are limited as those of several are
        try:
            prompts = await asyncio.to_thread(self._generator.inputs, json.loads(body)["inputs"])
        except UserError as error:
            return 400, _json(error=str(error))
        tasks = [asyncio.ensure_future(self._whole(prompt)) for prompt in prompts]
        try:
            return 200, _json(answers=[{"text": text} for text in await asyncio.gather(*tasks)])
        except RequestRefused as refused:
            return refused.status, _json(error=refused.sentence)
        finally:
            for task in tasks:
                task.cancel()

    async def prompt(self, fields: dict[str, Any]) -> Prompt:
        """Checked in a thread: a prompt of megabytes takes a while."""
        try:
            return await asyncio.to_thread(self._generator.prompt, fields)
        except UserError as error:
            raise RequestRefused(400, str(error)) from error

    async def _whole(self, prompt: Prompt) -> str:
        async with self.writing(prompt) as events:
            return "".join([event.get("text", "") async for event in events])

    @asynccontextmanager
    async def writing(self, prompt: Prompt) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """What comes of the text, the last with `tokens`; RequestRefused where it fails. On exit it is cancelled."""
        if self._ending:
            raise RequestRefused(503, ENDING)
        self._number += 1
        number = self._number
        how = {name: getattr(prompt, name) for name in asdict(Sampling())}
        message = {"prompt": self._generator.tokens_of(prompt), "tokens": prompt.tokens, "how": how}
        one = self._writing[number] = _Writing({"number": number, **message})
        try:
            self._do(self.core.asked(number, time.monotonic()))
            yield self._events(one)
        finally:
            del self._writing[number]
            self._do(self.core.ended(number))

    @staticmethod
    async def _events(one: _Writing) -> AsyncIterator[dict[str, Any]]:
        while True:
            event = await one.events.get()
            if "error" in event:
                raise RequestRefused(event["status"], event["error"])
            yield event
            if "status" in event:
                return

    def _state(self, worker: int) -> str:
        if worker not in self.core.workers:
            return "starting"
        return "computing" if self.core.has_texts(worker) else "free"

    def _ready(self, worker: int) -> None:
        self._do(self.core.ready(worker, time.monotonic()))

    def _gone(self, worker: int) -> None:
        self._do(self.core.gone(worker, time.monotonic()))

    def _heard(self, worker: int, message: Any) -> None:
        self.core.heard(worker, time.monotonic())
        for event in message:
            one = self._writing.get(event["number"])
            if one is None:  # its client is gone
                continue
            text = event.get("text", "")
            new = text[max(0, one.given - one.again) :]  # the rest was written by a worker that died
            one.again += len(text)
            one.given += len(new)
            if new or "status" in event:
                one.events.put_nowait({**event, "text": new} if "error" not in event else event)

    def _act(self, action: TextAction) -> None:
        match action:
            case SendText(worker, request, within_s):
                connection, one = self._connections[worker], self._writing[request]
                one.again = 0
                connection.inputs += 1
                connection.batches += 1
                self._tally.batch(1)
                connection.send(_json(**one.message, within_s=within_s))
            case CancelText(worker, request):
                if worker in self._connections:
                    self._connections[worker].send(_json(cancel=request))
            case RefuseRequest(request, status, sentence):
                self._refuse_one(request, status, sentence)
            case KillReplica(worker):
                self._kill(worker)

    def _refuse_all(self) -> None:
        for number in self._writing:
            self._refuse_one(number, 503, ENDING)

    def _refuse_one(self, request: int, status: int, sentence: str) -> None:
        if request in self._writing:
            self._writing[request].events.put_nowait({"status": status, "error": sentence})


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


async def answer_text(
    switchboard: TextSwitchboard, fields: dict[str, Any], receive: Receive, send: SendMessage
) -> tuple[int, bytes | None]:
    """Status and JSON of the answer, None where it was sent already, as a stream or to nobody."""
    streams = fields.pop("stream", False)
    if type(streams) is not bool:
        raise RequestRefused(400, f"stream is {str(streams)[:40]!r}; it must be true or false.")
    prompt = await switchboard.prompt(fields)
    writing = asyncio.ensure_future(_written(switchboard, prompt, send if streams else None))
    leaving = asyncio.ensure_future(_left(receive))
    try:
        async with asyncio.timeout(
            switchboard.deadline_s + _SEND_S
        ):  # a client that reads nothing for that long is left
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        return writing.result() if writing.done() else (499, None)
    except TimeoutError:
        return 503, None
    finally:
        for task in (writing, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, RequestRefused):
                await task


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _written(
    switchboard: TextSwitchboard, prompt: Prompt, send: Callable[[Any], Awaitable[None]] | None
) -> tuple[int, bytes | None]:
    pieces, started = list[str](), False
    try:
        async with switchboard.writing(prompt) as events:
            async for event in events:
                pieces.append(event.get("text", ""))
                if send is not None:
                    if not started:
                        started = True
                        await send(_stream_head())
                    if pieces[-1]:
                        await send(_part(as_event("text", {"text": pieces[-1]})))
                if "tokens" in event:
                    if send is None:
                        return 200, _json(text="".join(pieces), tokens=event["tokens"])
                    await send(_part(as_event("end", {"tokens": event["tokens"]}), more=False))
    except RequestRefused as refused:
        if send is None or not started:
            raise
        await send(
            _part(as_event("error", {"status": refused.status, "error": refused.sentence}), more=False)
        )
        return refused.status, None
    return 200, None


def _stream_head() -> dict[str, Any]:
    pairs = {**SECURE_HEADERS, "content-type": "text/event-stream"}.items()
    headers = [(name.encode(), value.encode()) for name, value in pairs]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _part(content: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}
