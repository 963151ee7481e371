"""Runs through Ray's client (`ray://`): this process is no node of the cluster, and a task there leads."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is an extra: pip install 'manyhands[ray]'")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def free_port() -> int:
    """Below those that Ray takes for its workers, above those that the system gives out."""
    for port in range(20100, 20400):
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The address of a client server, at a head of four CPUs that whoever has the token may use."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    port = free_port()
    settings = {
        "--port": "0",
        "--ray-client-server-port": str(port),
        "--num-cpus": "4",
        "--include-dashboard": "false",
        "--node-ip-address": "127.0.0.1",
    }
    words = [word for pair in settings.items() for word in pair]
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
    ]
    with open(tmp_path / "head.log", "wb") as log:
        head = subprocess.Popen([*command, *words], stdout=log, stderr=log, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert head.poll() is None, (tmp_path / "head.log").read_text()
                assert time.monotonic() < deadline, "the client server does not listen"
                time.sleep(0.5)
        yield f"ray://127.0.0.1:{port}"
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(90)


SCRIPT = """
import sys
import manyhands as mh, ray, torch
from manyhands.workloads.tasks import build

cluster, out = sys.argv[1:]
task = build("digits")
try:
    mh.fit(task, cluster=cluster, options=mh.Options(callbacks=(mh.Callback(),)))
except mh.UserError as error:
    assert "cannot call callbacks of this process" in str(error), error
else:
    raise AssertionError("callbacks were taken")
here = mh.fit(task, "allreduce", workers=2, steps=20, seed=3)
there = mh.fit(task, "allreduce", workers=2, steps=20, seed=3, cluster=cluster, out=out)
assert not ray.is_initialized()
for name, ours in there.model.state_dict().items():
    assert torch.equal(ours, here.model.state_dict()[name]), name
assert there.history.loss == here.history.loss
assert any("on the node of the cluster that led it" in note for note in there.summary["notes"])
print("the same weights")
"""


def run(*words: str) -> str:
    """What a process prints; Ray reads the environment when it is imported, so that it needs one of its own."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_through_the_client_is_one_of_local_processes(server: str, tmp_path: Path) -> None:
    assert "the same weights" in run("-c", SCRIPT, server, str(tmp_path / "run"))
    assert (tmp_path / "run" / "metrics.jsonl").exists(), "the node that led it is this one"
    strategy = "ps consistency=async"
    train = ["-m", "manyhands", "train", "digits", "--cluster", server, "--workers", "2", "--epochs", "3"]
    said = run(*train, "--strategy", strategy, "--out", str(tmp_path / "ps"))
    assert f"digits · {strategy} · 2 workers" in said
