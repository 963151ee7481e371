"""Roles of a cluster specification for minutes: killed, cut off, on hosts of their own, and started wrongly."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from hosts import switched_hosts
from manyhands.data.store.rundir import RunDirectory
from manyhands.places.external.process_group import _near
from manyhands.strategies.ps.audit import audit_run
from roles import Cluster, cluster, free_ports

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[1] / "processes" / "roles_script.py"
LEAST = {"chief": 1, "worker": 1, "ps": 1}


def by_hand(spec: Path, kind: str, index: int, *words: str | Path) -> list[str | Path]:
    """As an operator would start it."""
    return ["-m", "manyhands", "role", "--spec", spec, "--type", kind, "--index", str(index), "--", *words]


def written(folder: Path, spec: Mapping[str, Any]) -> Path:
    path = folder / "cluster.toml"
    path.write_text("".join(f"{kind} = {json.dumps(listed)}\n" for kind, listed in spec.items()))
    return path


def require_clean(run: Path) -> None:
    found = audit_run(run).found
    assert not found.violations, found.violations
    assert not found.missing, found.missing
    assert not found.lost


def steps_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def has_guests(address: str) -> bool:
    """Whether somebody is connected to the leader that has this address on loopback."""
    name = f"@{(_near(address) or '').removeprefix('unix:')}"
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return any(row[-1] == name and row[5] == "03" for row in rows)  # connected


def require_one_model(roles: Cluster) -> None:
    weights = {one.said.split("weights ")[1].split()[0] for one in roles.roles.values()}
    assert len(weights) == 1, roles.report()


def test_a_worker_and_a_server_that_were_killed_are_started_again_by_hand(tmp_path: Path) -> None:
    """Without a chief worker 0 leads, and a child of it trains. With replicas nothing is lost."""
    words = (SCRIPT, "ps replicas=1 consistency=async", "400", "out=run", "pause=0.02")
    with cluster(tmp_path, {"worker": 2, "ps": 2}) as roles:
        spec = written(tmp_path, roles.spec)

        def start(kind: str, index: int) -> None:
            roles.start(kind, index, by_hand(spec, kind, index, *words), variables={})

        everyone = [("ps", 0), ("worker", 1), ("ps", 1), ("worker", 0)]
        for one in everyone:
            start(*one)
        leader = roles.roles["worker", 0]
        roles.wait_for(lambda: steps_done(tmp_path / "run") > 20, "step 20")
        first = roles.roles["worker", 1]
        start("worker", 1)  # a second one: it is told, and the first goes on
        assert roles.roles["worker", 1].ended() == 1
        assert "two processes have rank 1" in roles.roles["worker", 1].said
        roles.roles["worker", 1] = first
        for one, what in ((("ps", 0), "every shard"), (("worker", 1), "slot 1")):
            roles.roles[one].kill()
            took_s = roles.wait_for(
                lambda one=one: f"{one[0]} {one[1]} on" in leader.said.split("two processes")[-1],
                f"word of {one}",
            )
            start(*one)
            roles.wait_for(lambda what=what: f"{what} recovered" in leader.said, f"recovery of {what}")
            print(f"{one} was missed after {took_s:.1f} s")
        assert [roles.roles[one].ended() for one in everyone] == [0] * 4, roles.report()
        require_one_model(roles)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [one["what"] for one in summary["recoveries"]] == ["every shard", "slot 1"]
    require_clean(tmp_path / "run")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (["ps", "20", "task=another"], "has task=another, but the leader"),
        (["ps consistency=async", "20"], "has strategy=ps consistency=async, but the leader"),
        (["ps", "21"], "has steps=21, but the leader"),
    ],
)
def test_a_worker_that_was_asked_for_something_else_is_named_on_every_role(
    tmp_path: Path, asked: list[str], sentence: str
) -> None:
    with cluster(tmp_path, LEAST) as roles:
        for kind in ("chief", "ps"):
            roles.start(kind, 0, [SCRIPT, "ps", "20"])
        roles.wait_for(lambda: has_guests(roles.spec["chief"][0]), "server at the leader")
        roles.start("worker", 0, [SCRIPT, *asked])
        assert [one.ended() for one in roles.roles.values()] == [1] * 3
        for one in roles.roles.values():
            assert sentence in one.said, roles.report()
            assert one.said.count("\n") == 1


def near() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


@pytest.mark.parametrize("kind", ["ps", "chief"])
def test_a_port_in_use_is_reported(tmp_path: Path, kind: str) -> None:
    """By a server's role to everybody; of the leader nobody can know but itself, the others wait for it in vain."""
    with cluster(tmp_path, LEAST) as roles, socket.create_server(("127.0.0.1", 0)) as taken, near() as other:
        roles.spec[kind] = [f"127.0.0.1:{taken.getsockname()[1]}"]
        if kind == "chief":  # which is led by a socket of its host where it is on loopback
            name = _near(roles.spec[kind][0])
            assert name is not None
            other.bind("\0" + name.removeprefix("unix:"))
        for one in LEAST:
            roles.start(one, 0, [SCRIPT, "ps", "20", "timeout=20"])
        assert [one.ended() for one in roles.roles.values()] == [1] * 3
        who = roles.roles.values() if kind == "ps" else [roles.roles["chief", 0]]
        for role in who:
            assert "cannot listen there" in role.said, roles.report()
            assert "in use" in role.said
        if kind == "chief":
            for waiting in (roles.roles["ps", 0], roles.roles["worker", 0]):
                assert "cannot join" in waiting.said or "did not answer" in waiting.said, roles.report()


def test_a_role_that_nobody_starts_is_named(tmp_path: Path) -> None:
    with cluster(tmp_path, LEAST) as roles:
        for kind in ("chief", "worker"):
            roles.start(kind, 0, [SCRIPT, "ps", "20", "timeout=20"])
        assert [one.ended() for one in roles.roles.values()] == [1] * 2
        for one in roles.roles.values():
            assert f"ps 0 at {roles.spec['ps'][0]}" in one.said, roles.report()


def test_under_torchrun_the_first_ranks_serve(tmp_path: Path) -> None:
    """Rank 0 leads, and a child of it serves."""
    (port,) = free_ports(1)
    where = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with cluster(tmp_path, {}) as ranks:
        for rank in range(4):
            command = [SCRIPT, "ps servers=2", "30", "out=run"]
            ranks.start("rank", rank, command, variables={**where, "RANK": str(rank)})
        assert [one.ended() for one in ranks.roles.values()] == [0] * 4, ranks.report()
        require_one_model(ranks)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["workers"] == 2
    assert len(summary["servers"]) == 2
    require_clean(tmp_path / "run")


def test_four_hosts_end_with_the_weights_of_four_processes(tmp_path: Path) -> None:
    """Started in any order; the sums are in the order of the ring on both, so the weights are the same to the bit.

    Each process has one thread, as four on this machine have: a sum over two threads is another one.
    """
    train = [
        "train",
        "gpt",
        "--strategy",
        "allreduce algorithm=ring",
        "--steps",
        "8",
        "--progress",
        "none",
    ]
    here = warm.run(
        [sys.executable, "-m", "manyhands", *train, "--workers", "4", "--out", str(tmp_path / "here")],
        capture_output=True,
        timeout=400,
        check=False,
    )
    assert here.returncode == 0, here.stderr
    with switched_hosts(4) as hosts:
        addresses = [f"{hosts.address(host)}:2222" for host in range(4)]
        with cluster(tmp_path, {"worker": 4}, addresses) as roles:
            spec = written(tmp_path, roles.spec)
            for host in (2, 0, 3, 1):
                asked = by_hand(spec, "worker", host, *train, "--insecure", "--out", "there")
                alone = [*hosts.inside(host), "taskset", "-c", str(min(os.sched_getaffinity(0)))]
                roles.start("worker", host, asked, before=alone, variables={})
            assert [one.ended() for one in roles.roles.values()] == [0] * 4, roles.report()
    one, other = (
        RunDirectory.open(tmp_path / name, lock=False).checkpoints().load().model
        for name in ("here", "there")
    )
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_a_worker_whose_cable_was_out_for_a_while_comes_again(tmp_path: Path) -> None:
    """Named on both sides in time; the others go on meanwhile, and nothing is lost."""
    words = (SCRIPT, "ps consistency=async", "600", "pause=0.05", "insecure=yes")
    with switched_hosts(4) as hosts:
        addresses = [f"{hosts.address(host)}:2222" for host in range(4)]
        with cluster(tmp_path, {"chief": 1, "worker": 2, "ps": 1}, addresses) as roles:
            spec = written(tmp_path, roles.spec)
            everyone = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
            for host, (kind, index) in enumerate(everyone):
                asked = by_hand(
                    spec, kind, index, *words, *([f"out={tmp_path}/run"] if kind == "chief" else [])
                )
                roles.start(kind, index, asked, before=hosts.inside(host), variables={})
            run, chief, worker = tmp_path / "run", roles.roles["chief", 0], roles.roles["worker", 1]
            roles.wait_for(lambda: steps_done(run) > 20, "step 20")
            hosts.plug(2, plugged=False)
            noticed_s = [
                roles.wait_for(lambda: "worker 1 on" in chief.said, "word of the leader", 30.0),
                roles.wait_for(lambda: "the leader of the run" in worker.said, "word of the worker", 30.0),
            ]
            print(f"noticed after {noticed_s} s")
            done = steps_done(run)
            roles.wait_for(lambda: steps_done(run) > done + 20, "progress without it", 60.0)
            hosts.plug(2, plugged=True)
            roles.wait_for(lambda: "slot 1 recovered" in chief.said, "its return", 60.0)
            assert [roles.roles[one].ended() for one in everyone] == [0] * 4, roles.report()
    require_clean(tmp_path / "run")


def test_a_worker_that_began_beside_its_leader_is_started_again_on_another_host(tmp_path: Path) -> None:
    """All roles of the specification are on one host at first, which others reach all the same."""
    words = (SCRIPT, "ps consistency=async", "300", "pause=0.05", "insecure=yes")
    with switched_hosts(2) as hosts:
        addresses = [f"{hosts.address(0)}:{2222 + number}" for number in range(4)]
        with cluster(tmp_path, {"chief": 1, "worker": 2, "ps": 1}, addresses) as roles:
            spec = written(tmp_path, roles.spec)
            everyone = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]

            def start(kind: str, index: int, host: int) -> None:
                out = [f"out={tmp_path}/run"] if kind == "chief" else []
                asked = by_hand(spec, kind, index, *words, *out)
                roles.start(kind, index, asked, before=hosts.inside(host), variables={})

            for one in everyone:
                start(*one, host=0)
            roles.wait_for(lambda: steps_done(tmp_path / "run") > 20, "step 20")
            roles.roles["worker", 1].kill()
            start("worker", 1, host=1)
            chief = roles.roles["chief", 0]
            roles.wait_for(lambda: "slot 1 recovered" in chief.said, "its return")
            assert [roles.roles[one].ended() for one in everyone] == [0] * 4, roles.report()
            require_one_model(roles)
