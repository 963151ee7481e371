"""What a served model says to requests of every kind, without a socket and without a worker process."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import socket
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from manyhands.errors import UserError
from manyhands.observe.analyse.serving_view import (
    ReplicaState,
    ServingTally,
    ServingView,
)
from manyhands.observe.draw.serving_page import (
    serving_metrics,
    serving_report,
    serving_sections,
    serving_title,
)
from manyhands.serving.batching import BatchLimits, Switchboard
from manyhands.serving.hosting import Listening
from manyhands.serving.model_app import BodyLimits, ModelApp, checked_body
from manyhands.serving.model_parts import LENGTH
from manyhands.serving.model_replica import answer_batch, answers_frame
from manyhands.serving.model_server import ServeOptions
from manyhands.serving.page_app import Drawn, Guard, PageApp, RequestRefused
from manyhands.serving.routes import MODEL_ROUTES, PAGE_ROUTES, openapi
from manyhands.wire.nesting import MOST_NESTED, json_depth
from manyhands.workloads.predictor import Predictor

GUARD = Guard(token="secret")
LIMITS = BodyLimits(num_bytes=1000, inputs=3, slowest_s=0.05)
GOOD = {"authorization": "Bearer secret", "host": "127.0.0.1:1"}


class Doubler(Predictor[list[float]]):
    """Doubles numbers; 13 is beyond it."""

    takes = "a number"
    example = 1.0

    def blocks(self, source: str, read_as: Any) -> Any:
        raise AssertionError

    def inputs(self, values: Sequence[Any]) -> list[float]:
        for value in values:
            if not isinstance(value, int | float):
                raise UserError(f"{value!r} is no number")
        return [float(value) for value in values]

    def together(self, parts: Sequence[list[float]]) -> list[float]:
        return [number for part in parts for number in part]

    def answers(self, inputs: list[float]) -> list[Any]:
        if 13 in inputs:
            raise ArithmeticError("unlucky")
        return [2 * number for number in inputs]


class Alone:
    """In the place of a switchboard: one worker, which is this process."""

    is_ready = True

    async def ask(self, body: bytes, size: int) -> tuple[int, bytes]:
        (said,) = answer_batch(Doubler(), [json.loads(body)])
        assert size == len(json.loads(body)["inputs"])
        return said.pop("status"), json.dumps(said).encode()


def view(**changes: Any) -> ServingView:
    tally = ServingTally(0.0)
    fields = {
        "model": "runs/d", "task": "digits", "takes": "a <row>", "example": "[0]", "waiting": 2, "wanted": 2,
        "workers": (ReplicaState(number=1, pid=7, state="free", batches=3, inputs=9),),
        **tally.figures(3.0),
    }  # fmt: skip
    return ServingView(**{**fields, **changes})


def app(tally: ServingTally | None = None, limits: BodyLimits = LIMITS) -> ModelApp:
    drawn = Drawn(title=serving_title, sections=serving_sections, report=serving_report)
    page: PageApp[Any] = PageApp(view, GUARD, serving_metrics, drawn=drawn, period_s=0.0)
    about = openapi("double", Doubler.takes, Doubler.example, limits.inputs)
    return ModelApp(Alone(), page, tally or ServingTally(0.0), limits, about)  # type: ignore[arg-type]


def asked(
    content: Any = b"", *, method: str = "POST", path: str = "/predict", **headers: str
) -> httpx.Response:
    body = content if isinstance(content, bytes) or callable(content) else json.dumps(content).encode()

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app())  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
            sent = body() if callable(body) else body
            return await client.request(method, path, content=sent, headers={**GOOD, **headers})

    return asyncio.run(ask())


def test_the_description_is_of_every_address_and_every_address_is_described() -> None:
    described = asked(method="GET", path="/openapi.json").json()
    assert described["openapi"] == "3.1.0"
    paths = described["paths"]
    assert list(paths) == [*MODEL_ROUTES, *PAGE_ROUTES]
    for path, methods in paths.items():
        ((method, operation),) = methods.items()
        for token in (True, False):
            headers = {} if token else {"authorization": ""}
            body = {"inputs": [1]} if method == "post" else b""
            answer = asked(body, method="HEAD" if path == "/events" else method.upper(), path=path, **headers)
            expected = 200 if token or operation["security"] == [] else 401
            assert answer.status_code == expected, path
            described_as = operation["responses"][str(expected)]["content"]
            assert answer.headers["content-type"].partition(";")[0] in described_as, path
        other = asked(method="GET" if method == "post" else "POST", path=path)
        assert (other.status_code, "405" in operation["responses"]) == (405, True)
        assert method.upper() in other.headers["allow"]
    for method in ("GET", "POST", "PUT"):
        elsewhere = asked({"inputs": [1]}, method=method, path="/predictions")
        assert (elsewhere.status_code, "ask with POST /predict" in elsewhere.json()["error"]) == (404, True)
    sent = paths["/predict"]["post"]["requestBody"]["content"]["application/json"]
    assert sent["schema"]["properties"]["inputs"]["maxItems"] == LIMITS.inputs
    assert asked(sent["example"]).json() == {"answers": [2.0]}, "the example is one"


def test_probes_need_no_token_and_say_whether_a_worker_can_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = {"method": "GET", "authorization": ""}
    for path in ("/healthz", "/readyz"):
        answer = asked(path=path, **probe)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    monkeypatch.setattr(Alone, "is_ready", False)
    assert asked(path="/healthz", **probe).status_code == 200
    late = asked(path="/readyz", **probe)
    assert (late.status_code, late.json()) == (503, {"status": "no worker can answer"})
    assert asked(path="/healthz", host="evil.example", **probe).status_code == 403


def test_a_switchboard_is_ready_from_its_first_free_worker_to_its_end() -> None:
    board = Switchboard(BatchLimits(), ServingTally(0.0), lambda _: None)
    assert not board.is_ready
    board.core.free(1, 0.0)
    assert board.is_ready
    board.close()
    assert not board.is_ready


def test_names_and_a_token_may_be_given() -> None:
    listening = Listening("127.0.0.1", 0, "the server", names=("Model.svc",), token="of-sixteen-letters")
    listening.socket.close()
    headers = {"host": "model.svc:80", "authorization": "Bearer of-sixteen-letters"}
    listening.guard.check("GET", headers)
    with pytest.raises(RequestRefused, match="does not name this server"):
        listening.guard.check("GET", {**headers, "host": "other.svc"})
    for token in ("short", "with a space in between", "ünïcödé-of-sixteen-letters"):
        with pytest.raises(UserError, match="at least 16 letters"):
            ServeOptions(token=token)


def test_no_part_of_an_answer_waits_for_the_client_to_confirm_another() -> None:
    """Which took 40 ms on every connection that was kept: asyncio leaves sockets as they are that it has not opened."""
    listening = Listening("127.0.0.1", 0, "the server")
    with listening.socket, socket.create_connection(listening.socket.getsockname(), 5):
        accepted, _ = listening.socket.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_request_gets_an_answer_for_each_input() -> None:
    answer = asked({"inputs": [1, 2.5]})
    assert (answer.status_code, answer.json()) == (200, {"answers": [2.0, 5.0]})
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "image/png"])
def test_a_body_is_read_as_json_whatever_its_content_type_says(kind: str) -> None:
    """That of `curl -d`, say; what is not JSON is refused as that."""
    assert asked({"inputs": [1]}, **{"content-type": kind}).json() == {"answers": [2.0]}
    assert asked(b"--x", **{"content-type": kind}).status_code == 400


async def in_pieces() -> Any:
    for _ in range(200):
        yield b"1" * 10


async def slowly() -> Any:
    yield b"{"
    await asyncio.sleep(5)
    yield b"}"


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b"", 400, "The body is not JSON"),
        (b"inputs=1", 400, "The body is not JSON"),
        (b'{"inputs": [NaN]}', 400, "NaN is no number in JSON; null says that one is missing"),
        (b'{"inputs": [1, -Infinity]}', 400, "-Infinity is no number in JSON"),
        (gzip.compress(b'{"inputs": [1]}', mtime=0), 400, "The body is not JSON"),
        (b'{"inputs": [1]}'.decode().encode("utf-16"), 400, "The body is not JSON"),
        (b"[" * 900, 400, "The body is not JSON"),
        ([1, 2], 400, 'no array of inputs; send {"inputs": [...]}'),
        ({"inputs": 3}, 400, "no array of inputs"),
        ({"inputs": []}, 400, "no array of inputs"),
        ({"input": [1]}, 400, "no array of inputs"),
        ({"inputs": ["a cat"]}, 400, "'a cat' is no number"),
        (b'{"inputs": ' + b"[" * 70 + b"]" * 70 + b"}", 400, "nested more than 64 deep"),
        ({"inputs": ["[" * 70]}, 400, "is no number"),
        ({"inputs": [1, 2, 3, 4]}, 413, "at most 3 inputs, not 4"),
        (b" " * 1001, 413, "at most 1000 B"),
        (in_pieces, 413, "at most 1000 B"),
        (slowly, 408, "did not arrive completely within 0.05 s"),
        ({"inputs": [13]}, 500, "the model failed: ArithmeticError: unlucky"),
    ],
)
def test_what_makes_no_sense_gets_a_sentence(content: Any, status: int, said: str) -> None:
    answer = asked(content)
    assert answer.status_code == status
    assert said in answer.json()["error"]


def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    """It has its answer before the first byte; what it still sends is dropped, so that it comes to read that."""
    sent: list[Any] = []
    left = 3

    async def receive() -> Any:
        nonlocal left
        left -= 1
        assert [one["type"] for one in sent] == ["http.response.start", "http.response.body"]
        assert sent[1]["more_body"], "the connection stays open"
        return {"type": "http.request", "body": b" " * 100, "more_body": left > 0}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [
        (b"host", b"127.0.0.1:1"),
        (b"authorization", b"Bearer secret"),
        (b"content-length", b"9" * 4000),
    ]
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers}
    asyncio.run(app()(scope, receive, send))
    assert sent[0]["status"] == 413
    assert (b"connection", b"close") in sent[0]["headers"]
    assert left == 0, "all of it was taken in"
    assert not sent[-1].get("more_body", False)


@pytest.mark.parametrize("endless", [True, False], ids=["sends on", "says nothing"])
def test_who_is_refused_and_goes_on_is_not_listened_to_for_ever(endless: bool) -> None:
    limits = BodyLimits(num_bytes=1000, refused_bytes=5000, refused_s=60.0 if endless else 0.05)
    sent: list[Any] = []
    taken = 0

    async def receive() -> Any:
        nonlocal taken
        await asyncio.sleep(0 if endless else 60)
        taken += 1000
        return {"type": "http.request", "body": b" " * 1000, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1:1"), (b"authorization", b"Bearer wrong")]
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers}
    asyncio.run(app(limits=limits)(scope, receive, send))
    assert sent[0]["status"] == 401
    assert taken == (5000 if endless else 0)
    assert not sent[-1].get("more_body", False), "it was ended"


def test_requests_that_come_at_the_same_time_are_held_within_the_limit() -> None:
    """Ten of 1,000 bytes in pieces, none of which says how many there will be, where 3,500 may be held."""
    limits = BodyLimits(num_bytes=1000, held_bytes=3500, refused_s=0.01)
    served = app(limits=limits)
    content = json.dumps({"inputs": [1]}).encode().ljust(1000)

    async def one() -> int:
        pieces = [content[begin : begin + 100] for begin in range(0, 1000, 100)]
        sent: list[Any] = []

        async def receive() -> Any:
            await asyncio.sleep(0)  # the others' turn
            piece = pieces.pop(0) if pieces else b""
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"127.0.0.1:1"), (b"authorization", b"Bearer secret")]
        scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers}
        await served(scope, receive, send)
        return int(sent[0]["status"])

    async def all_of_them() -> list[int]:
        statuses = await asyncio.gather(*(one() for _ in range(10)))
        return [*statuses, await one()]

    *together, alone = asyncio.run(all_of_them())
    assert set(together) == {200, 503}
    assert alone == 200, "what was held is given back, of those that were refused, too"


@pytest.mark.parametrize(
    ("headers", "method", "status"),
    [
        ({"authorization": "Bearer wrong"}, "POST", 401),
        ({"authorization": ""}, "POST", 401),
        ({"host": "evil.example"}, "POST", 403),
        ({"origin": "http://evil.example"}, "POST", 403),
        ({"host": "127.0.0.1:80@evil"}, "POST", 400),
        ({"transfer-encoding": "chunked"}, "POST", 400),
        ({}, "GET", 405),
        ({}, "PUT", 405),
    ],
)
def test_strangers_are_refused(headers: dict[str, str], method: str, status: int) -> None:
    answer = asked({"inputs": [1]}, method=method, **headers)
    assert answer.status_code == status
    assert answer.json()["error"].endswith(".")
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)
    assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


@pytest.mark.parametrize("depth", [900, 960, 5000])
@pytest.mark.parametrize("pair", [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a]":', b"}]")])
def test_inputs_that_are_nested_far_too_deep_are_the_askers_mistake(
    depth: int, pair: tuple[bytes, bytes]
) -> None:
    """Whether or not this Python can read so much; a worker that could not would die of it."""
    opening, closing = pair
    body = b'{"inputs": [' + opening * depth + b"1" + closing * depth + b"]}"
    with pytest.raises(RequestRefused) as refused:
        checked_body(body, BodyLimits())
    assert refused.value.status == 400


def test_the_depth_is_that_of_what_python_reads() -> None:
    def depth(value: Any) -> int:
        inner = list(value.values()) if isinstance(value, dict) else value
        return 1 + max(map(depth, inner), default=0) if isinstance(value, dict | list) else 0

    draw = random.Random(0)

    def made(levels: int) -> Any:
        kind = draw.randrange(4) if levels else 0
        if kind == 0:
            return draw.choice([1, None, "[[", ']"\\"]', '\\"{', "\\\\", "é"])
        several = [made(levels - 1) for _ in range(draw.randrange(1, 4))]
        return several if kind < 3 else {f'k{at}"[\\': one for at, one in enumerate(several)}

    checked = 0
    for _ in range(300):
        value = made(9)
        text = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
        checked += text.count(b"[") + text.count(b"{") > MOST_NESTED
        if json_depth(text) != text.count(b"[") + text.count(b"{"):
            assert json_depth(text) == depth(value), text
    assert checked > 30, "or nothing was counted"


def test_everything_else_is_the_page() -> None:
    assert asked(method="GET", path="/").text.startswith("<!DOCTYPE html>")
    assert asked(method="GET", path="/metrics").text.count("manyhands_serve_workers 1\n") == 1
    assert asked(method="GET", path="/report", authorization="Bearer no").status_code == 401
    assert asked(method="GET", path="/other").status_code == 404


def test_answers_are_counted_and_strangers_are_not() -> None:
    tally = ServingTally(0.0)

    async def ask() -> None:
        transport = httpx.ASGITransport(app=app(tally))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
            for content, headers in (({"inputs": [1, 2]}, GOOD), ({}, GOOD), ({}, {"host": "127.0.0.1:1"})):
                await client.post("/predict", json=content, headers=headers)

    asyncio.run(ask())
    assert dict(tally.figures(1e9)["by_status"]) == {200: 1, 400: 1}  # type: ignore[call-overload]
    assert tally.inputs == 2


def test_one_bad_request_of_a_batch_leaves_the_others_alone() -> None:
    bodies = [{"inputs": [1]}, {"inputs": [None]}, {"inputs": [13, 1]}, {"inputs": [2, 3]}]
    said = answer_batch(Doubler(), bodies)
    assert [one["status"] for one in said] == [200, 400, 500, 200]
    assert (said[0]["answers"], said[3]["answers"]) == ([2.0], [4.0, 6.0])


def test_a_number_that_no_worker_foresaw_is_told_and_kills_none() -> None:
    """`float(10**400)` is an OverflowError, which the predictor above does not expect."""
    said = answer_batch(Doubler(), [{"inputs": [10**400]}, {"inputs": [4]}])
    assert [one["status"] for one in said] == [500, 200]
    assert said[0]["error"].startswith("the model failed: OverflowError")


def test_answers_that_are_not_finite_are_reported_as_such_and_are_no_broken_json() -> None:
    said = answer_batch(Doubler(), [{"inputs": [1e308]}, {"inputs": [4]}])
    reported = answers_frame(said)

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    first, second = json.loads(reported[LENGTH.size :], parse_constant=refuse)
    assert first["status"] == 500
    assert "not a finite number" in first["error"]
    assert second == {"status": 200, "answers": [8.0]}


def test_who_waits_when_the_server_ends_is_reported() -> None:
    async def ask_and_close() -> list[tuple[int, bytes]]:
        switchboard = Switchboard(BatchLimits(), ServingTally(0.0), lambda worker: None)
        asking = asyncio.create_task(switchboard.ask(b'{"inputs": [1]}', 1))
        await asyncio.sleep(0)
        assert switchboard.core.waiting_inputs == 1
        switchboard.close()
        return [await asyncio.wait_for(asking, 1), await asyncio.wait_for(switchboard.ask(b"{}", 1), 1)]

    for status, answer in asyncio.run(ask_and_close()):
        assert status == 503
        assert "The server is shutting down" in json.loads(answer)["error"]


def test_who_has_come_before_the_end_is_answered() -> None:
    async def ask_and_end() -> None:
        switchboard = Switchboard(BatchLimits(wait_s=0.0), ServingTally(0.0), lambda worker: None)
        ours, theirs = socket.socketpair()
        switchboard.attach(asyncio.get_running_loop(), 1, ours)
        asking = asyncio.create_task(switchboard.ask(b'{"inputs": [1]}', 1))
        await asyncio.sleep(0)
        switchboard.refuse()
        assert switchboard.unanswered == 1
        assert (await switchboard.ask(b'{"inputs": [2]}', 1))[0] == 503
        with theirs:
            for said in ({"ready": 7}, [{"status": 200, "answers": [2.0]}]):
                frame = json.dumps(said).encode()
                theirs.sendall(LENGTH.pack(len(frame)) + frame)
                await asyncio.sleep(0.05)
            assert await asyncio.wait_for(asking, 5) == (200, b'{"answers": [2.0]}')
        assert (switchboard.unanswered, switchboard.is_ready) == (0, False)
        switchboard.close()

    asyncio.run(ask_and_end())


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_says_what_is_wrong_and_shows_nothing_as_code() -> None:
    figures: Callable[..., str] = lambda **changes: "".join(serving_sections(view(**changes)).values())  # noqa: E731
    for text in (
        figures(),
        figures(lately=((200, 3), (400, 2), (503, 1)), curve=((0.0, 3.0), (1.0, 4.0))),
    ):
        parser = Balanced()
        parser.feed(text)
        assert parser.open == []
    assert "1 of 2 workers answer" in figures()
    assert "a &lt;row&gt;" in figures()
    assert "2 requests were answered with 4xx" in figures(lately=((400, 2),))
    assert "1 request was answered with 5xx" in figures(lately=((503, 1),))
    assert "Every request of the last minute was answered" in figures(wanted=1)
    assert "3 × 400" in figures(by_status=((400, 3),))
    assert serving_report(view()).startswith("<!DOCTYPE html>")
