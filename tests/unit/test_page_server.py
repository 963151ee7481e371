"""The live page's application, asked without a socket: who gets in, what they get, and what is sent when."""

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from manyhands.errors import UserError
from manyhands.observe.view import RunView
from manyhands.seeing.dashboard import Dashboard
from manyhands.seeing.guard import Guard
from manyhands.seeing.server import MAX_STREAMS, PageApp
from views import empty_view, run_view

TOKEN = "a-token-of-this-run"
GUARD = Guard(token=TOKEN)
COOKIE = {"cookie": f"{GUARD.cookie}={TOKEN}"}
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
        async with httpx.AsyncClient(transport=transport, base_url=base, timeout=10) as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/", "GET", {}, 401),
        ("/?token=wrong", "GET", {}, 401),
        ("/?token=", "GET", {}, 401),
        ("/?token=%C3%A4%FF", "GET", {}, 401),
        ("/", "GET", {"cookie": f"{GUARD.cookie}=wrong"}, 401),
        ("/", "GET", {"cookie": f"other={TOKEN}"}, 401),
        ("/", "GET", {"authorization": f"Basic {TOKEN}"}, 401),
        ("/metrics", "GET", {"authorization": "Bearer wrong"}, 401),
        (f"/metrics?token={TOKEN}", "GET", {}, 401),
        ("/events", "GET", {}, 401),
        ("/report", "GET", {}, 401),
        ("/nothing", "GET", {}, 401),
        ("/", "GET", {**COOKIE, "host": "evil.example"}, 403),
        ("/", "GET", {**COOKIE, "host": "127.0.0.1.evil.example:8000"}, 403),
        ("/", "GET", {**COOKIE, "host": "192.168.1.7:8000"}, 403),
        ("/", "GET", {**COOKIE, "host": ""}, 403),
        ("/events", "GET", {**COOKIE, "origin": "http://evil.example"}, 403),
        ("/events", "GET", {**COOKIE, "origin": "http://127.0.0.1:9999"}, 403),
        ("/events", "GET", {**COOKIE, "origin": "null"}, 403),
        ("/", "POST", COOKIE, 405),
        ("/", "PUT", COOKIE, 405),
        ("/", "DELETE", COOKIE, 405),
        ("/", "OPTIONS", COOKIE, 405),
        ("/metrics", "POST", COOKIE, 405),
        ("/../../etc/passwd", "GET", COOKIE, 404),
        ("/%2e%2e/%2e%2e/etc/passwd", "GET", COOKIE, 404),
        ("//etc/passwd", "GET", COOKIE, 404),
        ("/report/../config.json", "GET", COOKIE, 404),
        ("/", "GET", COOKIE, 200),
        ("/", "HEAD", COOKIE, 200),
        ("/events", "HEAD", COOKIE, 200),
        ("/", "GET", {**COOKIE, "origin": "http://127.0.0.1:8000"}, 200),
        ("/", "GET", {**COOKIE, "host": "localhost:8000"}, 200),
        ("/", "GET", {**COOKIE, "host": "[::1]:8000"}, 200),
        ("/", "GET", BEARER, 200),
        ("/report", "GET", COOKIE, 200),
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


def test_the_token_moves_from_the_address_into_a_cookie() -> None:
    answer = ask(f"/?token={TOKEN}")
    assert answer.status_code == 200
    assert 'content="0; url=/"' in answer.text
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert ask("/", cookie=answer.headers["set-cookie"].partition(";")[0]).status_code == 200


def test_two_runs_of_one_host_have_cookies_of_their_own() -> None:
    assert Guard().cookie != Guard().cookie


def test_a_server_for_others_takes_addresses_and_its_own_name() -> None:
    guard = Guard(token=TOKEN, names=frozenset({"trainer"}), any_address=True)
    for host, status in (
        ("192.168.1.7:80", 200),
        ("trainer:80", 200),
        ("[fe80::1]:80", 200),
        ("evil.example", 403),
    ):
        assert ask("/", app=an_app(guard=guard), host=host, **COOKIE).status_code == status


def test_the_page_the_report_and_the_metrics_show_the_view() -> None:
    assert "120 of 400" in ask("/", **COOKIE).text
    report = ask("/report", **COOKIE)
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
        assert (await anext(stream)).startswith(b"retry:")
        name, first = parse(await anext(stream))
        assert (name, app.num_streams) == ("sections", 1)
        assert list(first) == ["now", "wrong", "loss", "metrics", "throughput", "workers", "waits", "servers",
                               "staleness", "members", "traffic", "notes"]  # fmt: skip
        shown[0] = empty_view(step=7)
        assert list(parse(await anext(stream))[1]) == ["now"]
        shown[0] = empty_view(step=8)
        app.end("over")
        assert "8 of 400" in parse(await anext(stream))[1]["now"], "the last state comes before the end"
        assert parse(await anext(stream)) == ("end", "over")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert app.num_streams == 0

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
    assert (len(looks), app.num_streams) == (1, 0)


def test_too_many_pages_are_refused_in_a_sentence() -> None:
    app = an_app()
    app.num_streams = MAX_STREAMS
    answer = ask("/events", app=app, **COOKIE)
    assert (answer.status_code, answer.text) == (503, f"{MAX_STREAMS} pages are open already; close one.\n")


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"can not listen on 127.0.0.1:{port}"):
            Dashboard(run_view, metrics, port=port)


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UserError, match=r"needs the web extra: pip install 'manyhands\[web\]'"):
        Dashboard(run_view, metrics)
