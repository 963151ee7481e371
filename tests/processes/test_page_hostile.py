"""The live page among strangers, who have no token: they take neither its places nor the launcher's descriptors."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

import warm
from assassin import events
from manyhands.serving.connections import MAX_CONNECTIONS
from manyhands.serving.hosting import Dashboard
from manyhands.serving.page_app import MAX_STREAMS
from views import run_view

NUM_STRANGERS = 1000
CLOSED = 0


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    with Dashboard(run_view, lambda view: f"manyhands_step {view.step}\n") as one:
        yield one


@pytest.fixture(autouse=True)
def _room_for_strangers() -> Iterator[None]:
    """Descriptors for both ends of every connection of a stranger, as they are all in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3 * NUM_STRANGERS
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this machine gives a process {hard} descriptors, and the test needs {wanted}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def place(dashboard: Dashboard) -> tuple[str, int]:
    parts = urlsplit(dashboard.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def bearer(url: str) -> dict[str, str]:
    return {"authorization": f"Bearer {url.partition('token=')[2]}"}


@contextmanager
def strangers(address: tuple[str, int], count: int, says: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections that say this and no more; those that are turned away at once count as well."""
    with ExitStack() as stack:
        held = []
        for _ in range(count):
            one = stack.enter_context(socket.create_connection(address, timeout=240))
            try:
                one.sendall(says)
            except OSError:
                pass
            held.append(one)
        yield held


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "])
def test_idle_and_slow_strangers_shut_nobody_out(dashboard: Dashboard, says: bytes) -> None:
    address, own = f"http://{place(dashboard)[0]}:{place(dashboard)[1]}", bearer(dashboard.url)
    with strangers(place(dashboard), 200, says):
        for _ in range(5):
            answer = httpx.get(f"{address}/metrics", headers=own, timeout=240)
            assert (answer.status_code, answer.text) == (200, "manyhands_step 120\n")


def test_who_does_not_finish_a_request_is_closed_within_seconds(dashboard: Dashboard) -> None:
    began = time.monotonic()
    with strangers(place(dashboard), 1, b"GET / HTTP/1.1\r\n") as (slow,):
        with pytest.raises((ConnectionError, BrokenPipeError)):  # noqa: PT012 - whichever of the two tells it
            while time.monotonic() - began < 120:
                slow.sendall(b"x: y\r\n")
                time.sleep(0.2)
        assert time.monotonic() - began < 60


def test_a_second_request_that_does_not_end_is_closed_too(dashboard: Dashboard) -> None:
    token = bearer(dashboard.url)["authorization"]
    asked = f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {token}\r\n\r\n".encode()
    began = time.monotonic()
    with strangers(place(dashboard), 1, asked) as (slow,):
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with pytest.raises((ConnectionError, BrokenPipeError)):  # noqa: PT012
            while time.monotonic() - began < 120:
                slow.sendall(b"G")
                time.sleep(0.2)
        assert time.monotonic() - began < 60


@pytest.mark.parametrize("count", [60, 100])
def test_of_many_pages_at_once_sixteen_are_live(dashboard: Dashboard, count: int) -> None:
    address = f"http://{place(dashboard)[0]}:{place(dashboard)[1]}/events"

    async def statuses() -> list[int]:
        limits = httpx.Limits(max_connections=count)
        async with (
            httpx.AsyncClient(headers=bearer(dashboard.url), limits=limits, timeout=240) as client,
            ExitStackOfStreams(client, address) as opened,
        ):
            return await asyncio.gather(*(opened.status() for _ in range(count)))

    found = asyncio.run(statuses())
    assert found.count(200) == MAX_STREAMS
    closed = max(0, count - MAX_CONNECTIONS)  # at most: those that came before they could show their token
    assert count - MAX_STREAMS - closed <= found.count(503) <= count - MAX_STREAMS
    assert found.count(200) + found.count(503) + found.count(CLOSED) == count


class ExitStackOfStreams:
    """Streams that stay open until the end of a block, with the status of each."""

    def __init__(self, client: httpx.AsyncClient, address: str) -> None:
        self._client = client
        self._address = address
        self._open: list[httpx.Response] = []

    async def status(self) -> int:
        request = self._client.build_request("GET", self._address)
        try:
            answer = await self._client.send(request, stream=True)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            return CLOSED
        self._open.append(answer)
        return answer.status_code

    async def __aenter__(self) -> "ExitStackOfStreams":
        return self

    async def __aexit__(self, *_: object) -> None:
        for answer in self._open:
            await answer.aclose()


def test_strangers_take_few_descriptors(dashboard: Dashboard) -> None:
    before = len(os.listdir("/proc/self/fd"))
    most = 0
    with strangers(place(dashboard), NUM_STRANGERS):
        for _ in range(20):
            most = max(most, len(os.listdir("/proc/self/fd")) - before - NUM_STRANGERS)
            time.sleep(0.02)
    assert most <= 100, "accepted connections are bounded"


def test_a_worker_may_die_while_strangers_hold_a_thousand_connections(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "manyhands", "train", "digits", "--workers", "2", "--steps", "1000000",
               "--strategy", "ps servers=1 consistency=async", "--out", str(run), "--dashboard"]  # fmt: skip
    with (tmp_path / "err").open("w+") as err:
        training = warm.Popen(command, stdout=subprocess.DEVNULL, stderr=err)
        try:
            address = _printed_address(tmp_path / "err", training)
            # Not before: at its beginning a process takes over the limits of the one that started it.
            resource.prlimit(training.pid, resource.RLIMIT_NOFILE, (1024, 1024))
            victim = _pid_of(run, "worker 1")
            with strangers(address, NUM_STRANGERS):
                time.sleep(1)  # until the server has taken whatever it takes
                os.kill(victim, signal.SIGKILL)
                _awaited(lambda: _recovered(run) or training.poll(), "the worker to come back", 90)
                assert training.poll() is None, (tmp_path / "err").read_text()
                assert _recovered(run)
        finally:
            training.send_signal(signal.SIGINT)
            training.wait(timeout=240)


def _recovered(run: Path) -> bool | None:
    """Whether a worker died and is back; None while it is not, to be awaited."""
    report = [row["event"] for row in events(run)]
    return True if "died" in report and "recovered" in report else None


def _awaited(find: object, what: str, within_s: float = 120.0) -> object:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        found = find()  # type: ignore[operator]
        if found is not None:
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited for {what}")


def _printed_address(log: Path, training: subprocess.Popen[bytes]) -> tuple[str, int]:
    def find() -> tuple[str, int] | None:
        assert training.poll() is None, log.read_text()
        for line in log.read_text().splitlines():
            if line.startswith("page  "):
                parts = urlsplit(line.split()[1])
                return str(parts.hostname), int(parts.port or 0)
        return None

    found = _awaited(find, "the address of the page")
    assert isinstance(found, tuple)
    return found


def _pid_of(run: Path, name: str) -> int:
    def find() -> int | None:
        report = events(run) if (run / "members.jsonl").exists() else []
        started = [row for row in report if row["event"] == "started" and row.get("name") == name]
        trains = any(row["event"] == "view" for row in report) and (run / "metrics.jsonl").exists()
        return int(started[0]["pid"]) if started and trains else None

    found = _awaited(find, f"{name} to train")
    assert isinstance(found, int)
    return found
