"""`compare --faults`: real runs, killed and stopped for real, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import run_command
from manyhands.cli.command_process import child_command
from manyhands.lab.faults.blows import why_not
from manyhands.lab.faults.fault_costs import FAULTS, PAUSE_S, fault_cost
from manyhands.lab.faults.struck_run import RunAsked, strike, undisturbed
from manyhands.lab.sweep.run_sweep import usable_cores

WORKER, SERVER, *_, CUT, FULL = FAULTS


def asked(out: Path, strategy: str, steps: int = 120) -> RunAsked:
    words = [
        "train", "digits", f"--strategy={strategy}", "--workers=2", f"--steps={steps}", "--checkpoint-every=10",
    ]  # fmt: skip
    return RunAsked(
        words=words, out=out, launch=lambda words: child_command(usable_cores(), words), steps=steps
    )


def test_a_run_that_ends_is_continued_to_the_same_numbers(tmp_path: Path) -> None:
    alone = undisturbed(asked(tmp_path / "alone", "mirrored"))
    cost = fault_cost(WORKER, strike(asked(tmp_path / "struck", "mirrored"), WORKER, 40), alone.final)
    assert not cost.went_on
    assert cost.ended_well
    assert "was killed by SIGKILL" in cost.sentence
    assert 0 <= cost.repeated < 80
    assert cost.still_s is not None
    assert cost.still_s > 0
    assert cost.changes == dict.fromkeys(
        ("loss", "evaluation_loss", "accuracy"), pytest.approx(0.0, abs=1e-12)
    )


def test_a_parameter_server_goes_on(tmp_path: Path) -> None:
    run = asked(tmp_path / "run", "ps consistency=async", 400)
    cost = fault_cost(SERVER, strike(run, SERVER, 40), {})
    assert cost.went_on, cost.sentence
    assert cost.ended_well
    assert cost.lost is not None


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "compare",
        "digits",
        "--faults",
        "--strategies",
        "single",
        "--steps",
        "300",
        "--batch-size",
        "32",
    ]
    assert run_command(monkeypatch, *words, "--json", "f.json", "--out", "runs") == 0, capfd.readouterr().err
    printed = capfd.readouterr()
    assert "ended, resumed" in printed.out
    assert "run 2 of 3 · single, all killed" in printed.err
    found = json.loads((tmp_path / "f.json").read_text())
    row, full = found["rows"]
    assert full["fault"] == FULL.name
    assert full["went_on"] if not full["skipped"] else why_not(FULL.kind)
    (alone,) = found["alone"]["strategies"]
    assert (alone["runs"], alone["bytes_per_step"]["median"]) == (1, 0)
    assert found["ease"]["single"]["processes"] == {"worker": 1}
    assert (row["strategy"], row["fault"], row["went_on"], row["problem"]) == (
        "single",
        "all killed",
        False,
        "",
    )
    assert row["changes"]["evaluation_loss"] == pytest.approx(0.0, abs=1e-12)
    assert "all killed" in (tmp_path / "runs/report.html").read_text()
    config = json.loads((tmp_path / "runs/01-single-1/undisturbed/config.json").read_text())
    assert config["config"]["batch_size"] == 32

    assert run_command(monkeypatch, *words, "--price", "worker=1") == 2
    assert "--price does not go with --faults" in capfd.readouterr().err


@pytest.mark.skipif(bool(why_not(CUT.kind)), reason=why_not(CUT.kind))
def test_a_cut_link_is_waited_for(tmp_path: Path) -> None:
    """Nothing tells either end, so that nothing comes for as long as the cut lasts; then the kernel sends again."""
    alone = undisturbed(asked(tmp_path / "alone", "allreduce link=tcp"))
    cost = fault_cost(CUT, strike(asked(tmp_path / "cut", "allreduce link=tcp"), CUT, 40), alone.final)
    assert cost.went_on, cost.sentence
    assert cost.still_s is not None
    assert cost.still_s > PAUSE_S - 1
    assert cost.changes["evaluation_loss"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.skipif(bool(why_not(FULL.kind)), reason=why_not(FULL.kind))
def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    alone = undisturbed(asked(tmp_path / "alone", "mirrored", 400))
    cost = fault_cost(FULL, strike(asked(tmp_path / "full", "mirrored", 400), FULL, 40), alone.final)
    assert cost.went_on, cost.sentence
    assert "No space left" in (tmp_path / "full.log").read_text()
    assert cost.changes["evaluation_loss"] == pytest.approx(0.0, abs=1e-12)
    assert not any((tmp_path / "full").iterdir()), "the small disk is gone"


def test_workers_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "compare",
        "digits",
        "--elastic",
        "--strategies",
        "single; allreduce elastic=yes",
        "--steps",
        "600",
    ]
    assert run_command(monkeypatch, *words, "--json", "f.json", "--out", "runs") == 0, capfd.readouterr().err
    printed = " ".join(capfd.readouterr().out.split())
    assert "No elasticity is promised by single." in printed
    assert "Workers joined and left allreduce elastic=yes." in printed
    single, elastic = json.loads((tmp_path / "f.json").read_text())["elastic"]
    assert (single["promised"], single["problem"]) == ("no", "")
    assert elastic["went_on"]
    assert elastic["computes_s"] > 0
    assert all(one > 0 for one in elastic["each"])
    run = tmp_path / "runs/02-allreduce-1"
    membership = json.loads((run / "elastic/summary.json").read_text())["membership"]
    assert (membership["joined"], membership["lost"]) == (1, 0)
    rows = [json.loads(line) for line in (run / "elastic/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 601)), "every step, and each once"
