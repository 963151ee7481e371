"""What the benchmark of TLS says about its own figures: which limit was met, and that a paced connection is slow."""

from __future__ import annotations

import runpy
import socket
import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)  # where a script finds what lies beside it
    return runpy.run_path(str(BENCHMARKS / "tls.py"))


def test_the_limit_is_the_link_before_the_cores_and_one_core_where_others_are_idle(
    benchmark: dict[str, Any],
) -> None:
    limit = benchmark["limit"]
    assert limit(1.2e9, 1.25e9, 0.99, 0.99, 1.0) == "link"
    assert limit(0.8e9, 1.25e9, 0.7, 0.99, 0.98) == "all cores"
    assert limit(0.8e9, 1.25e9, 0.7, 0.99, 0.2) == "receiver's core"
    assert limit(0.8e9, None, 0.99, 0.7, 0.2) == "sender's core"
    assert limit(0.8e9, None, 0.5, 0.5, 0.5) == "waiting for each other"


def test_a_connection_is_held_to_its_rate_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    pace_every_connection = runpy.run_path(str(BENCHMARKS / "cables.py"))["pace_every_connection"]
    rate, num_bytes = 20_000_000, 2_000_000
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as near:
        near.settimeout(30.0)
        near.connect(server.getsockname())
        far, _ = server.accept()
        with far:
            far.settimeout(30.0)
            assert pace_every_connection(rate) >= 2  # both ends, and not what only listens
            begin_s, came = time.monotonic(), 0
            near.setblocking(False)
            rest = memoryview(bytes(num_bytes))
            while came < num_bytes:
                try:
                    rest = rest[near.send(rest) :]
                except BlockingIOError:
                    pass
                came += len(far.recv(1 << 20))
            assert time.monotonic() - begin_s > 0.5 * num_bytes / rate
