"""One unchanged script under every strategy's word: what docs/own-loop.md promises, row by row, and kills inside."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import warm
from equality import distance
from manyhands.facts import Answer
from manyhands.strategies.ps.audit import Verdict, audit_run
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy

pytestmark = pytest.mark.usefixtures("compiler_imported")

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).with_name("every_strategy_script.py")
PAGE = Path(__file__).parents[2] / "docs" / "own-loop.md"
SLOW = {"mirrored", "allreduce", "central", "local"}  # which other tests run in processes, too
REFUSED = "rejected"


def rows() -> dict[str, str]:
    """By strategy: what the page says that the script ends with."""
    table = re.search(r"\| strategies \| .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text())
    assert table is not None
    cells = [line.strip("|").split("|") for line in table[1].splitlines()]
    return {word: said.strip() for words, said in cells for word in re.findall("`([^`]+)`", words)}


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*command: str | Path, starts: int = 0) -> subprocess.CompletedProcess[str]:
    return warm.run(
        command,
        trains=True,
        compiler=True,
        starts=starts,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment(),
    )


def launched(strategy: str, workers: int, folder: Path, epochs: int) -> list[str | Path]:
    options = ["--workers", str(workers), "--strategy", strategy]
    return [BIN / "manyhands", "launch", SCRIPT, *options, folder, str(epochs)]


@pytest.fixture(scope="module")
def alone(compiler_imported: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What the script ends with in one process, which was started twice."""
    folder = tmp_path_factory.mktemp("alone")
    for epochs in ("1", "3"):
        done = run(sys.executable, SCRIPT, folder, epochs)
        assert done.returncode == 0, done.stderr
    return torch.load(folder / "weights.pt")


def test_the_page_has_a_row_for_every_strategy_and_says_what_its_facts_say() -> None:
    said = rows()
    assert said.keys() == STRATEGIES.keys()
    for word, promise in said.items():
        facts = Strategy.parse(word).facts
        assert promise.startswith(REFUSED) == bool(facts.instead_of_own_loop), word
        if word != "single" and not promise.startswith(REFUSED):
            assert promise == facts.promises.same_numbers.words, word


CASES = [
    pytest.param(word, 2 + (word == "sharded"), marks=[pytest.mark.soak] if word in SLOW else [], id=word)
    for word, said in rows().items()
    if word != "single" and not said.startswith(REFUSED)
]


@pytest.mark.parametrize(("word", "workers"), CASES)
def test_the_script_ends_with_what_the_page_promises(
    word: str, workers: int, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    for epochs in (1, 3):
        done = run(*launched(word, workers, tmp_path, epochs))
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{word} on {workers}: ")
    found = torch.load(tmp_path / "weights.pt")
    if Strategy.parse(word).facts.promises.same_numbers.answer is Answer.YES:
        assert distance(found, alone) < 1e-9
    else:
        assert float(found["errors"].mean()) < 2 * float(alone["errors"].mean())
        assert distance(found, alone) > 1e-6, "or the page promises too little"


@pytest.mark.parametrize("word", [word for word, said in rows().items() if said.startswith(REFUSED)])
def test_what_a_loop_cannot_mean_is_rejected_with_the_reason(word: str, tmp_path: Path) -> None:
    done = run(*launched(word, 2, tmp_path, 1))
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert f"strategy={word} does not support a loop of your own" in done.stderr
    assert rows()[word].removeprefix(f"{REFUSED}: ") in done.stderr


def test_torchrun_cuts_the_model_as_launch_does(tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    text = SCRIPT.read_text().replace("mh.join()", 'mh.join(strategy="sharded")')
    script = tmp_path / "script.py"
    script.write_text(text)
    for epochs in ("1", "3"):
        options = ["--standalone", "--nproc-per-node", "2", script, tmp_path, epochs]
        done = run(sys.executable, "-m", "torch.distributed.run", *options, starts=2)
        assert done.returncode == 0, done.stderr
    assert distance(torch.load(tmp_path / "weights.pt"), alone) < 1e-9


def test_roles_of_a_cluster_specification_join_too(tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.read_text().replace("mh.join()", 'mh.join(strategy="tensor")'))
    for epochs in ("1", "3"):
        with socket.socket() as free:  # port 0 is not for an address that all must know
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        cluster = {"worker": [f"127.0.0.1:{port}", "127.0.0.1:1"]}
        roles = [{"cluster": cluster, "task": {"type": "worker", "index": index}} for index in range(2)]
        processes = [
            warm.Popen(
                [sys.executable, script, tmp_path, epochs],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**environment(), "TF_CONFIG": json.dumps(role)},
            )
            for role in roles
        ]
        for process in processes:
            with process:
                _, said = process.communicate(timeout=240)
            assert process.returncode == 0, said
    assert distance(torch.load(tmp_path / "weights.pt"), alone) < 1e-9


DROPPING = """
import torch
from torch import nn
import manyhands as mh

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with mh.join() as group:
    torch.rand(group.rank)  # whose random numbers now differ from the others'
    model, optimizer = group.prepare(model, optimizer)
    for _ in range(3):
        loss = model(torch.ones(5, 4)).square().mean()
        every = group.mean(loss)  # of the slices of one batch, the first one's
        assert torch.equal(every, loss.detach()), (every, loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_slices_of_a_layer_drop_the_same_activations(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DROPPING)
    done = run(BIN / "manyhands", "launch", script, "--workers", "2", "--strategy", "tensor")
    assert done.returncode == 0, done.stderr


def workers_of(launcher: int) -> list[int]:
    """The processes below a launcher that run the script, the youngest last."""
    below, found = [launcher], []
    while below:
        children = Path(f"/proc/{(one := below.pop())}/task/{one}/children").read_text().split()
        below += map(int, children)
        found += map(int, children)
    return sorted(found)


@pytest.mark.parametrize("word", ["sharded", pytest.param("pipeline", marks=pytest.mark.soak)])
def test_a_worker_that_is_killed_ends_the_script_which_then_continues(word: str, tmp_path: Path) -> None:
    process = warm.Popen(
        launched(word, 2, tmp_path, 10_000),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with process:
        deadline = time.monotonic() + 180
        while not any((tmp_path / "checkpoints").glob("*2*")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(workers_of(process.pid)[-1], signal.SIGKILL)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 1
    assert re.search(r"worker \d \(pid \d+\) was killed by SIGKILL", said), said
    saved = max(int(re.sub(r"\D", "", one.name)) for one in (tmp_path / "checkpoints").iterdir())
    done = run(*launched(word, 2, tmp_path, saved + 1))
    assert done.returncode == 0, done.stderr


LONG = 24  # epochs, so that there is time to kill


@pytest.fixture(scope="module")
def long_alone(compiler_imported: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("long")
    assert run(sys.executable, SCRIPT, folder, str(LONG)).returncode == 0
    return torch.load(folder / "weights.pt")


def kill(name: str, kept: Path) -> None:
    """Kill a process of a recorded run by the name that its members have, once it serves or trains."""
    events = [json.loads(line) for line in (kept / "members.jsonl").read_text().splitlines()]
    os.kill(
        [one["pid"] for one in events if one["event"] == "started" and one["name"] == name][-1],
        signal.SIGKILL,
    )


@pytest.mark.parametrize(
    ("word", "ends"),
    [
        ("ps replicas=1", Verdict.COMPLETE),
        ("ps", Verdict.RESTORED),
        ("ps replicas=1 consistency=async", Verdict.COMPLETE),
        pytest.param("ps replicas=1 consistency=bounded:1", Verdict.COMPLETE, marks=pytest.mark.soak),
        pytest.param("ps consistency=async", Verdict.RESTORED, marks=pytest.mark.soak),
    ],
)
def test_workers_and_servers_that_are_killed_inside_the_script_are_followed(
    word: str, ends: Verdict, tmp_path: Path, long_alone: dict[str, torch.Tensor]
) -> None:
    """A copy of the server loses nothing; a snapshot does, and the audit says so."""
    kept = tmp_path / "run"
    command = [*launched(word, 3, tmp_path, LONG)[:-2], "--out", kept, tmp_path, str(LONG)]
    process = warm.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    with process:
        for name, epoch in (("worker 1", 3), ("server 0", 10)):
            deadline = time.monotonic() + 180
            while not (tmp_path / "checkpoints" / f"step-{epoch:08}").exists():
                assert time.monotonic() < deadline
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.01)
            kill(name, kept)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert said.count("was killed by SIGKILL") == 2, said
    found, audited = torch.load(tmp_path / "weights.pt"), audit_run(kept).found
    assert (audited.verdict, audited.violations) == (ends, ())
    if word == "ps replicas=1":
        assert distance(found, long_alone) < 1e-9
    else:
        assert float(found["errors"].mean()) < 2 * float(long_alone["errors"].mean())
