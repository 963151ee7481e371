"""Helpers among processes that somebody else started: the last ranks sum, and the weights are those of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

WORKERS, HELPERS = 3, 1
SCRIPT = f"""
import json, os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import manyhands as mh
from equality import OPTIMIZERS, distance, make_task, train_plainly
task = make_task(OPTIMIZERS["momentum"])
rank, folder = os.environ["RANK"], sys.argv[1]
out = f"{{folder}}/run" if rank == "0" else None
options = mh.Options(progress="none", timeout_s=120.0)
run = mh.fit(task, "allreduce helpers={HELPERS}", steps=6, out=out, options=options)
far = distance(run.model.state_dict(), train_plainly(task, 6))
open(f"{{folder}}/{{rank}}", "w").write(json.dumps([far, run.summary["workers"]]))
"""


def test_the_last_processes_of_torchrun_help(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = WORKERS + HELPERS
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], env={**os.environ, **place, "RANK": str(rank)}
        )
        for rank in range(world)
    ]
    try:
        assert [process.wait(timeout=360) for process in processes] == [0] * world
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank in range(world):
        far, workers = json.loads((tmp_path / str(rank)).read_text())
        assert far < 1e-9
        assert workers == WORKERS
    names = {path.name for path in (tmp_path / "run" / "events").iterdir()}
    assert names == {"worker-0.bin", "worker-1.bin", "worker-2.bin", "helper-0.bin"}
