"""The end of a run on parameter servers, with servers that die while they leave their shards."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import leaving_task
import manyhands as mh
from assassin import events
from equality import OPTIMIZERS, distance, make_task, train_plainly
from manyhands.strategies.ps.audit import audit_run


@pytest.mark.parametrize(
    "strategy", ["ps servers=2", pytest.param("ps servers=2 replicas=1", marks=pytest.mark.soak)]
)
def test_a_server_that_has_left_its_shards_and_died_is_followed_when_the_other_dies(
    strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second had to leave cannot be had without the first: both go back to a snapshot, and leave."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setenv("LEAVING_FOLDER", str(tmp_path))
    for report in ("first", "second"):
        (tmp_path / report).touch()
    out, options = tmp_path / "run", mh.Options(checkpoint_every=5, timeout_s=40)
    run = mh.fit(leaving_task.task(), strategy, workers=1, steps=20, out=out, options=options)
    assert [event["event"] for event in events(out)].count("died") == 2
    assert distance(run.model.state_dict(), train_plainly(make_task(OPTIMIZERS["sgd"]), 20)) < 1e-9
    found = audit_run(out).found
    assert (found.words, found.violations, found.missing) == ("restored, 0 lost", (), ())


@pytest.mark.parametrize("strategy", ["ps", "ps servers=2 consistency=async link=tcp"])
def test_a_run_that_has_no_steps_left_stays_a_sound_one_when_it_is_resumed(
    strategy: str, tmp_path: Path
) -> None:
    task, out = make_task(OPTIMIZERS["sgd"]), tmp_path / "run"
    mh.fit(task, strategy, workers=2, steps=6, out=out)
    assert audit_run(out).found.words == "complete"
    written = {path.name: path.read_text().count("\n") for path in (out / "updates").glob("worker.*.jsonl")}
    for _ in range(2):
        summary = mh.fit(task, strategy, workers=2, steps=6, out=out, resume=True).summary
        assert {name: summary["recorded"][name] for name in written} == written
        found = audit_run(out).found
        assert (found.words, found.violations, found.missing) == ("restored, 0 lost", (), ())
