"""Frames between a model server and its workers: whole messages as they come, and a length that is bounded."""

from __future__ import annotations

import io
import json
import socket

import pytest

from manyhands.errors import ManyhandsError
from manyhands.serving.model_parts import LENGTH, MAX_FRAME_BYTES, received
from manyhands.serving.text_replica import WorkerMessages


def framed(message: object) -> bytes:
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def test_messages_are_read_whole_and_as_many_as_have_come() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        messages = WorkerMessages(ours)
        assert messages.read(wait=False) == []
        sent = framed({"number": 1}) + framed({"number": 2})
        theirs.sendall(sent[:-3])
        assert messages.read(wait=True) == [{"number": 1}]
        assert messages.read(wait=False) == []
        theirs.sendall(sent[-3:])
        assert messages.read(wait=True) == [{"number": 2}]
        theirs.close()
        assert messages.read(wait=True) is None


def test_a_length_beyond_the_bound_is_refused_before_anything_is_read() -> None:
    head, said = LENGTH.pack(MAX_FRAME_BYTES + 1), f"announces {MAX_FRAME_BYTES + 1} bytes; at most"
    stream = io.BytesIO(head + b"rest")
    with pytest.raises(ManyhandsError, match=said):
        received(stream)
    assert stream.tell() == LENGTH.size
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(head)
        with pytest.raises(ManyhandsError, match=said):
            WorkerMessages(ours).read(wait=True)
