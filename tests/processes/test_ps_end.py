"""The end of a run on parameter servers, with servers that die while they leave their shards."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import leaving_task
import manyhands as mh
from assassin import events
from equality import OPTIMIZERS, distance, make_task, train_plainly
from manyhands.server.audit_files import audit_run

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    "strategy", ["ps servers=2", pytest.param("ps servers=2 replicas=1", marks=pytest.mark.soak)]
)
def test_a_server_that_has_left_its_shards_and_died_is_followed_when_the_other_dies(
    strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second had to leave cannot be had without the first: both go back to a snapshot, and leave."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setenv("LEAVING_FOLDER", str(tmp_path))
    for told in ("first", "second"):
        (tmp_path / told).touch()
    out, options = tmp_path / "run", mh.Options(checkpoint_every=5, timeout_s=40)
    run = mh.fit(leaving_task.task(), strategy, workers=1, steps=20, out=out, options=options)
    assert [event["event"] for event in events(out)].count("died") == 2
    assert distance(run.model.state_dict(), train_plainly(make_task(OPTIMIZERS["sgd"]), 20)) < 1e-9
    found = audit_run(out).found
    assert (found.words, found.violations, found.missing) == ("restored, 0 lost", (), ())
