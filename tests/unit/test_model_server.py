"""When workers of a model server are replaced or taken down, without a process."""

from __future__ import annotations

import time

import pytest

from manyhands.errors import UserError
from manyhands.serving import model_server
from manyhands.serving.model_server import Replicas, ServeOptions, Staffing


def test_workers_are_replaced_unless_none_ever_answers() -> None:
    staffing = Staffing()
    assert [staffing.replaces(worker) for worker in (1, 2, 3)] == [True, True, False]
    staffing = Staffing()
    for worker in range(50):
        staffing.ready(worker)
        assert staffing.replaces(worker)
    assert [staffing.replaces(worker) for worker in (60, 61)] == [True, True]
    staffing.ready(62)
    assert [staffing.replaces(worker) for worker in (62, 63, 64)] == [True, True, True]


def test_ctrl_c_while_the_first_worker_loads_takes_the_workers_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Replicas) -> None:
        while self._wanted.is_set():
            time.sleep(0.001)
        self.ended.set()

    def interrupted(_timeout_s: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Replicas, "_run", run)
    monkeypatch.setattr(model_server, "warm", lambda: None)
    started = Replicas(None, 1, lambda *_: None, lambda *_: None)  # type: ignore[arg-type]
    monkeypatch.setattr(started._answers, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        started.start()
    over = started.ended.is_set()
    started.stop()
    assert over


def test_workers_must_be_some() -> None:
    with pytest.raises(UserError, match="workers=0"):
        ServeOptions(workers=0)
