"""`fit` in processes whose workers have a GPU each, as they tell: the whole way to the group that sums there.

Gloo on the CPU stands for NCCL; `benchmarks/gpu_nccl.py` is for a machine with a GPU, where the last test runs it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gpu_sums_script
import manyhands as mh
from equality import distance
from gpu_sums_script import LossOfOwnGpu
from manyhands.errors import WorkerFailed
from placed_script import STEPS, digest, options, task
from processes.test_placed import run_ranks

SCRIPT = Path(gpu_sums_script.__file__)


def command(deed: str, folder: Path) -> list[str]:
    return [sys.executable, str(SCRIPT), deed, str(folder)]


def test_workers_with_a_gpu_each_end_as_one_process_and_resume(tmp_path: Path) -> None:
    done = run_ranks([command("equal", tmp_path)] * 3, "127.0.0.1", tmp_path)
    assert [one.returncode for one in done] == [0] * 3, done
    report = [one.stdout.splitlines() for one in done]
    assert report[1] == report[0] == report[2], "the same bits on every rank"
    found = {line.split()[0]: line.split()[1:] for line in report[0]}
    assert {by for _, by in found.values()} == {"nccl"}
    assert found["resumed"] == found["mirrored"]
    pieces = replace(task(), clip_norm=0.1, microbatches=2)
    for name, asked in (("weights", task()), ("pieces", pieces)):
        alone = mh.fit(asked, "single", steps=STEPS, options=options())
        weights = torch.load(tmp_path / name, weights_only=True)
        assert distance(weights, alone.model.state_dict()) < 1e-9, name


def test_workers_that_share_a_gpu_sum_as_ever_and_the_run_says_why(tmp_path: Path) -> None:
    done = run_ranks([command("refused", tmp_path)] * 3, "127.0.0.1", tmp_path)
    assert [one.returncode for one in done] == [0] * 3, done
    alone = mh.fit(task(), "mirrored", workers=3, steps=STEPS, options=options())
    for one in done:
        line = one.stdout.strip()
        assert line.startswith(f"told: {digest(alone)} links ")
        assert "not by NCCL: workers 0 and 2 share one GPU, but NCCL needs one GPU per worker" in line


def test_a_worker_that_is_killed_ends_the_others_with_its_name(tmp_path: Path) -> None:
    done = run_ranks([command("killed", tmp_path)] * 3, "127.0.0.1", tmp_path)
    assert [one.returncode for one in done] == [0, 0, -9], done
    for one in done[:2]:
        lines = dict(line.split(": ", 1) for line in one.stdout.splitlines())
        assert f"worker 2 on {socket.gethostname()} (process " in lines["killed"]
        assert "is lost: the connection " in lines["killed"]
        assert float(lines["killed took"]) < 30.0


def test_processes_that_fit_starts_find_each_other_as_well() -> None:
    run = mh.fit(replace(task(), loss=LossOfOwnGpu()), "mirrored", workers=3, steps=STEPS, options=options())
    alone = mh.fit(task(), "single", steps=STEPS, options=options())
    assert run.summary["sums"] == {"by": "nccl", "why": "each of 3 workers has its own GPU"}
    assert (
        "gradients are summed on the GPUs by NCCL: each of 3 workers has its own GPU" in run.summary["notes"]
    )
    assert distance(run.model.state_dict(), alone.model.state_dict()) < 1e-9
    with pytest.raises(WorkerFailed, match=r"worker 2 .*was killed by SIGKILL"):
        mh.fit(
            replace(task(), loss=LossOfOwnGpu(deadly=True)), "mirrored", workers=3, steps=9, options=options()
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_nccl_itself_with_two_ranks_on_one_gpu() -> None:
    script = SCRIPT.parent.parent / "benchmarks" / "gpu_nccl.py"
    done = subprocess.run(
        [sys.executable, str(script), "--checks"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
