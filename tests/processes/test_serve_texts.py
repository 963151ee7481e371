"""A model that writes text, served by real processes: streams, clients that leave, deadlines, a worker killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from kills import await_that
from manyhands.serving.batching import BatchLimits
from manyhands.serving.model_server import ModelServer, ServeOptions
from manyhands.serving.text_generator import TextGenerator
from manyhands.workloads.language.gpt import GPT
from served_load import connected

TEXTS = [("a", 60), ("twelve bytes", 7), ("é", 90), ("xyz", 30), ("ab", 1), ("abcdef", 200)]


def generator() -> TextGenerator:
    torch.manual_seed(0)
    model = GPT(context=32, layers=2, width=16, heads=2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    made = TextGenerator(model, 32)
    made.task = "gpt"
    return made


@pytest.fixture
def server() -> Iterator[ModelServer]:
    options = ServeOptions(workers=1, batches=BatchLimits(batch=4, deadline_s=20.0))
    with ModelServer(generator(), "a model", options) as running:
        yield running


def ask(server: ModelServer, path: str, body: Any, token: str | None = None) -> tuple[int, str]:
    with closing(connected(server)) as connection:
        headers = {"Authorization": f"Bearer {token or server.token}"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def expected(prompt: str, tokens: int) -> str:
    one = generator()
    (answer,) = one.answers(one.inputs([{"prompt": prompt, "tokens": tokens}]))
    return str(answer["text"])


def events_of(stream: str) -> list[tuple[str, Any]]:
    found = []
    for block in stream.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_texts_asked_for_together_are_those_that_each_gives_alone(server: ModelServer) -> None:
    def whole(text: tuple[str, int]) -> str:
        status, body = ask(server, "/generate", {"prompt": text[0], "tokens": text[1]})
        assert status == 200, body
        assert json.loads(body)["tokens"] == text[1]
        return str(json.loads(body)["text"])

    def streamed(text: tuple[str, int]) -> str:
        status, body = ask(server, "/generate", {"prompt": text[0], "tokens": text[1], "stream": True})
        assert status == 200, body
        *pieces, (name, end) = events_of(body)
        assert (name, end) == ("end", {"tokens": text[1]})
        assert text[1] < 60 or len(pieces) > 1, "it comes in parts"
        return "".join(piece["text"] for name, piece in pieces if name == "text")

    with ThreadPoolExecutor(2 * len(TEXTS)) as clients:
        answers = [clients.submit(how, text) for text in TEXTS for how in (whole, streamed)]
        found = [answer.result() for answer in answers]
    assert found == [expected(*text) for text in TEXTS for _ in range(2)]
    status, body = ask(server, "/predict", {"inputs": ["a", {"prompt": "ab", "tokens": 3}]})
    assert (status, json.loads(body)["answers"]) == (
        200,
        [{"text": expected("a", 200)}, {"text": expected("ab", 3)}],
    )


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": "a" * 33}, 400, "prompt has 33 bytes; the model takes 1 to 32"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature is -1"),
        ({"prompt": "a", "stream": 1}, 400, "stream is '1'; it must be true or false"),
        ({"tokens": 3}, 400, "prompt is ''"),
        (["a"], 400, "The body is no object"),
    ],
)
def test_what_makes_no_sense_gets_a_sentence(server: ModelServer, body: Any, status: int, said: str) -> None:
    found, answer = ask(server, "/generate", body)
    assert found == status
    assert said in json.loads(answer)["error"]
    assert ask(server, "/generate", body, token="wrong-token-of-16")[0] == 401


def test_the_text_of_a_client_that_leaves_is_cancelled(server: ModelServer) -> None:
    with closing(connected(server)) as connection:
        body = json.dumps({"prompt": "a", "tokens": 4096, "stream": True})
        connection.request("POST", "/generate", body, {"Authorization": f"Bearer {server.token}"})
        assert connection.getresponse().read(10)
        assert server.view().workers[0].state == "computing"
    await_that(lambda: server.view().workers[0].state == "free", "the worker to be free")
    await_that(lambda: dict(server.view().by_status).get(499) == 1, "the request to be counted")


def test_a_text_continues_where_it_was_when_its_worker_dies(server: ModelServer) -> None:
    with ThreadPoolExecutor(1) as client:
        body = {"prompt": "a", "tokens": 3000, "stream": True}
        answer = client.submit(ask, server, "/generate", body)
        await_that(lambda: server.view().workers[0].state == "computing", "the text to begin")
        os.kill(server.view().workers[0].pid, signal.SIGKILL)
        status, stream = answer.result()
    assert status == 200
    *pieces, (name, _) = events_of(stream)
    assert name == "end"
    assert "".join(piece["text"] for _, piece in pieces) == expected("a", 3000)


def test_a_text_that_is_not_complete_in_time_is_refused() -> None:
    options = ServeOptions(workers=1, batches=BatchLimits(deadline_s=0.3))
    with ModelServer(generator(), "a model", options) as server:
        status, body = ask(server, "/generate", {"prompt": "a", "tokens": 4096})
        assert status == 503
        assert "ask for fewer" in json.loads(body)["error"]
        status, stream = ask(server, "/generate", {"prompt": "a", "tokens": 4096, "stream": True})
        name, data = events_of(stream)[-1]
        assert (status, name, data["status"]) == (200, "error", 503)
        assert ask(server, "/generate", {"prompt": "a", "tokens": 2})[0] == 200
