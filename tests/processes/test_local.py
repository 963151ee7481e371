"""`local` through the commands: trained in two parts with `--resume`, and watched as it ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import manyhands as mh
from commands import run_command
from equality import same_bits
from manyhands.data.store.rundir import RunDirectory
from manyhands.workloads.tasks import build
from watched import watched


def test_a_run_resumed_by_command_ends_like_an_uninterrupted_one_and_can_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, strategy = tmp_path / "run", "local steps=3"
    command = ["train", "digits", "--strategy", strategy, "--workers", "2", "--out", str(run)]
    for part in (["--steps", "6"], ["--steps", "13", "--resume", "--json", str(tmp_path / "s.json")]):
        assert run_command(monkeypatch, *command, *part) == 0, capfd.readouterr().err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["strategy"], summary["resumed_from_step"], summary["steps"]) == (strategy, 6, 13)
    kept = RunDirectory.open(run, lock=False).checkpoints().load(13)
    whole = mh.fit(build("digits"), strategy, workers=2, steps=13)
    assert same_bits(kept.model, whole.model.state_dict())

    page = watched(run)
    assert strategy in page
    assert "13 of 13" in page
