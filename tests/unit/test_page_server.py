"""The live page's application, asked without a socket: who gets in, what they get, and what is sent when."""

import asyncio
import json
import resource
import socket
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from manyhands.errors import UserError
from manyhands.observe.analyse.view import RunView
from manyhands.serving.connections import Admission, PageConnection, room_here
from manyhands.serving.hosting import Dashboard
from manyhands.serving.page_app import MAX_STREAMS, Guard, PageApp
from views import empty_view, run_view

TOKEN = "a-token-of-this-run"
GUARD = Guard(token=TOKEN)
BEARER = {"authorization": f"Bearer {TOKEN}"}


def metrics(view: RunView) -> str:
    return f"manyhands_step {view.step}\n"


def an_app(source: Callable[[], RunView] = run_view, guard: Guard = GUARD) -> PageApp:
    return PageApp(source, guard, metrics, period_s=0.0)


def ask(
    path: str,
    *,
    method: str = "GET",
    app: PageApp | None = None,
    base: str = "http://127.0.0.1:8000",
    **headers: str,
) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app or an_app())  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url=base, timeout=240) as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/metrics", "GET", {}, 401),
        ("/report?token=wrong", "GET", {}, 401),
        (f"/report?token={TOKEN}", "GET", {}, 401),
        ("/events?token=", "GET", {}, 401),
        ("/events?token=%C3%A4%FF", "GET", {}, 401),
        (f"/events?token={TOKEN}", "GET", {}, 401),
        ("/report", "GET", {"cookie": f"token={TOKEN}"}, 401),
        ("/report", "GET", {"cookie": TOKEN}, 401),
        ("/report", "GET", {"authorization": f"Basic {TOKEN}"}, 401),
        ("/report", "GET", {"authorization": f"Bearer {TOKEN}x"}, 401),
        ("/report", "GET", {"authorization": "Bearer "}, 401),
        ("/report", "GET", {"authorization": TOKEN}, 401),
        ("/metrics", "GET", {"authorization": "Bearer wrong"}, 401),
        (f"/metrics?token={TOKEN}", "GET", {}, 401),
        ("/events", "GET", {}, 401),
        ("/report", "GET", {}, 401),
        ("/nothing", "GET", {}, 401),
        ("/", "GET", {**BEARER, "host": "evil.example"}, 403),
        ("/", "GET", {**BEARER, "host": "127.0.0.1.evil.example:8000"}, 403),
        ("/", "GET", {**BEARER, "host": "192.168.1.7:8000"}, 403),
        ("/", "GET", {**BEARER, "host": ""}, 403),
        ("/", "GET", {**BEARER, "host": "127.0.0.1:80@evil.example"}, 400),
        ("/", "GET", {**BEARER, "host": "127.0.0.1:80@evil"}, 400),
        ("/", "GET", {**BEARER, "host": "127.0.0.1@evil.example"}, 400),
        ("/", "GET", {**BEARER, "host": "user@127.0.0.1:8000"}, 400),
        ("/", "GET", {**BEARER, "host": "127.0.0.1:8000:9"}, 400),
        ("/", "GET", {**BEARER, "host": "127.0.0.1:port"}, 400),
        ("/", "GET", {**BEARER, "host": "127.0.0.1:8000/x"}, 400),
        ("/", "GET", {**BEARER, "host": "127.0.0.1, evil.example"}, 400),
        ("/", "GET", {**BEARER, "host": "[::1]evil.example"}, 400),
        ("/", "GET", {**BEARER, "host": "[::1"}, 400),
        ("/", "GET", {**BEARER, "content-length": "0", "transfer-encoding": "chunked"}, 400),
        ("/", "GET", {**BEARER, "host": "127.0.0.1"}, 200),
        ("/", "GET", {**BEARER, "host": "[::1]"}, 200),
        ("/", "GET", {**BEARER, "host": "127.0.0.1:"}, 200),
        ("/events", "GET", {**BEARER, "origin": "http://evil.example"}, 403),
        ("/events", "GET", {**BEARER, "origin": "http://127.0.0.1:9999"}, 403),
        ("/events", "GET", {**BEARER, "origin": "null"}, 403),
        ("/", "POST", BEARER, 405),
        ("/", "PUT", BEARER, 405),
        ("/", "DELETE", BEARER, 405),
        ("/", "OPTIONS", BEARER, 405),
        ("/metrics", "POST", BEARER, 405),
        ("/../../etc/passwd", "GET", BEARER, 404),
        ("/%2e%2e/%2e%2e/etc/passwd", "GET", BEARER, 404),
        ("//etc/passwd", "GET", BEARER, 404),
        ("/report/../config.json", "GET", BEARER, 404),
        ("/", "GET", {"host": "evil.example"}, 403),
        ("/", "GET", {"origin": "http://evil.example"}, 403),
        ("/", "POST", {}, 405),
        ("/", "GET", {}, 200),
        (f"/?token={TOKEN}", "GET", {}, 200),
        ("/", "GET", BEARER, 200),
        ("/", "HEAD", BEARER, 200),
        ("/events", "HEAD", BEARER, 200),
        ("/", "GET", {**BEARER, "origin": "http://127.0.0.1:8000"}, 200),
        ("/", "GET", {**BEARER, "host": "localhost:8000"}, 200),
        ("/", "GET", {**BEARER, "host": "[::1]:8000"}, 200),
        ("/report", "GET", BEARER, 200),
        ("/metrics", "GET", BEARER, 200),
    ],
)  # fmt: skip
def test_who_gets_in(path: str, method: str, headers: dict[str, str], status: int) -> None:
    answer = ask(path, method=method, **headers)
    assert answer.status_code == status
    assert TOKEN not in answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    if status >= 400:
        assert answer.text.count("\n") == 1, "one sentence"
        assert "digits" not in answer.text


def test_the_frame_is_for_everybody_and_says_nothing_of_the_run() -> None:
    foreign_row, owner = ask("/"), ask("/", **BEARER)
    assert foreign_row.text == owner.text
    for word in ("digits", "worker 2", "120", "ps servers=2", "<section"):
        assert word not in foreign_row.text
    assert "set-cookie" not in owner.headers, "a cookie would go to every port of this address"
    assert "set-cookie" not in ask("/metrics", **BEARER).headers


@pytest.mark.parametrize(
    ("path", "headers"), [("/", {}), ("/metrics", {}), ("/nothing", {"host": "evil.example"})]
)
def test_a_stranger_gets_one_answer_on_a_connection(path: str, headers: dict[str, str]) -> None:
    assert ask(path, **headers).headers["connection"] == "close"
    assert "connection" not in ask(path, **{**headers, **BEARER}).headers


def test_a_server_for_others_takes_addresses_and_its_own_name() -> None:
    guard = Guard(token=TOKEN, names=frozenset({"trainer"}), any_address=True)
    for host, status in (
        ("192.168.1.7:80", 200),
        ("trainer:80", 200),
        ("[fe80::1]:80", 200),
        ("evil.example", 403),
    ):
        assert ask("/report", app=an_app(guard=guard), host=host, **BEARER).status_code == status


def test_the_report_and_the_metrics_show_the_view() -> None:
    report = ask("/report", **BEARER)
    assert report.headers["content-disposition"].startswith("attachment")
    assert "120 of 400" in report.text
    assert ask("/metrics", **BEARER).text == "manyhands_step 120\n"


def parse(chunk: bytes) -> tuple[str, Any]:
    name, data = chunk.decode().strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_a_stream_sends_all_then_what_changed_then_the_end() -> None:
    shown = [empty_view()]
    app = an_app(lambda: shown[0])

    async def follow() -> None:
        stream = app.stream()
        assert parse(await anext(stream)) == ("title", "digits · ps servers=2")
        name, first = parse(await anext(stream))
        assert name == "sections"
        assert list(first) == ["now", "wrong", "loss", "metrics", "model", "throughput", "workers", "servers",
                               "waits", "traffic", "staleness", "members", "made", "notes"]  # fmt: skip
        shown[0] = empty_view(step=7)
        assert list(parse(await anext(stream))[1]) == ["now"]
        shown[0] = empty_view(step=8)
        app.end("over")
        assert "8 of 400" in parse(await anext(stream))[1]["now"], "the last state comes before the end"
        assert parse(await anext(stream)) == ("end", "over")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(follow())


def test_readers_at_the_same_time_share_one_look_at_the_run() -> None:
    looks = []
    app = PageApp(lambda: looks.append(1) or run_view(), GUARD, metrics, period_s=60)

    async def two() -> None:
        streams = [app.stream(), app.stream()]
        for stream in streams:
            await anext(stream)
            await anext(stream)
        for stream in streams:
            await stream.aclose()

    asyncio.run(two())
    assert len(looks) == 1


def test_a_page_is_counted_while_it_is_live() -> None:
    app = an_app()
    counted: list[int] = []

    async def follow() -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            counted.append(app.num_streams)
            app.end("over")

        headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {TOKEN}".encode())]
        scope = {"type": "http", "method": "GET", "path": "/events", "query_string": b"", "headers": headers}
        await app(scope, receive, send)

    asyncio.run(follow())
    assert set(counted) == {1}
    assert app.num_streams == 0


def test_too_many_pages_are_refused_in_a_sentence() -> None:
    app = an_app()
    app.num_streams = MAX_STREAMS
    answer = ask("/events", app=app, **BEARER)
    assert (answer.status_code, answer.text) == (503, f"{MAX_STREAMS} pages are already open; close one.\n")
    assert app.num_streams == MAX_STREAMS
    assert ask("/events", app=app).status_code == 401, "only with the token is it told"


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}"):
            Dashboard(run_view, metrics, port=port)


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UserError, match=r"needs the web extra: pip install 'manyhands\[web\]'"):
        Dashboard(run_view, metrics)


def test_the_door_lets_a_newcomer_displace_the_oldest_stranger_and_nobody_else() -> None:
    admission: Admission[str] = Admission(3)
    assert [admission.come(who) for who in ("a", "b", "c")] == [None, None, None]
    admission.know("a")
    assert admission.come("d") == "b"
    assert admission.come("e") == "c"
    admission.know("d"), admission.know("e")
    assert admission.come("f") == "f", "all others have shown the token"
    admission.gone("a"), admission.gone("b")
    assert admission.come("g") is None
    admission.know("f")
    assert admission.come("h") == "g", "who was turned away cannot be known any more"


@pytest.mark.parametrize(("limit", "room"), [(1 << 20, 64), (300, None), (40, 4)])
def test_the_room_leaves_most_descriptors_to_the_run(limit: int, room: int | None) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, before[1]), before[1]))
    try:
        found = room_here()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    if room is None:
        assert 4 <= found <= 300 // 8
    else:
        assert found == room


class Unhurried:
    """In the place of a loop and of a transport: the client reads the answer only when the test says so."""

    def __init__(self, unread: int) -> None:
        self.unread, self.aborted = unread, False
        self.later: list[Callable[[], Any]] = []

    def call_later(self, _delay: float, call: Callable[..., Any], *about: Any) -> Any:
        self.later.append(partial(call, *about))
        return SimpleNamespace(cancel=lambda: None)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.aborted = True


def test_who_reads_an_answer_slowly_gets_all_of_it_and_who_does_not_read_it_goes() -> None:
    found = Unhurried(unread=100)
    connection = PageConnection.__new__(PageConnection)
    connection.loop = connection.transport = found  # type: ignore[assignment]
    connection._deadline = None
    connection._await_request()
    for unread in (60, 10, 0):  # when the last of it was read, the time for the next request begins
        found.unread = unread
        found.later.pop()()
        assert (found.aborted, len(found.later)) == (False, 1)
    found.later.pop()()
    assert found.aborted
    found.aborted, found.unread = False, 50
    connection._await_request()
    found.later.pop()()
    assert found.aborted, "nothing was read in that time"


def test_a_server_of_a_model_has_more_room_and_leaves_half_of_the_descriptors() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    try:
        assert 300 // 8 < room_here(512, 2) <= 300 // 2
        assert room_here(40, 2) == 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
