"""`strategy="auto"`: it tries plans on the steps of the run itself, keeps the fastest, and changes no number."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from equality import distance
from manyhands.foresight.plan.auto_training import CHOSEN
from manyhands.foresight.plan.machine_record import MachineRecord

pytestmark = pytest.mark.usefixtures("compiler_imported", "own_record")

AUTO = "auto shortest=0"
STEPS = 1500


@pytest.fixture
def own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine remembers is not what an earlier test has left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def loss(of: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(of(batch[0]), batch[1])


def task() -> mh.Task:
    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 2)]
        return nn.Sequential(*layers).double()

    chance = torch.Generator().manual_seed(3)
    data = tuple(torch.randn(96, wide, generator=chance).double() for wide in (64, 2))
    return mh.Task(
        model=model,
        loss=loss,
        data=data,
        evaluation=data,
        batch_size=32,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


def trained(strategy: str, out: Path | None = None, **more: Any) -> mh.Run:
    options = mh.Options(progress="none", resume_command="", evaluate_every=500, **more.pop("options", {}))
    workers = 1 if strategy == "single" else 2
    return mh.fit(task(), strategy, workers=workers, steps=STEPS, out=out, options=options, **more)


def weights(run: mh.Run) -> dict[str, Tensor]:
    return run.model.state_dict()


def test_what_is_tried_is_a_part_of_the_run_and_its_numbers_are_those_of_one_process(tmp_path: Path) -> None:
    alone, run = trained("single"), trained(AUTO, tmp_path / "run")
    assert distance(weights(run), weights(alone)) < 1e-9
    rows = [row for row in run.history if "seconds" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    ends = [row["at_s"] for row in rows]
    assert ends == sorted(ends)
    assert [row["evaluation_loss"] for row in run.history if "evaluation_loss" in row] == pytest.approx(
        [row["evaluation_loss"] for row in alone.history if "evaluation_loss" in row], rel=1e-9
    )
    told = run.summary["auto"]
    tried = {one["strategy"]: one["seen_s"] for one in told["tried"]}
    assert 2 <= len(tried) <= 4
    assert "mirrored" in tried
    assert told["strategy"] == min(tried, key=lambda text: tried[text])
    (sentence,) = (note for note in run.summary["notes"] if note.startswith("auto: "))
    assert sentence.startswith(
        f"auto: {told['strategy']} is the fastest of {len(tried)} plans that were tried"
    )
    assert json.loads((tmp_path / "run" / CHOSEN).read_text()) == told
    pairs = MachineRecord.of_this_machine().pairs(2)
    assert len(pairs) == len(tried)
    assert all(one.predicted_s > 0 and one.seen_s > 0 for one in pairs)


def test_without_a_directory_nothing_is_left_and_what_was_seen_corrects_the_next_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    first, second = trained(AUTO), trained(AUTO)
    assert distance(weights(first), weights(second)) < 1e-9
    assert not list(tmp_path.glob("manyhands-auto-*"))
    assert len(MachineRecord.of_this_machine().pairs(2)) > 3


def test_a_short_run_is_not_planned() -> None:
    run = trained("auto")
    assert run.summary["auto"] == {"strategy": "mirrored", "workers": 2, "tried": []}
    assert distance(weights(run), weights(trained("mirrored"))) == 0.0


def test_a_setting_is_chosen_and_the_strategy_is_not() -> None:
    run = trained("pipeline microbatches=auto")
    assert run.summary["auto"]["strategy"] == "pipeline microbatches=2"
    assert distance(weights(run), weights(trained("single"))) < 1e-9


def test_a_run_that_is_killed_keeps_what_was_chosen(tmp_path: Path) -> None:
    """After the choice the whole command is killed; the resumed run does not try again."""
    out = tmp_path / "run"
    words = [
        "train",
        "line",
        "--workers",
        "2",
        "--strategy",
        AUTO,
        "--steps",
        "6000",
        "--checkpoint-every",
        "50",
    ]
    command = [sys.executable, "-m", "manyhands", *words, "--out", str(out)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as run:
        try:
            until = time.monotonic() + 120
            while not (out / CHOSEN).exists():
                assert run.poll() is None, run.stderr.read() if run.stderr else ""
                assert time.monotonic() < until, "nothing was chosen within 120 s"
                time.sleep(0.05)
        finally:
            os.killpg(run.pid, signal.SIGKILL)
    chosen = json.loads((out / CHOSEN).read_text())
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search("auto: .* is the fastest", done.stderr)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["strategy"], summary["steps"]) == (chosen["strategy"], 6000)


def test_under_torchrun_every_process_follows(tmp_path: Path) -> None:
    script = Path(__file__).with_name("auto_script.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(script), str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    alone = weights(trained("single"))
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(told["tried"]) >= 2
        assert distance(torch.load(tmp_path / f"{rank}.pt"), alone) < 1e-9


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("auto tries=0", "tries=0 must be an integer of at least 1"),
        ("auto must=fast", "must='fast' is not a promise"),
        ("auto shortest=soon", "'soon' is not a number of seconds"),
        ("mirrored algorithm=auto", "mirrored has no setting 'algorithm'"),
        ("pipeline stages=auto data=x", "data"),
    ],
)
def test_what_makes_no_sense_is_said_before_training(strategy: str, said: str) -> None:
    with pytest.raises(mh.UserError, match=said):
        trained(strategy)
