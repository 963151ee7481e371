"""`ps` between hosts: the workers of one host push and fetch as one, and alone where one of them is lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import manyhands as mh
import near_script
from equality import distance
from hosts import Hosts, two_hosts
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import read_run_events
from manyhands.strategies.ps.audit import Verdict, audit_run
from manyhands.strategies.ps.log_rows import StepRow
from manyhands.strategies.ps.replay import replay
from manyhands.strategies.ps.update_files import read_logs
from placed_script import STEPS, options

__all__ = ["two_hosts"]

SCRIPT = Path(near_script.__file__)
HOST_OF = (0, 0, 0, 1, 1)  # by rank: the server, then two workers on each host
PATIENCE_S = 300.0
IN_STEP = ("ps", "ps servers=2")
BOUNDED = "ps consistency=bounded:2 servers=2"


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def servers_of(strategy: str) -> int:
    return 2 if "servers=2" in strategy else 1


def run_all(hosts: Hosts, strategy: str, folder: Path, killed: int = -1) -> None:
    """Run to the end; the process that is killed is started once more, as whoever started it would."""
    places = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    hosted = (0,) * (servers_of(strategy) - 1) + HOST_OF
    variables = {**os.environ, **places, "WORLD_SIZE": str(len(hosted))}

    def start(rank: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, SCRIPT, folder, strategy, killed]
        command = [*hosts.inside(hosted[rank]), *map(str, words)]
        with (folder / f"said-{rank}").open("ab") as said:
            # Not forked warm: the leader's child would be of the template's host.
            return subprocess.Popen(command, stdout=said, stderr=said, env={**variables, "RANK": str(rank)})

    processes = {rank: start(rank) for rank in range(len(hosted))}
    try:
        deadline = time.monotonic() + PATIENCE_S
        if killed >= 0:
            assert processes[killed].wait(timeout=PATIENCE_S) == -9
            processes[killed] = start(killed)
        for rank, process in processes.items():
            code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
            assert code == 0, (rank, (folder / f"said-{rank}").read_text())
    finally:
        for process in processes.values():
            process.kill()
            process.wait(timeout=240)


def check(strategy: str, folder: Path) -> list[StepRow]:
    """In step, the weights are those of one process; the record holds. The steps of every shard."""
    one = near_script.task_for(strategy)
    if strategy != BOUNDED:
        alone = mh.fit(one, "ps", workers=1, steps=STEPS, options=options())
        assert distance(torch.load(folder / "weights.pt"), alone.model.state_dict()) < 1e-9
    found = audit_run(folder / "run")
    assert found.found.verdict is Verdict.COMPLETE, found
    again = replay(folder / "run", one)
    assert again.first_difference is None
    assert again.same_bytes, again
    logs = read_logs(folder / "run")
    return [
        row for files in logs.files.values() for rows in files for row in rows if isinstance(row, StepRow)
    ]


@pytest.mark.parametrize("strategy", IN_STEP)
def test_two_hosts_push_once_each_and_end_with_the_weights_of_one_process(
    strategy: str, two_hosts: Hosts, tmp_path: Path
) -> None:
    run_all(two_hosts, strategy, tmp_path)
    steps = check(strategy, tmp_path)
    assert len(steps) == STEPS * servers_of(strategy)
    for row in steps:  # while the workers of a host still connect to each other, each pushes alone
        found = [update.carrier for update in row.updates]
        assert found == [-1, 0, -1, 2] or row.version <= 2, row


@pytest.mark.parametrize("killed", [3, 4])
def test_a_killed_worker_of_a_host_is_replaced_and_the_others_go_on(
    killed: int, two_hosts: Hosts, tmp_path: Path
) -> None:
    """Once the one that sends for its host, and once another."""
    strategy = "ps servers=2"
    run_all(two_hosts, strategy, tmp_path, killed=killed + 1)
    steps = check(strategy, tmp_path)
    carriers = {tuple(update.carrier for update in row.updates) for row in steps}
    assert (-1, 0, -1, 2) in carriers
    assert any(found[2:] == (-1, -1) for found in carriers), "the step of the death was pushed alone"


@pytest.mark.parametrize("killed", [-1, 4])
def test_pushes_within_a_bound_leave_in_order_and_are_complete(
    killed: int, two_hosts: Hosts, tmp_path: Path
) -> None:
    run_all(two_hosts, BOUNDED, tmp_path, killed=killed)
    steps = check(BOUNDED, tmp_path)
    assert len(steps) == 2 * near_script.steps_for(BOUNDED)
    assert {update.slot for row in steps for update in row.updates} == {0, 1, 2, 3}


def test_parameters_are_sent_while_gradients_arrive_and_are_those_of_shared_memory(tmp_path: Path) -> None:
    width, steps = (1500, 2000), 4  # 12 MB, which no socket takes at once
    chance = torch.Generator().manual_seed(3)
    large = mh.Task(
        model=lambda: torch.nn.Linear(*width),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        data=(torch.randn(16, width[0], generator=chance),),
        batch_size=8,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )
    ended = {}
    for link in ("tcp", "shared"):
        out = tmp_path / link
        ended[link] = mh.fit(
            large, f"ps link={link}", workers=2, steps=steps, out=out, options=options()
        ).model.state_dict()
        found = replay(out, large)
        assert found.same_bytes, found
        [server] = [role for role in read_run_events(out / "events").roles if role.role == 2]
        answers = server.of(EventKind.SEND)
        ahead = [int(one["value"]) for one in answers if one["step"] > 0]
        assert any(ahead) is (link == "tcp")
        assert set(answers["num_bytes"].tolist()) == {
            0 if link == "shared" else 4 * (width[0] + 1) * width[1]
        }
    for name, value in ended["tcp"].items():
        assert torch.equal(value, ended["shared"][name])
