"""A worker of a model server: reads batches of requests from an inherited socket, and writes the answers.

A frame is a 4-byte big-endian length and that much JSON, so frames cannot carry code. To the worker: an array of
request bodies, each `{"inputs": [...]}`. From the worker: first `{"ready": PID}`, then for each batch an array with
one `{"status": …, ...}` per request, in order: `answers`, or an `error` in one sentence.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from manyhands.errors import ManyhandsError, UserError, format_bytes
from manyhands.places.local.control import RoleContext
from manyhands.places.local.packed_job import load
from manyhands.places.local.status import State
from manyhands.serving.model_parts import LENGTH, MAX_FRAME_BYTES, PartedModel, received
from manyhands.workloads.predictor import Predictor

_MOST_SHOWN = 500  # characters of an error message
_MOST_BYTES = MAX_FRAME_BYTES - (
    4 << 20
)  # of the answers in a frame; the rest is for errors in the place of others


def replica(context: RoleContext) -> None:
    import torch

    predictor: Predictor[Any] = load(context.descriptor("model"))
    if isinstance(predictor.model, PartedModel):
        predictor.model.open(context)
    predictor.prepare()
    connection = socket.socket(fileno=context.descriptor("requests"))
    with connection, connection.makefile("rb") as stream, torch.inference_mode():
        predictor.warm()
        context.mark(0, State.SERVING)
        connection.sendall(_framed(json.dumps({"ready": os.getpid()}).encode()))
        context.send({"ready": True})
        while (batch := received(stream)) is not None:
            answers = answers_frame(answer_batch(predictor, json.loads(batch)))
            with suppress(ConnectionError):  # the server has ended, and so does this at its next `received`
                connection.sendall(answers)


def answer_batch(predictor: Predictor[Any], bodies: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the result of each request of a batch; invalid requests get an error and do not affect the others."""
    results: dict[int, dict[str, Any]] = {}
    parts: dict[int, Any] = {}
    for number, body in enumerate(bodies):
        try:
            parts[number] = predictor.inputs(body["inputs"])
        except Exception as error:  # otherwise this worker would die of it, and the next one, too
            results[number] = _failed(error)
    results |= _computed(predictor, parts, [len(body["inputs"]) for body in bodies])
    return [results[number] for number in range(len(bodies))]


def _computed(
    predictor: Predictor[Any], parts: dict[int, Any], sizes: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Compute all requests at once or, if that fails, one by one, so that the valid ones get answers."""
    if not parts:
        return {}
    try:
        answers = iter(predictor.answers(predictor.together(list(parts.values()))))
        return {
            number: {"status": 200, "answers": [next(answers) for _ in range(sizes[number])]}
            for number in parts
        }
    except Exception as error:
        if len(parts) == 1:
            (number,) = parts
            return {number: _failed(error)}
    return {
        number: answer
        for one, part in parts.items()
        for number, answer in _computed(predictor, {one: part}, sizes).items()
    }


def _failed(error: Exception) -> dict[str, Any]:
    if isinstance(error, UserError):
        return {"status": 400, "error": str(error)[:_MOST_SHOWN]}
    traceback.print_exception(error, file=sys.stderr)
    said = isinstance(error, ManyhandsError)
    why = str(error) if said else f"the model failed: {type(error).__name__}: {error}"
    return {"status": 500, "error": why[:_MOST_SHOWN]}


def answers_frame(results: Sequence[dict[str, Any]], most_bytes: int = _MOST_BYTES) -> bytes:
    """Return the frame of a batch's answers; what JSON lacks or is too large becomes an error of its request alone."""
    bodies, left = [], most_bytes
    for one in results:
        body = _encoded(one)
        if len(body) > most_bytes:
            size = f"{format_bytes(len(body))}, and at most {format_bytes(most_bytes)} can be sent"
            body = _encoded({"status": 413, "error": f"the answers have {size}; send fewer inputs at a time"})
        elif len(body) > left:
            why = "the answers of a batch were too large together; try again in a moment"
            body = _encoded({"status": 503, "error": why})
        left -= len(body)
        bodies.append(body)
    return _framed(b"[" + b",".join(bodies) + b"]")


def _encoded(result: dict[str, Any]) -> bytes:
    try:
        return json.dumps(result, allow_nan=False).encode()
    except ValueError:
        why = "is not a finite number: the input is too large for it, or its training diverged"
    except (TypeError, RecursionError) as error:  # of a task's own `write_answer`
        why = f"is not JSON: {error}"
    return json.dumps({"status": 500, "error": f"the model's answer {why}"[:_MOST_SHOWN]}).encode()


def _framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body
