"""Checkpoints against real crashes, real full disks and real second processes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import warm
from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import UserError

# The content of a snapshot is a function of its step and revision: a right one can be told from a mixture.
PREAMBLE = """
import json, os, random, resource, shutil, signal, sys, time
from pathlib import Path
import torch
from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.checkpoint import CheckpointStore, Snapshot
from manyhands.data.store.atomic import MetricsLog

def snapshot(step, revision=0, count=2000):
    value = float(1000 * step + revision)
    optimizer = {"state": {0: {"exp_avg": torch.full((count,), -value)}}, "param_groups": []}
    return Snapshot(step=step, model={"w": torch.full((count,), value)}, optimizer=optimizer,
                    extra={"value": value}, score=value)

def value_of(loaded):
    values = {loaded.extra["value"], *loaded.model["w"].tolist()}
    values |= {-v for v in loaded.optimizer["state"][0]["exp_avg"].tolist()}
    assert len(values) == 1, values
    return values.pop()

def found(store):
    loaded = store.load()
    return {"step": loaded.step, "value": value_of(loaded), "left": sorted(os.listdir(store.folder)),
            "skipped": [str(damage) for damage in loaded.skipped]}
"""

# Writers are forked, so that importing torch is paid once; their parent has one thread (see `run`). A writer
# kills itself before its n-th change of the folder, for n = 1, 2, ... until the save comes through: every
# in-between state of the folder is met.
KILL_AT_EVERY_MOMENT = (
    PREAMBLE
    + """
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}

def dies_at(moment, folder):
    left = moment
    def count(event, arguments):
        nonlocal left
        changes = event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and str(arguments[0]).startswith(str(folder)):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)

def moments(folder, step, revision, keep):
    for before in (1, 2):
        CheckpointStore(folder / "start").save(snapshot(before))
    killed, moment = True, 0
    while killed:
        store = CheckpointStore(folder / str(moment), keep)
        shutil.copytree(folder / "start", store.folder)
        child = os.fork()
        if child == 0:
            dies_at(moment, store.folder)
            store.save(snapshot(step, revision))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        killed = os.WIFSIGNALED(status)
        assert killed or status == 0, status
        row = found(store)
        store.save(snapshot(9))
        yield {**row, "after": sorted(os.listdir(store.folder)), "steps": store.steps()}
        moment += 1

folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
print(json.dumps({name: list(moments(folder / name, *case)) for name, case in cases.items()}))
"""
)

KILL_BY_SURPRISE = (
    PREAMBLE
    + """
store, drawn, rows, step = CheckpointStore(Path(sys.argv[1]), keep=2), random.Random(5), [], 0
for _ in range(8):
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)  # without its parent the writer ends too, at the next report
    while child == 0:
        for revision in (0, 1):
            store.save(snapshot(step, revision))
            os.write(send, b"%d " % step)
        step += 1
    os.close(send)
    reported = os.read(receive, 100)  # the first save; any moment after it will do
    time.sleep(drawn.uniform(0, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(receive, 1000):
        reported += more
    os.close(receive)
    rows.append({**found(store), "reported": int(reported.split()[-1])})
    step = rows[-1]["step"] + 1
print(json.dumps(rows))
"""
)

FILL_THE_DISK = (
    PREAMBLE
    + """
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
store = CheckpointStore(folder / "checkpoints", keep=1)
store.save(snapshot(1))
before = sorted(os.listdir(store.folder))
try:
    store.save(snapshot(2, count=1 << 20))
except WriteFailed as error:
    print(json.dumps({"error": str(error), "before": before, "after": sorted(os.listdir(store.folder)),
                      "value": value_of(store.load())}))
store.save(snapshot(3))
assert value_of(store.load()) == 3000.0

log = MetricsLog(folder / "metrics.jsonl")
log.append({"step": 1})
try:
    while True:
        log.append({"step": 2, "text": "x" * 100_001})
except WriteFailed as error:
    assert "metrics.jsonl could not be written" in str(error), error
content = (folder / "metrics.jsonl").read_bytes()
assert content.endswith(b"}\\n"), "a part of the record that did not fit stayed"
assert log.read()[0] == {"step": 1}
"""
)


def run(script: str, *arguments: object, before: tuple[str, ...] = ()) -> str:
    command = [*before, sys.executable, "-c", script, *map(str, arguments)]
    started = subprocess.run if before else warm.run
    single = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = started(command, capture_output=True, text=True, timeout=240, check=False, env=single)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_writer_killed_at_any_moment_leaves_a_good_newest_checkpoint(tmp_path: Path) -> None:
    cases = {"new": (3, 0, 10), "new, others rotate out": (3, 0, 1), "replaced": (2, 7, 10)}
    report: dict[str, list[dict[str, Any]]] = json.loads(
        run(KILL_AT_EVERY_MOMENT, tmp_path, json.dumps(cases))
    )
    assert report.keys() == cases.keys()
    for name, (step, revision, _) in cases.items():
        moments = report[name]
        assert {moment["value"] for moment in moments} == {2000.0, 1000.0 * step + revision}, name
        for moment in moments:
            assert moment["skipped"] == [], "something half-made looks like a checkpoint"
            assert moment["after"] == [f"step-{kept:08d}" for kept in moment["steps"]], "leftovers stayed"
            assert moment["steps"][-1] == 9
    left = {Path(name).suffix for moments in report.values() for moment in moments for name in moment["left"]}
    assert left == {"", ".writing", ".removing", ".replaced"}, "a kind of moment was never met"


def test_a_writer_killed_by_surprise_leaves_a_good_newest_checkpoint(tmp_path: Path) -> None:
    for report in json.loads(run(KILL_BY_SURPRISE, tmp_path)):
        assert report["skipped"] == []
        assert report["step"] >= report["reported"], "a checkpoint that was reported as saved is gone"
        assert report["value"] in (1000.0 * report["step"], 1000.0 * report["step"] + 1)


def test_a_file_size_limit_is_a_sentence_and_costs_nothing(tmp_path: Path) -> None:
    assert_nothing_lost(json.loads(run(FILL_THE_DISK, tmp_path, 1 << 20)), "File too large")


def test_a_full_disk_is_a_sentence_and_costs_nothing(tmp_path: Path) -> None:
    """On a file system of 2 MiB in a mount namespace of its own, which ends with the process."""
    mount = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    prepare = f'mount -t tmpfs -o size=2m none "{tmp_path}" && exec "$0" "$@"'
    try:
        probe = subprocess.run([*mount, prepare, "true"], capture_output=True, timeout=240, check=False)
    except FileNotFoundError:
        pytest.skip("the program unshare is not there")
    if probe.returncode:
        pytest.skip("this machine does not let us mount a small file system")
    report = json.loads(run(FILL_THE_DISK, tmp_path, 0, before=(*mount, prepare)))
    assert_nothing_lost(report, "No space left on device")
    assert os.listdir(tmp_path) == []


def assert_nothing_lost(report: dict[str, Any], why: str) -> None:
    assert "the checkpoint of step 2 could not be written" in report["error"]
    assert f"{why} (it needs 8.0 MiB and " in report["error"]
    assert report["before"] == report["after"] == ["step-00000001"]
    assert report["value"] == 1000.0


HOLD_THE_LOCK = """
import sys
from manyhands.data.store.rundir import RunDirectory
config = {"task": "t", "seed": 0, "batch_size": 1, "samples": 1, "parameters": {}}
directory = RunDirectory.create(sys.argv[1], config)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_is_in_use_as_long_as_its_run_lives_and_free_when_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path)]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert select.select([holder.stdout], [], [], 30)[0], "the holder did not start within 30 s"
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(UserError, match=rf"in use by another run \(process {holder.pid} on "):
                RunDirectory.open(tmp_path)
        finally:
            holder.kill()
    RunDirectory.open(tmp_path).close()


def test_a_child_that_inherits_the_lock_holds_it_on(tmp_path: Path) -> None:
    config = {"task": "t", "seed": 0, "batch_size": 1, "samples": 1, "parameters": {}}
    directory = RunDirectory.create(tmp_path, config)
    assert directory.lock is not None
    inherited = (directory.lock.descriptor,)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=inherited) as child:
        directory.close()
        with pytest.raises(UserError, match=rf"process {os.getpid()} on "):
            RunDirectory.open(tmp_path)
        child.communicate(timeout=240)
    RunDirectory.open(tmp_path).close()
