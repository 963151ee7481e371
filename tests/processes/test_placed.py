"""`fit` in processes that somebody else started: on one host and on two, alike and in trouble."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import manyhands as mh
import placed_script
import warm
from equality import distance, same_bits
from hosts import Hosts, two_hosts
from manyhands.observe.analyse.explain import explain
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import read_run_events
from manyhands.strategies.common.collectives.collective import gradient_layouts
from manyhands.workloads.tasks import TASKS
from placed_script import EQUAL, STEPS, digest, model, options, task

__all__ = ["two_hosts"]


SCRIPT = Path(placed_script.__file__)
PATIENCE_S = 300.0


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_ranks(
    commands: Sequence[Sequence[str]], master: str, folder: Path
) -> list[subprocess.CompletedProcess[str]]:
    """One process for each command, rank by rank, as torchrun would start them; killed if they do not end."""
    port = free_port()
    places = {"MASTER_ADDR": master, "MASTER_PORT": port, "WORLD_SIZE": str(len(commands))}
    processes = []
    try:
        for rank, command in enumerate(commands):
            said = (folder / f"said-{rank}").open("w+")
            erred = (folder / f"erred-{rank}").open("w+")
            variables = {**os.environ, **places, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
            process = warm.Popen(command, trains=True, stdout=said, stderr=erred, env=variables)
            processes.append((process, said, erred))
        deadline = time.monotonic() + PATIENCE_S
        for process, _, _ in processes:
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
    finally:
        for process, _, _ in processes:
            process.kill()
            process.wait(timeout=240)
    done = []
    for process, said, erred in processes:
        texts = []
        for file in (said, erred):
            file.seek(0)
            texts.append(file.read())
            file.close()
        done.append(subprocess.CompletedProcess(process.args, process.returncode, *texts))
    return done


def test_two_hosts_end_with_the_weights_of_one_and_resume_without_a_common_file_system(
    two_hosts: Hosts, tmp_path: Path
) -> None:
    commands = [two_hosts.script(host, SCRIPT, "equal", tmp_path) for host in (0, 0, 1, 1)]
    done = run_ranks(commands, two_hosts.address(0), tmp_path)
    assert [one.returncode for one in done] == [0, 0, 0, -9], done
    for other in done[1:]:  # nothing but what torch's store says of its sockets
        assert [line for line in other.stderr.splitlines() if "[c10d]" not in line] == []
    report = [one.stdout.splitlines() for one in done]
    same = {"allreduce": "allreduce algorithm=hierarchical group=2"}  # by itself, over hosts
    alone = {
        name: mh.fit(task(), same.get(name, name), workers=4, steps=STEPS, options=options())
        for name in EQUAL
    }
    # Over hosts, sums go by host first, which `local` does not do on one: the same but for rounding.
    local = alone.pop("local steps=2")
    ended = [torch.load(tmp_path / f"local-{rank}.pt") for rank in range(4)]
    assert distance(ended[0], local.model.state_dict()) < 1e-9
    assert all(same_bits(ended[0], other) for other in ended)
    for rank, lines in enumerate(report):
        found = {line.split()[1]: line.split()[2:] for line in lines if line.startswith("equal ")}
        for name, run in alone.items():
            assert found[name.replace(" ", "-")] == [digest(run), str(len(run.history)), "None"], (rank, name)
        path = str(tmp_path / "rank-0") if rank == 0 else "None"
        whole = alone["allreduce"]
        assert found["resumed"] == [digest(whole), str(len(whole.history) + 1), path]
        refused = next(line for line in lines if line.startswith("hogwild: "))
        assert "strategy=hogwild supports one host, but there are 2" in refused
        assert "its workers write to one memory" in refused
        took_s = next(line for line in lines if line.startswith("hogwild took: "))
        assert float(took_s.split()[-1]) < 30.0, "nobody waits for who has left"
    check_central(tmp_path, report)
    folder = tmp_path / "rank-0"
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0"]
    kept = {path.name for path in (folder / "events").iterdir()}
    assert {f"worker-{rank}.{part}" for rank in range(4) for part in ("bin", "2.bin")} == kept
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["workers"] == 4
    assert [one["steps"] for one in summary["per_worker"]] == [STEPS // 2] * 4
    assert torch.isfinite(torch.tensor(summary["final"]["loss"]))


def check_central(folder: Path, report: Sequence[Sequence[str]]) -> None:
    """A copy on each host: to the bit the same on all, near that of one host; what crossed; who was killed."""
    alone = mh.fit(task(), "central", workers=4, steps=STEPS, options=options())
    ended = [torch.load(folder / f"central-{rank}.pt") for rank in range(4)]
    assert distance(ended[0], alone.model.state_dict()) < 1e-9
    assert all(same_bits(ended[0], other) for other in ended)
    for rank, lines in enumerate(report):
        [found] = [line.split()[2:] for line in lines if line.startswith("equal central ")]
        path = str(folder / "central-0") if rank == 0 else "None"
        assert found[1:] == [str(len(alone.history) + 1), path]
    gradients = sum(layout.count * layout.dtype.itemsize for layout in gradient_layouts(model(), 25 << 20))
    status = 64 * torch.float64.itemsize  # what all agree on besides, at its smallest
    for role in read_run_events(folder / "central-0" / "events").roles:
        sends = role.of(EventKind.SEND)
        crossed = [(int(one["peer"]), int(one["num_bytes"])) for one in sends]
        leads = {0: 2, 2: 0}.get(role.role)
        assert crossed == ([] if leads is None else [(leads, gradients + status)] * STEPS)
    for rank, lines in enumerate(report[:3]):
        killed = next(line for line in lines if line.startswith("killed: "))
        assert "worker 3 on " in killed, (rank, killed)
        assert "is lost: the connection " in killed
        took_s = next(line for line in lines if line.startswith("killed took: "))
        assert float(took_s.split()[-1]) < 30.0


def test_trouble_in_one_process_is_told_in_a_sentence_by_all_within_seconds(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "trouble", str(tmp_path)]
    done = run_ranks([command] * 3, "127.0.0.1", tmp_path)
    assert [one.returncode for one in done] == [0, 0, -9], done
    report = [dict(line.split(": ", 1) for line in one.stdout.splitlines()) for one in done]
    host = socket.gethostname()
    for lines in report:
        assert "workers=7: torchrun started 3 processes, all of them workers" in lines["workers"]
        assert lines["elastic"] == "came to its end"
    alike = "allreduce algorithm=hierarchical group=3"
    over_links = mh.fit(task(), alike, workers=3, steps=STEPS, options=options())
    assert {lines["elastic digest"] for lines in report} == {digest(over_links)}
    steps = f"has steps={STEPS + 1}, but the leader, worker 0 on {host}, has steps={STEPS}"
    assert f"worker 1 on {host} {steps}" in report[1]["steps"]
    assert any(f"has steps={STEPS + rank}, but the leader" in report[0]["steps"] for rank in (1, 2))
    raised = f"worker 1 on {host} (process "
    for lines in (report[0], report[2]):
        assert raised in lines["raises"]
        assert "raised ZeroDivisionError at step 3: a defect of the task" in lines["raises"]
    assert "¶" in report[0]["raises"]  # with the traceback, where the run is kept
    assert "placed_script.py" in report[0]["raises"]
    assert report[1]["raises"] == "a defect of the task"
    for lines in report[:2]:
        assert f"worker 2 on {host} (process " in lines["killed"]
        assert "is lost: the connection " in lines["killed"]  # ended, or was reset
        assert "; last seen " in lines["killed"]
        assert float(lines["killed took"]) < 30.0, (
            lines
        )  # and not timeout_s; seconds, where the machine is free
        assert "rank 2 of 3 did not connect within 1 s" in lines["missing"]
    assert "missing" not in report[2]
    fault = json.loads((tmp_path / "e" / "members.jsonl").read_text().splitlines()[-1])
    assert (fault["event"], fault["name"]) == ("fault", "worker 2")


def test_the_command_under_torchrun_prints_once_and_ends_as_local_workers_do(tmp_path: Path) -> None:
    out, report = tmp_path / "run", tmp_path / "told.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    asked = ["-m", "manyhands", "train", "digits", "--strategy", "mirrored", "--steps", "6"]
    done = warm.run(
        [*launcher, *asked, "--out", str(out), "--json", str(report), "--progress", "none"],
        starts=2,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 workers · 6 steps") == 1
    assert "not read" not in done.stderr
    local = mh.fit(TASKS["digits"].build(), "mirrored", workers=2, steps=6, options=options())
    assert json.loads(report.read_text())["final"] == local.summary["final"]
    found = explain(read_run_events(out / "events").roles, synchronous=True)
    assert (len(found.workers), found.steps) == (2, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "told.json"]
