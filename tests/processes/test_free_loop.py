"""A loop of the user's own under `ps` and `hogwild`, in real processes: equal to the plain loop, audited, killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from equality import distance
from manyhands.strategies.ps.audit import Verdict, audit_run

pytestmark = pytest.mark.usefixtures("compiler_imported")

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).with_name("free_loop_script.py")
NO_CLIP = {"accumulate": 1, "clip": 0}  # where several servers have the gradient, or each batch is a step


def run(
    folder: Path, *start: str | Path, script: Path = SCRIPT, starts: int = 0, **asked: Any
) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FREE_LOOP": json.dumps(asked)}
    started = {"trains": True, "compiler": True, "capture_output": True, "text": True, "timeout": 120}
    done = warm.run((*start, script, folder), **started, starts=starts, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done


def launch(
    folder: Path, strategy: str, workers: int, out: Path | None = None, **asked: Any
) -> subprocess.CompletedProcess[str]:
    options = ["--workers", str(workers), "--strategy", strategy, *(["--out", str(out)] if out else [])]
    return run(folder, BIN / "manyhands", "launch", *options, **asked)


def ended(folder: Path, rank: int = 0) -> dict[str, Any]:
    return torch.load(folder / f"weights-{rank}.pt")


def require_equal(folder: Path, plain: dict[str, Any], workers: int) -> None:
    for rank in range(workers):
        found = ended(folder, rank)
        assert distance(found["weights"], plain["weights"]) < 1e-9
        assert found["scores"] == pytest.approx(plain["scores"], abs=1e-9)


@pytest.fixture(scope="module")
def alone(compiler_imported: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the script ends with in one process: with all that a loop may have, and without clipping."""
    folder = tmp_path_factory.mktemp("alone")
    for name, asked in (("all", {}), ("plain", NO_CLIP), ("sgd", {"optimizer": "SGD", **NO_CLIP})):
        run(folder / name, sys.executable, **asked)
    return {name: ended(folder / name) for name in ("all", "plain", "sgd")}


@pytest.mark.parametrize(
    ("strategy", "workers", "name", "asked"),
    [
        ("ps", 1, "all", {}),
        ("ps", 2, "all", {}),
        ("ps link=tcp", 3, "all", {}),
        ("ps servers=2", 4, "plain", NO_CLIP),
        pytest.param("ps replicas=1", 3, "sgd", {"optimizer": "SGD", **NO_CLIP}, marks=pytest.mark.soak),
        ("hogwild order=turns", 2, "sgd", {"optimizer": "SGD", **NO_CLIP}),
        pytest.param("hogwild order=turns", 3, "plain", NO_CLIP, marks=pytest.mark.soak),
    ],
)
def test_workers_end_with_the_weights_of_one_process(
    strategy: str,
    workers: int,
    name: str,
    asked: dict[str, Any],
    tmp_path: Path,
    alone: dict[str, dict[str, Any]],
) -> None:
    launch(tmp_path / "ours", strategy, workers, **asked)
    require_equal(tmp_path / "ours", alone[name], workers)


def test_a_run_is_resumed_by_other_workers_and_by_none(
    tmp_path: Path, alone: dict[str, dict[str, Any]]
) -> None:
    folder = tmp_path / "ours"
    launch(folder, "ps", 2, until=2)
    launch(folder, "ps servers=1", 3, until=3)
    run(folder, sys.executable)
    assert distance(ended(folder)["weights"], alone["all"]["weights"]) < 1e-9


@pytest.mark.parametrize("consistency", ["async", "bounded:1", "softsync:1", "aware:async"])
def test_every_batch_is_a_step_of_one_worker(consistency: str, tmp_path: Path) -> None:
    folder, kept = tmp_path / "ours", tmp_path / "run"
    launch(folder, f"ps servers=2 consistency={consistency}", 3, kept, slow=2, pause_s=0.005, **NO_CLIP)
    assert all(distance(ended(folder, rank)["weights"], ended(folder)["weights"]) == 0 for rank in (1, 2))
    audited = audit_run(kept).found
    assert audited.verdict is Verdict.COMPLETE, (audited.violations, audited.missing)
    assert [shard.applied for shard in audited.shards] == [16, 16]  # four epochs of four batches, each once


@pytest.mark.parametrize(
    ("strategy", "rank"), [("ps", 1), ("ps", 0), ("ps replicas=1", 3)], ids=["worker", "worker 0", "server"]
)
def test_a_killed_process_is_followed_by_one_that_takes_its_place(
    strategy: str, rank: int, tmp_path: Path, alone: dict[str, dict[str, Any]]
) -> None:
    folder, kept = tmp_path / "ours", tmp_path / "run"
    done = launch(folder, strategy, 3, kept, kill=[rank, 1, 2], pause_s=0.01)
    assert "was killed by SIGKILL" in done.stderr, "nobody was killed"
    assert "recovered after" in done.stderr
    require_equal(folder, alone["all"], 3)
    assert audit_run(kept).found.verdict is Verdict.COMPLETE


def test_under_torchrun_the_first_rank_serves(tmp_path: Path, alone: dict[str, dict[str, Any]]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.read_text().replace("mh.join(", 'mh.join(strategy="ps", '))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    run(tmp_path / "ours", *torchrun, script=script, starts=3)
    require_equal(tmp_path / "ours", alone["all"], 2)


def test_roles_of_a_cluster_specification_serve_and_train(
    tmp_path: Path, alone: dict[str, dict[str, Any]]
) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "ours"
    script.write_text(SCRIPT.read_text().replace("mh.join(", 'mh.join(strategy="ps", '))
    folder.mkdir()
    with socket.socket() as free:  # port 0 is not for an address that all must know
        free.bind(("127.0.0.1", 0))
        chief = f"127.0.0.1:{free.getsockname()[1]}"
    cluster = {"chief": [chief], "worker": ["127.0.0.1:1", "127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FREE_LOOP": "{}"}
    started: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = []
    for kind, index in (("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)):
        role = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
        command = [sys.executable, script, folder]
        processes.append(warm.Popen(command, **started, env={**env, "TF_CONFIG": role}))
    for process in processes:
        with process:
            _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
    require_equal(folder, alone["all"], 2)


def test_where_batches_are_given_out_a_killed_workers_batch_is_its_successors(tmp_path: Path) -> None:
    folder, kept = tmp_path / "ours", tmp_path / "run"
    done = launch(folder, "ps consistency=async", 3, kept, kill=[1, 1, 0], pause_s=0.05, **NO_CLIP)
    # All met before the evaluation of epoch 0, each with one of the next three batches: worker 1 has one of epoch 1.
    assert "was killed by SIGKILL" in done.stderr, "nobody was killed"
    audited = audit_run(kept).found
    assert audited.verdict is Verdict.COMPLETE, (audited.violations, audited.missing)
    assert [shard.applied for shard in audited.shards] == [16]


def test_a_killed_server_without_a_copy_goes_back_to_its_snapshot(tmp_path: Path) -> None:
    folder, kept = tmp_path / "ours", tmp_path / "run"
    done = launch(folder, "ps", 2, kept, kill=[2, 1, 2], pause_s=0.01)
    assert "every shard recovered after" in done.stderr
    assert audit_run(kept).found.verdict is Verdict.RESTORED
    assert distance(ended(folder, 1)["weights"], ended(folder)["weights"]) == 0


def test_a_server_that_is_killed_after_a_resume_goes_back_to_the_checkpoint(
    tmp_path: Path, alone: dict[str, dict[str, Any]]
) -> None:
    folder, kept = tmp_path / "ours", tmp_path / "run"
    launch(folder, "ps", 2, until=1)
    done = launch(folder, "ps", 2, kept, kill=[2, 1, 0], pause_s=0.01)  # before the first step
    assert "every shard recovered after" in done.stderr
    assert distance(ended(folder)["weights"], alone["all"]["weights"]) < 1e-9


def test_a_worker_that_is_killed_long_after_a_resume_finds_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "ours"
    launch(folder, "ps", 2, until=1)
    done = launch(folder, "ps", 2, kill=[1, 4, 2], epochs=6, until=6)  # three checkpoints later
    assert "was killed by SIGKILL" in done.stderr, "nobody was killed"
    run(tmp_path / "alone", sys.executable, epochs=6, until=6)
    assert distance(ended(folder, 1)["weights"], ended(tmp_path / "alone")["weights"]) < 1e-9


STATES = """
import manyhands as mh
from manyhands.errors import UserError
from torch import nn, optim

model = nn.Linear(2, 1)
optimizer = optim.Adam(model.parameters())
state = optimizer.state_dict()
with mh.join() as group:
    model, optimizer = group.prepare(model, optimizer)
    asked = optimizer.state_dict, lambda: optimizer.load_state_dict(state), lambda: model.load_state_dict(whole)
    whole = model.state_dict()
    for one in asked:
        try:
            one()
        except UserError as error:
            assert "use group.save and group.load" in str(error)
        else:
            raise AssertionError("it was lost without a word")
optimizer.load_state_dict(state)
"""


def test_states_that_the_servers_have_are_not_those_of_a_worker(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STATES)
    run(tmp_path, BIN / "manyhands", "launch", "--workers", "1", "--strategy", "ps", script=script)


def test_hogwild_workers_share_one_memory(tmp_path: Path) -> None:
    launch(tmp_path / "ours", "hogwild", 3, **NO_CLIP)
    found = [ended(tmp_path / "ours", rank) for rank in range(3)]
    assert all(distance(one["weights"], found[0]["weights"]) == 0 for one in found)
    assert found[0]["scores"][-1] < found[0]["scores"][0]
