"""A worker of a model server that writes texts: takes them from an inherited socket between two tokens.

Frames are those of `model_replica`. To the worker: `{"number": …, "prompt": [tokens], "tokens": …, "how": {…},
"within_s": …}` for a text, and `{"cancel": number}`. From it: first `{"ready": PID}`, then after each step an array of
`{"number": …, "text": …}`, the text that has come since; the last one of a text has a `status`, 200 and `tokens`, their
number, or another and an `error`.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from manyhands.places.local.control import RoleContext
from manyhands.places.local.packed_job import load
from manyhands.places.local.status import State
from manyhands.serving.model_parts import LENGTH, PartedModel, frame_length
from manyhands.serving.text_generator import TextGenerator, TextPieces
from manyhands.serving.text_scheduler import TextEvent, TextRefused, TextRequest
from manyhands.workloads.language.sampling import Sampling

_READ_BYTES = 1 << 16


def text_replica(context: RoleContext) -> None:
    import torch

    generator: TextGenerator = load(context.descriptor("model"))
    if isinstance(generator.model, PartedModel):
        generator.model.open(context)
    generator.prepare(context.rank)
    connection = socket.socket(fileno=context.descriptor("requests"))
    with connection, torch.inference_mode():
        generator.warm()
        writer = TextWriter(generator)
        context.mark(0, State.SERVING)
        connection.sendall(_framed({"ready": os.getpid()}))
        context.send({"ready": True})
        messages = WorkerMessages(connection)
        while (heard := messages.read(wait=writer.is_idle)) is not None:
            answers = [answer for one in heard for answer in writer.take(one, time.monotonic())]
            answers += writer.step(time.monotonic())
            with suppress(ConnectionError):  # the server has ended, and so does this at its next `read`
                connection.sendall(_framed(answers))


class TextWriter:
    """The texts of this worker, in the form of messages."""

    def __init__(self, generator: TextGenerator) -> None:
        self._engine = generator.engine(generator.limits)
        self._coding = generator.coding
        self._open: dict[int, _OpenText] = {}

    @property
    def is_idle(self) -> bool:
        return self._engine.is_idle

    def take(self, message: dict[str, Any], now: float) -> Iterator[dict[str, Any]]:
        if "cancel" in message:
            self._engine.cancel(message["cancel"])
            self._open.pop(message["cancel"], None)
            return
        number = message["number"]
        self._open[number] = _OpenText(TextPieces(self._coding))
        request = TextRequest(
            number=number,
            prompt=message["prompt"],
            tokens=message["tokens"],
            how=Sampling(**message["how"]),
            until=now + message["within_s"],
        )
        yield from self._answers(self._engine.submit(request))

    def step(self, now: float) -> Iterator[dict[str, Any]]:
        return self._answers(self._engine.step(now))

    def _answers(self, events: Any) -> Iterator[dict[str, Any]]:
        for event in events:
            if event.number in self._open:
                answer = self._answer(event)
                if len(answer) > 1:
                    yield answer

    def _answer(self, event: TextEvent) -> dict[str, Any]:
        text = self._open[event.number]
        if isinstance(event, TextRefused):
            del self._open[event.number]
            return {"number": event.number, "status": event.status, "error": event.sentence}
        piece = ""
        if event.token is not None:
            piece, text.num_tokens = text.pieces.push(event.token), text.num_tokens + 1
        answer: dict[str, Any] = {"number": event.number}
        if event.is_last:
            del self._open[event.number]
            piece += text.pieces.rest()
            answer |= {"status": 200, "tokens": text.num_tokens}
        return {**answer, "text": piece} if piece else answer


@dataclass(slots=True)
class _OpenText:
    pieces: TextPieces
    num_tokens: int = 0


class WorkerMessages:
    """Reads what has come, without waiting for more."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._held = bytearray()

    def read(self, *, wait: bool) -> list[dict[str, Any]] | None:
        """The whole messages that have come; with `wait` at least one, and None at the end."""
        found = self._whole()
        while (wait and not found) or select.select([self._connection], [], [], 0)[0]:
            content = self._connection.recv(_READ_BYTES)
            if not content:
                return None
            self._held += content
            found += self._whole()
        return found

    def _whole(self) -> list[dict[str, Any]]:
        found = []
        while len(self._held) >= LENGTH.size:
            end = LENGTH.size + frame_length(self._held)
            if len(self._held) < end:
                break
            found.append(json.loads(self._held[LENGTH.size : end]))
            del self._held[:end]
        return found


def _framed(message: Any) -> bytes:
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body
