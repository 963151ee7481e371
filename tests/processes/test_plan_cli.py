"""`manyhands plan` on this machine: a table, a file that `train --plan` follows, and plans that were tried."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import run_command
from manyhands.facts import StepCosts
from manyhands.foresight.plan.machine_record import MachineRecord
from manyhands.foresight.plan.planning import PlanRequirements, plan
from manyhands.foresight.plan.step_costs import stack
from manyhands.native.cache_folder import cache_folder

pytestmark = pytest.mark.usefixtures("compiler_imported")

CLUSTER = """
hosts = 2
workers_per_host = 4
speed = 10
memory = "16GiB"
price = 2.0

[links]
inside = { latency = "5us", bandwidth = "20GB/s" }
between = { latency = "30us", bandwidth = "10Gbit/s" }
"""

DEVICE = """
[devices.big]
peak = "100TFLOPS"
bandwidth = "1TB/s"
efficiency = 0.5
launch = "5us"
"""


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose costs are known, so that a plan does not measure them."""
    monkeypatch.setenv(
        "NUMBA_CACHE_DIR", str((cache_folder() or tmp_path).parent)
    )  # compiled kernels stay where they are
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    record = MachineRecord.of_this_machine()
    for workers in (1, 2):
        record.keep_costs(workers, {"mirrored": StepCosts(step_s=1e-5), "central": StepCosts(step_s=2e-5)})


def manyhands(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manyhands", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.usefixtures("measured")
def test_a_plan_is_chosen_tried_and_trained_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    asked = ("--strategies", "mirrored; central; hogwild", "--verify", "2", "--steps", "500")
    done = manyhands("plan", "line", "--workers", "2", *asked, "--json", path, "--out", tmp_path / "page")
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert {row["strategy"] for row in record["plans"]} == {"mirrored", "central", "hogwild"}
    assert {one["strategy"] for one in record["tried"]} == {"mirrored", "central"}
    assert record["strategy"] == min(record["tried"], key=lambda one: one["seen_s"])["strategy"]
    assert all(row["total_s"] == pytest.approx(500 * row["step_s"]) for row in record["plans"])
    assert "ruled out: its weights are not those of one process" in done.stdout
    assert re.search(
        r"mirrored: [\d.]+ [mµ]s a step were seen, [\d.]+ [mµ]s predicted \([+-]\d+ %\)\.", done.stdout
    )
    assert f"page  {tmp_path / 'page' / 'report.html'}" in done.stdout
    page = (tmp_path / "page" / "report.html").read_text()
    assert all(f">{row['strategy']}<" in page for row in record["plans"])
    assert json.loads((tmp_path / "page" / "figures.json").read_text())["plans"] == record["plans"]
    pairs = MachineRecord.of_this_machine().pairs(2)
    assert {one.kind for one in pairs} == {"mirrored", "central"}
    out = tmp_path / "run"
    trained = manyhands("train", "line", "--plan", path, "--steps", "4", "--out", out)
    assert trained.returncode == 0, trained.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["strategy"], summary["workers"]) == (record["strategy"], 2)
    for more, said in (
        (("--workers", "2"), "--plan says the strategy and the workers; leave out --strategy and --workers"),
        (("--plan", tmp_path / "none.json"), "none.json cannot be read: No such file or directory"),
        (("--batch-size", "8"), "plan.json is for line with no options; give the same ones"),
    ):
        capfd.readouterr()
        assert run_command(monkeypatch, "train", "line", "--plan", path, *more, "--steps", "4") == 2
        wrong = capfd.readouterr().err
        assert said in wrong
        assert wrong.strip().count("\n") == 0


@pytest.mark.usefixtures("measured")
def test_a_plan_that_fails_when_it_is_tried_ends_nothing() -> None:
    """The learning rate's schedule is made in a run alone, and not where a task is measured."""

    def broken(_optimizer: torch.optim.Optimizer) -> Any:
        raise RuntimeError("no such schedule")

    task = replace(stack(2, 16, 16), scheduler=broken)
    required = PlanRequirements(strategies=("mirrored", "central"))
    found = plan(task, workers=2, required=required, verify=2)
    assert found.tried == ()
    assert found.strategy == found.ranked.best.strategy
    assert len(found.notes) >= 2
    for row in found.ranked.finalists:
        said = next(note for note in found.notes if note.startswith(f"{row.name} failed when it was tried: "))
        assert "no such schedule" in said
        assert "\n" not in said


@pytest.mark.usefixtures("measured")
def test_an_interrupted_plan_says_how_to_plan_again(tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    command = [sys.executable, "-m", "manyhands", "plan", "line", "--workers", "2", "--measure"]
    with said.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    deadline = time.monotonic() + 120
    try:
        while "made-up model 1" not in said.read_text():
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130
    finally:
        process.kill()
        process.wait()
    last = said.read_text().splitlines()[-1]
    assert last.startswith("manyhands: ended by SIGINT; plan again with: ")
    assert last.endswith("plan line --workers 2 --measure")
    assert "Traceback" not in said.read_text()


@pytest.mark.usefixtures("measured")
def test_a_machine_is_measured_once(tmp_path: Path) -> None:
    """What steps cost is measured for a number of workers that is new, and then it is known."""
    record = MachineRecord.of_this_machine()
    (record.folder / "costs-2.json").unlink()
    for says in ("made-up model 1 of 3", ""):
        done = manyhands("plan", "line", "--workers", "2", "--strategies", "mirrored; central")
        assert done.returncode == 0, done.stderr
        assert ("made-up model" in done.stderr) == bool(says)
        assert "Warning" not in done.stderr  # of strategies that are only tried
    found = MachineRecord.of_this_machine().costs(2)
    assert found is not None
    assert {"mirrored", "central", "ps", "sharded"} <= found.keys()
    assert all(one.step_s >= 0 and one.message_s >= 0 and one.byte_s >= 0 for one in found.values())


@pytest.mark.parametrize("device", ["", DEVICE], ids=["speed", "device"])
def test_other_machines_are_planned_from_a_file(device: str, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER if not device else CLUSTER.replace("speed = 10", 'device = "big"') + device)
    done = manyhands("plan", "line", "--cluster", cluster, "--must", "none", "--json", tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    assert "line on 8 workers · 2 hosts of 4" in done.stdout
    assert "Nothing was run on these machines" in done.stdout
    assert ("the roofline of big (100 TFLOPS × 0.5, 1,000 GB/s)" in done.stdout) == bool(device)
    assert ("measuring the task" in done.stderr) == (not device)
    record = json.loads((tmp_path / "plan.json").read_text())
    known = [row for row in record["plans"] if row["step_s"] is not None]
    assert len(known) > 10
    assert all(row["price"] > 0 for row in known)
    assert all(row["reason"] for row in record["plans"] if row["strategy"] != record["strategy"])


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--must", "fast"), "must='fast' is not a promise; allowed: equal, sync, survives"),
        (("--verify", "-1"), "verify=-1 must be at least 0"),
        (("--workers", "2,x"), "--workers 'x' is not an integer"),
        (("--devices", "7"), "--devices 7: this machine has 0 GPUs"),
        (("--hosts", "none"), "--hosts says how many hosts there are, and not how fast"),
        (("--budget", "20"), "budget is a price, but the cluster has none"),
        (("--budget", "20parsec"), "--budget '20parsec' is neither a price nor a time above 0 with a unit"),
        (("--budget", "-2"), "--budget '-2' is neither a price nor a time above 0 with a unit"),
        (("--devices", "x"), "--devices 'x' is not the number of a GPU; write several as 0,2"),
        (("--must", "survives=x"), "must='survives=x': 'x' is not a number of losses; write survives=1"),
        (("--out", "/"), "--out / is not empty (it contains "),
        (("--strategies", ";"), "strategies is empty; name at least one"),
        (("--memory", "10b"), "no plan keeps must=equal and fits; the nearest is "),
        (("--strategies", "mirored"), "unknown strategy 'mirored'"),
        (("--cluster", "none.toml"), "cluster file none.toml cannot be read"),
        (
            ("--cluster", "none.toml", "--verify", "2"),
            "verify tries plans on this machine; leave the cluster out",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    words: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    counts = [] if "--workers" in words else ["--workers", "1"]
    assert run_command(monkeypatch, "plan", "line", *counts, *words) == 2
    assert said in capfd.readouterr().err.splitlines()[-1]
