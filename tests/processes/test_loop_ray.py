"""A loop of the user's own on a Ray of its own: `manyhands launch --cluster ray`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from equality import distance

pytest.importorskip("ray", reason="Ray is an extra: pip install 'manyhands[ray]'")

SCRIPT = Path(__file__).with_name("free_loop_script.py")
LAUNCH = (sys.executable, "-m", "manyhands", "launch", "--cluster", "ray", "--workers", "2")


def run(folder: Path, *start: str, **asked: Any) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FREE_LOOP": json.dumps(asked)}
    command = (*start, str(SCRIPT), str(folder))
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone") / "ours"
    assert run(folder, sys.executable).returncode == 0
    return torch.load(folder / "weights-0.pt")


def require_equal(folder: Path, alone: dict[str, Any]) -> None:
    for rank in range(2):
        found = torch.load(folder / f"weights-{rank}.pt")
        assert distance(found["weights"], alone["weights"]) < 1e-9
        assert found["scores"] == pytest.approx(alone["scores"], abs=1e-9)


@pytest.mark.parametrize("strategy", ["mirrored", "allreduce algorithm=ring", "ps"])
def test_actors_run_the_script_and_end_with_the_weights_of_one_process(
    strategy: str, tmp_path: Path, alone: dict[str, Any]
) -> None:
    done = run(tmp_path / "ours", *LAUNCH, "--strategy", strategy)
    assert done.returncode == 0, done.stderr
    require_equal(tmp_path / "ours", alone)


def test_an_actor_that_is_killed_is_followed_by_another(tmp_path: Path, alone: dict[str, Any]) -> None:
    done = run(tmp_path / "ours", *LAUNCH, "--strategy", "ps", kill=[1, 1, 2], pause_s=0.01)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ours" / "killed").exists(), "nobody was killed"
    assert "it is restarted" in done.stderr
    require_equal(tmp_path / "ours", alone)


def test_a_script_that_fails_in_an_actor_ends_the_run_with_its_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import manyhands as mh\nwith mh.join() as group:\n    assert not group.rank, 'enough'\n    group.barrier()\n"
    )
    command = [*LAUNCH, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stderr
    assert "worker 1 on" in done.stderr
    assert "AssertionError: enough" in done.stderr
