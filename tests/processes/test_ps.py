"""Parameter servers as real processes: equal to the plain loop, and alive after deaths."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from assassin import Assassin, events
from equality import OPTIMIZERS, distance, loss, make_task, train_plainly
from manyhands.errors import ManyhandsError, NonFinite
from manyhands.tasks import TASKS

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize(
    ("strategy", "workers", "optimizer"),
    [
        ("ps", 2, "adamw"),
        pytest.param("ps servers=3", 2, "momentum", marks=pytest.mark.soak),
        pytest.param("ps servers=2 replicas=1", 4, "momentum", marks=pytest.mark.soak),
        ("ps servers=2 replicas=1 link=tcp", 2, "adamw"),
    ],
)
def test_sync_ends_with_the_weights_of_the_plain_loop(strategy: str, workers: int, optimizer: str) -> None:
    task = make_task(OPTIMIZERS[optimizer])
    run = mh.fit(task, strategy, workers=workers, steps=50)
    plain = train_plainly(task)
    assert distance(run.model.state_dict(), plain) < 1e-9
    assert len(run.history.loss) == 50
    assert run.summary["staleness"]["max"] == 0


def test_six_kills_of_workers_and_servers(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Assassin(out, kills=6, seed=3) as assassin:
        run = mh.fit(
            _patient(TASKS["digits"].build()), "ps servers=2 replicas=1", workers=2, epochs=30, out=out
        )
    assert len(assassin.struck) == 6, f"training was over after {assassin.struck}"
    assert run.summary["final"]["accuracy"] > 0.97
    recoveries = [event for event in events(out) if event["event"] == "recovered"]
    assert len(recoveries) == 6
    _audit(out)


def test_a_paused_worker_is_fenced_and_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "run"
    task = _patient(make_task(OPTIMIZERS["momentum"]), 0.05)
    with (
        Assassin(out, kills=1, signal=signal.SIGSTOP, names=("worker 1",)) as assassin,
        mh.start(task, "ps consistency=async", workers=2, steps=10**6, out=out) as running,
    ):
        _await(lambda: assassin.struck)
        pid = next(event["pid"] for event in events(out) if event.get("name") == "worker 1")
        _await(lambda: any(event["event"] == "recovered" for event in events(out)))
        os.kill(pid, signal.SIGCONT)
        _await(lambda: any(event["event"] == "fenced" for event in events(out)))
        running.stop()
    _audit(out, "incomplete")


@pytest.mark.soak
def test_workers_come_and_go_and_sync_still_equals_the_plain_loop(tmp_path: Path) -> None:
    task, out = make_task(OPTIMIZERS["momentum"]), tmp_path / "run"
    with mh.start(_patient(task, 0.02), "ps servers=2", workers=1, steps=300, out=out) as running:
        _await(lambda: len(_joined(out)) == 3)
        assert running.add_worker() == 1
        with pytest.raises(mh.UserError, match="slot=7"):
            running.remove_worker(7)
        _await(lambda: len(_joined(out)) == 4)
        running.remove_worker(0)
        run = running.result(200)
    assert distance(run.model.state_dict(), train_plainly(task, 300)) < 1e-9
    assert [worker["steps"] > 0 for worker in run.summary["per_worker"]] == [True, True]


@pytest.mark.soak
def test_without_a_replica_a_server_goes_on_from_its_snapshot_and_says_what_was_lost(tmp_path: Path) -> None:
    out = tmp_path / "run"
    task = _patient(make_task(OPTIMIZERS["momentum"]), 0.02)
    options = mh.Options(checkpoint_every=10)
    with Assassin(out, kills=1, names=("server",), pause_s=1.0):
        run = mh.fit(task, "ps servers=2 consistency=async", workers=2, steps=400, out=out, options=options)
    assert any(event["event"] == "recovered" for event in events(out))
    assert all(torch.isfinite(value).all() for value in run.model.state_dict().values())
    _audit(out, "restored")


def test_a_killed_run_resumes_to_the_weights_of_the_plain_loop(tmp_path: Path) -> None:
    task = make_task(OPTIMIZERS["adamw"])
    options = mh.Options(checkpoint_every=10)
    with mh.start(
        _patient(task, 0.02), "ps servers=2", workers=2, steps=500, out=tmp_path / "r", options=options
    ) as run:
        _await(lambda: (tmp_path / "r" / "shards" / "1" / "step-00000020").exists())
        run.stop()
    resumed = mh.fit(
        task, "ps servers=2", workers=2, steps=60, out=tmp_path / "r", resume=True, options=options
    )
    assert resumed.summary["resumed_from_step"] >= 20
    assert distance(resumed.model.state_dict(), train_plainly(task, 60)) < 1e-9
    with pytest.raises(mh.UserError, match="workers is 3"):
        mh.fit(task, "ps servers=2", workers=3, steps=70, out=tmp_path / "r", resume=True)


class _BreaksOnAServer(torch.optim.SGD):
    """Raises in the server that applies the fourth update."""

    steps_taken = 0

    def step(self, closure: Any = None) -> Any:
        type(self).steps_taken += 1
        if type(self).steps_taken > 3:
            raise RuntimeError("the optimizer broke")
        return super().step(closure)


def test_what_a_server_raised_is_not_blamed_on_a_worker_and_has_the_time_of_the_other_rows(
    tmp_path: Path,
) -> None:
    task = make_task(lambda parameters: _BreaksOnAServer(parameters, lr=0.01))
    began = time.monotonic()
    with pytest.raises(ManyhandsError):
        mh.fit(_patient(task, 0.1), "ps", workers=2, steps=100, out=tmp_path / "r")
    took_s = time.monotonic() - began
    rows = [json.loads(line) for line in (tmp_path / "r/members.jsonl").read_text().splitlines()]
    fault = rows[-1]
    assert fault["event"] == "fault"
    assert "the optimizer broke" in fault["sentence"]
    assert not fault.get("name", "").startswith("worker"), "two workers wait for it, and neither is to blame"
    started_s = [row["at_s"] for row in rows if row["event"] == "joined"]
    told_s = [row["at_s"] for row in rows if "at_s" in row]
    assert told_s == sorted(told_s), "one time base"
    assert max(started_s) <= fault["at_s"] < took_s - 0.5, (
        "seconds since training began, without the start before"
    )


def test_a_loss_that_is_not_finite_stops_the_run_by_name() -> None:
    task = replace(make_task(OPTIMIZERS["sgd"]), loss=_breaks_once)
    with pytest.raises(NonFinite, match="the loss is not finite"):
        mh.fit(task, "ps consistency=async", workers=2, steps=50)


@pytest.mark.soak
def test_an_update_that_is_not_finite_can_be_left_out() -> None:
    task = replace(make_task(OPTIMIZERS["sgd"]), loss=_breaks_once)
    options = mh.Options(skip_nonfinite=True)
    run = mh.fit(task, "ps servers=2 consistency=async", workers=2, steps=40, options=options)
    left_out = [note for note in run.summary["notes"] if "is not finite" in note]
    assert left_out
    assert len(run.history.loss) == 40 - len(left_out)
    assert all(torch.isfinite(value).all() for value in run.model.state_dict().values())


def _breaks_once(model: Any, batch: Any) -> torch.Tensor:
    value = loss(model, batch)
    return value * float("nan") if int(batch[0].sum()) % 5 == 0 else value


def _patient(task: mh.Task, seconds: float = 0.01) -> mh.Task:
    """The same task, slow enough to strike at."""

    def slow(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(seconds)
        return task.loss(model, batch)

    return replace(task, loss=slow, evaluation=task.evaluation)


def _joined(out: Path) -> list[dict[str, Any]]:
    return [event for event in events(out) if event["event"] == "joined"]


def _audit(out: Path, verdict: str = "complete") -> None:
    from manyhands.server.audit_files import audit_run

    found = audit_run(out).found
    told = [*(violation.sentence for violation in found.violations), *found.missing]
    assert found.verdict.value == verdict, f"{told[:5]}\n{[json.dumps(event) for event in events(out)]}"


def _await(condition: Any, within_s: float = 100.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
