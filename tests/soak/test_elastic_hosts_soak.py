"""Elastic all-reduce over hosts: workers that are killed, started again, and cut off, while the others go on."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from hosts import switched_hosts
from manyhands.data.store.rundir import RunDirectory
from roles import Cluster, cluster

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]

SCRIPT = Path(__file__).parents[1] / "processes" / "roles_script.py"
STRATEGY = "allreduce elastic=yes"
KILLS = 4


def start(roles: Cluster, spec: Path, before: list[str], index: int, *words: str) -> None:
    by_hand = ["-m", "manyhands", "role", "--spec", spec, "--type", "worker", "--index", str(index), "--"]
    roles.start("worker", index, [*by_hand, SCRIPT, STRATEGY, *words], before=before, variables={})


def events(run: Path) -> list[dict[str, object]]:
    path = run / "members.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def count(run: Path, what: str) -> int:
    return sum(one["event"] == what for one in events(run))


def has(run: Path, what: str, pid: int) -> bool:
    """Whether this has happened to the member that is this process."""
    report = events(run)
    members = {one["member"] for one in report if one["event"] == "started" and one["pid"] == pid}
    return any(one["event"] == what and one["member"] in members for one in report)


def steps_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def require_one_model(roles: Cluster, run: Path, steps: int) -> None:
    """Everyone ended with the same weights, which were compared after each step, and every step was taken once."""
    assert [one.ended() for one in roles.roles.values()] == [0] * len(roles.roles), roles.report()
    weights = {one.said.split("weights ")[1].split()[0] for one in roles.roles.values()}
    assert len(weights) == 1, roles.report()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "metrics" not in row] == list(range(1, steps + 1))


def require_as_alone(folder: Path, run: Path, steps: int) -> None:
    """The weights are those of one process, but for the rounding of sums in another order."""
    with cluster(folder, {}) as alone:
        alone.start("alone", 0, [SCRIPT, "single", str(steps), f"out={folder / 'alone'}"], variables={})
        assert alone.roles["alone", 0].ended() == 0, alone.report()
    here, there = (
        RunDirectory.open(path, lock=False).checkpoints().load(steps).model
        for path in (folder / "alone", run)
    )
    for name, value in here.items():
        assert (value - there[name]).abs().max() < 1e-9, name


def test_workers_of_two_hosts_are_killed_and_started_again_and_the_survivors_stay_alike(
    tmp_path: Path,
) -> None:
    """Two hosts with two workers each; who is started again may be on the other host than before.

    On a busy machine a worker may be taken for silent besides, and comes again by itself: that is one more change.
    """
    run, hold, steps, dice = tmp_path / "run", tmp_path / "hold", 600, random.Random(int(time.time()))
    words = [str(steps), f"hold={hold}", "insecure=yes", "check=1", f"out={run}"]
    hold.touch()  # until all have come: how long a process takes to start is the machine's to say
    with switched_hosts(2) as hosts:
        addresses = [f"{hosts.address(rank // 2)}:{2222 + rank}" for rank in range(4)]
        with cluster(tmp_path, {"worker": 4}, addresses) as roles:
            spec = tmp_path / "cluster.json"
            spec.write_text(json.dumps(roles.spec))
            for rank in (2, 0, 3, 1):
                start(roles, spec, hosts.inside(rank // 2), rank, *words)
            roles.wait_for(lambda: steps_done(run) > 3, "step 3")
            for _ in range(KILLS):
                time.sleep(dice.uniform(0.0, 2.0))
                rank = dice.choice((1, 2, 3))
                victim = roles.roles["worker", rank]
                victim.kill()
                gone, done = victim.process.pid, steps_done(run)
                roles.wait_for(lambda gone=gone: has(run, "died", gone), f"word of worker {rank}")
                roles.wait_for(lambda done=done: steps_done(run) > done + 2, "steps without it")
                start(roles, spec, hosts.inside(dice.choice((0, 1))), rank, *words)
                came = roles.roles["worker", rank].process.pid
                roles.wait_for(lambda came=came: has(run, "joined", came), f"return of worker {rank}")
            hold.unlink()
            require_one_model(roles, run, steps)
    require_as_alone(tmp_path, run, steps)
    counted = json.loads((run / "summary.json").read_text())["membership"]
    print(counted)
    assert counted["lost"] >= KILLS
    assert counted["joined"] >= KILLS
    assert counted["steps_computed_twice"] <= counted["changes"]


def test_a_host_whose_cable_was_out_comes_back_and_the_other_goes_on_meanwhile(tmp_path: Path) -> None:
    run, steps = tmp_path / "run", 400
    words = [str(steps), "pause=0.1", "insecure=yes", "check=1", f"out={run}"]
    with switched_hosts(2) as hosts:
        addresses = [f"{hosts.address(rank // 2)}:{2222 + rank}" for rank in range(4)]
        with cluster(tmp_path, {"worker": 4}, addresses) as roles:
            spec = tmp_path / "cluster.json"
            spec.write_text(json.dumps(roles.spec))
            for rank in range(4):
                start(roles, spec, hosts.inside(rank // 2), rank, *words)
            roles.wait_for(lambda: steps_done(run) > 20, "step 20")
            hosts.plug(1, plugged=False)
            noticed_s = roles.wait_for(lambda: count(run, "died") == 2, "word of both", 30.0)
            done = steps_done(run)
            roles.wait_for(lambda: steps_done(run) > done + 20, "progress without them", 60.0)
            print(f"noticed after {noticed_s:.1f} s")
            hosts.plug(1, plugged=True)
            roles.wait_for(lambda: count(run, "joined") == 6, "their return", 90.0)
            require_one_model(roles, run, steps)


def test_the_leaders_own_worker_is_lost_and_a_worker_elsewhere_keeps_the_checkpoints(tmp_path: Path) -> None:
    """While it is away the lowest worker is on another host: what is due is sent to the leader."""
    run, steps = tmp_path / "run", 300
    words = [str(steps), "pause=0.1", "insecure=yes", "check=1", f"out={run}"]
    with switched_hosts(2) as hosts:
        addresses = [f"{hosts.address(rank)}:2222" for rank in range(2)]
        with cluster(tmp_path, {"worker": 2}, addresses) as roles:
            spec = tmp_path / "cluster.json"
            spec.write_text(json.dumps(roles.spec))
            for rank in range(2):
                start(roles, spec, hosts.inside(rank), rank, *words)
            for number in (1, 2, 3):
                before = steps_done(run)
                roles.wait_for(lambda before=before: steps_done(run) > before + 30, "steps")
                own = [one for one in events(run) if one["event"] == "started" and one["name"] == "worker 0"]
                os.kill(int(str(own[-1]["pid"])), signal.SIGKILL)
                roles.wait_for(lambda number=number: count(run, "joined") == 2 + number, f"join {number}")
            require_one_model(roles, run, steps)
    require_as_alone(tmp_path, run, steps)
