"""A recorded loop of the user's own under `ps`, executed again by its script: the same bytes, or what differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from equality import distance

pytestmark = pytest.mark.usefixtures("compiler_imported")

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).with_name("free_loop_script.py")
NO_CLIP = {"accumulate": 1, "clip": 0}


def manyhands(*words: str | Path, **asked: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FREE_LOOP": json.dumps(asked)}
    started: Any = {"trains": True, "compiler": True, "capture_output": True, "text": True, "timeout": 120}
    return warm.run((BIN / "manyhands", *words), **started, check=False, env=env)


def launch(folder: Path, strategy: str, workers: int, **asked: Any) -> str:
    folder.mkdir()
    options = ("--workers", str(workers), "--strategy", strategy, "--out", folder / "run")
    done = manyhands("launch", *options, SCRIPT, folder, **asked)
    assert done.returncode == 0, done.stderr
    return done.stderr


def replay(folder: Path, script: Path = SCRIPT, **asked: Any) -> subprocess.CompletedProcess[str]:
    return manyhands("replay", folder / "run", "--script", script, **asked)


@pytest.mark.parametrize(
    ("strategy", "asked", "killed"),
    [
        ("ps consistency=async", {**NO_CLIP, "kill": [1, 1, 0], "slow": 2}, True),
        ("ps servers=2 consistency=bounded:1 replicas=1", {**NO_CLIP, "kill": [3, 1, 0]}, True),
        ("ps", {}, False),
        pytest.param("ps link=tcp consistency=softsync:2 codec=fp16", NO_CLIP, False, marks=pytest.mark.soak),
        pytest.param("ps", {"kill": [0, 1, 2]}, True, marks=pytest.mark.soak),
    ],
)
def test_a_replay_ends_with_the_same_bytes(
    strategy: str, asked: dict[str, Any], killed: bool, tmp_path: Path
) -> None:
    asked = {"pause_s": 0.03, **asked}
    said = launch(tmp_path / "ours", strategy, 3, **asked)
    assert ("was killed by SIGKILL" in said) == killed
    before = torch.load(tmp_path / "ours" / "weights-1.pt")
    saved = {path: path.stat().st_mtime_ns for path in (tmp_path / "ours" / "checkpoints").rglob("*")}
    done = replay(tmp_path / "ours", **asked)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "every gradient is the recorded one, and the weights are the same bytes" in done.stdout
    again = torch.load(tmp_path / "ours" / "weights-1.pt")  # which the script has written again
    assert distance(again["weights"], before["weights"]) == 0
    assert again["scores"] == before["scores"]
    assert saved == {path: path.stat().st_mtime_ns for path in (tmp_path / "ours" / "checkpoints").rglob("*")}


def test_a_script_that_computes_something_else_is_told_where(tmp_path: Path) -> None:
    launch(tmp_path / "ours", "ps", 2, until=2)
    done = replay(tmp_path / "ours", until=2, clip=0.4)  # the steps differ, and so the second gradient
    assert done.returncode == 1, done.stdout
    assert "its gradient differs from the recorded one" in done.stderr
    assert "clock 1" in done.stderr
    done = replay(tmp_path / "ours", until=1)
    assert done.returncode == 1, done.stdout
    assert "left its loop earlier than in the recorded run" in done.stderr
    other = tmp_path / "script.py"
    other.write_text(SCRIPT.read_text() + "\n")
    done = replay(tmp_path / "ours", other)
    assert done.returncode == 2
    assert "the script was changed since" in done.stderr
    done = manyhands("replay", tmp_path / "ours" / "run")
    assert done.returncode == 2
    assert "--script SCRIPT" in done.stderr
