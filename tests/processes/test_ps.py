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
import severed_task
from assassin import Assassin, events
from equality import OPTIMIZERS, distance, loss, make_task, train_plainly
from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import ManyhandsError, NonFinite, WorkerFailed
from manyhands.workloads.tasks import TASKS


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
    with Assassin(out, kills=6, seed=3, done=tmp_path / "done") as assassin:
        slow = _until(tmp_path / "done", TASKS["digits"].build())
        run = mh.fit(slow, "ps servers=2 replicas=1", workers=2, epochs=6, out=out)
    assert len(assassin.struck) == 6, f"training was over after {assassin.struck}"
    assert run.summary["final"]["accuracy"] > 0.97
    recoveries = [event for event in events(out) if event["event"] == "recovered"]
    assert len(recoveries) == 6
    _audit(out)


@pytest.mark.parametrize(
    ("consistency", "link"),
    [
        ("sync", "shared"),
        *(
            pytest.param(consistency, link, marks=pytest.mark.soak)
            for consistency in ("sync", "bounded:2", "async", "softsync:2")
            for link in ("shared", "tcp")
            if (consistency, link) != ("sync", "shared")
        ),
    ],
)
def test_a_paused_worker_is_fenced_and_takes_the_next_place(
    consistency: str, link: str, tmp_path: Path
) -> None:
    """It wakes when another has its slot, stands by, and is at work again after the next death, to the end.

    What it had begun to compute, of parameters that changed meanwhile, counts for nothing; a replay knows that too.
    """
    out, steps = tmp_path / "run", 120
    task = make_task(OPTIMIZERS["sgd"])
    strategy = f"ps servers=2 consistency={consistency} link={link}"
    stopping = _stops_once(tmp_path / "stop", _until(tmp_path / "go", task))
    with mh.start(stopping, strategy, workers=2, steps=steps, out=out) as running:
        _await(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size)
        workers = {_pid(out, name): name for name in ("worker 0", "worker 1")}
        (tmp_path / "stop").touch()
        _await(lambda: _recovered(out) == 1)
        paused = next(pid for pid in workers if (tmp_path / f"stop-{pid}").exists())
        known = _last_step(out)
        _await(lambda: _last_step(out) > known + 1)  # so that the parameters have changed since
        os.kill(paused, signal.SIGCONT)
        _await(lambda: any(event["event"] == "fenced" for event in events(out)))
        other = next(pid for pid in workers if pid != paused)
        os.kill(other, signal.SIGKILL)
        _await(lambda: _recovered(out) == 2)
        (tmp_path / "go").touch()
        run = running.result(240)
    started = [event["name"] for event in events(out) if event["event"] == "started"]
    assert started.count(workers[other]) == 1, "nobody new was needed for the one that was killed"
    assert len(run.history.loss) == steps
    if consistency == "sync":
        assert distance(run.model.state_dict(), train_plainly(task, steps)) < 1e-9
    _audit(out)
    replayed = mh.replay(out, task)
    assert replayed.first_difference is None
    assert replayed.same_bytes


@pytest.mark.parametrize(
    ("link", "after"),
    [
        ("shared", 1),
        ("tcp", 2),
        *(
            pytest.param(link, after, marks=pytest.mark.soak)
            for link, after in [("shared", 2), ("shared", 3), ("tcp", 1), ("tcp", 3)]
        ),
    ],
)
def test_a_worker_killed_between_its_messages_to_two_shards_leaves_the_plain_loop(
    link: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left").mkdir()
    monkeypatch.setenv("SEVERED", f"{tmp_path / 'left'}:{after}")
    task, out = severed_task.task(), tmp_path / "run"
    run = mh.fit(task, f"ps servers=2 link={link}", workers=2, steps=30, out=out)
    assert sum(event["event"] == "died" for event in events(out)) == 1
    assert distance(run.model.state_dict(), train_plainly(task, 30)) < 1e-9
    _audit(out)


def test_a_server_that_raises_is_followed_by_its_replica(tmp_path: Path) -> None:
    out, task = tmp_path / "run", make_task(OPTIMIZERS["sgd"])
    fragile = replace(_until(tmp_path / "go", task), scheduler=_fails_once(tmp_path / "fail"))
    with mh.start(fragile, "ps servers=2 replicas=1", workers=2, steps=60, out=out) as running:
        _await(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size)
        (tmp_path / "fail").touch()
        _await(lambda: _recovered(out) == 1)
        (tmp_path / "go").touch()
        run = running.result(240)
    died = [event["sentence"] for event in events(out) if event["event"] == "died"]
    assert len(died) == 1, died
    assert "raised RuntimeError" in died[0]
    assert distance(run.model.state_dict(), train_plainly(task, 60)) < 1e-9
    _audit(out)


def test_an_error_that_every_server_raises_ends_the_run_with_it() -> None:
    task = replace(make_task(OPTIMIZERS["sgd"]), scheduler=_fails_at_step_5)
    with pytest.raises(WorkerFailed, match=r"raised RuntimeError.*step 5 is beyond this schedule") as failed:
        mh.fit(task, "ps servers=2 replicas=1", workers=2, steps=50)
    assert any("RuntimeError again" in note for note in failed.value.__notes__)


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
    kept = RunDirectory.open(out, lock=False).checkpoints().load()
    assert distance(kept.model, run.model.state_dict()) == 0, "shards that ended at different versions"
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
    wider = mh.fit(task, "ps servers=3", workers=3, steps=70, out=tmp_path / "r", resume=True)
    assert wider.summary["resumed_from_step"] == 60
    assert distance(wider.model.state_dict(), train_plainly(task, 70)) < 1e-9


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

    def slowly_built() -> torch.nn.Module:
        time.sleep(0.6)  # so that what comes before the training takes longer than that
        return task.model()

    slow = replace(_patient(task, 0.1), model=slowly_built)
    began = time.monotonic()
    with pytest.raises(ManyhandsError):
        mh.fit(slow, "ps", workers=2, steps=100, out=tmp_path / "r")
    took_s = time.monotonic() - began
    rows = [json.loads(line) for line in (tmp_path / "r/members.jsonl").read_text().splitlines()]
    fault = rows[-1]
    assert fault["event"] == "fault"
    assert "the optimizer broke" in fault["sentence"]
    assert not fault.get("name", "").startswith("worker"), "two workers wait for it, and neither is to blame"
    started_s = [row["at_s"] for row in rows if row["event"] == "joined"]
    reported_s = [row["at_s"] for row in rows if "at_s" in row]
    assert reported_s == sorted(reported_s), "one time base"
    of_day = {(row["event"], row.get("name")): row["unix_s"] for row in rows}
    assert of_day["joined", "worker 0"] - of_day["started", "worker 0"] > 0.5, "the start itself took time"
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


def _until(go: Path, task: mh.Task, seconds: float = 0.25) -> mh.Task:
    """The same task, slow until a file is there."""

    def slow(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(0.0 if go.exists() else seconds)
        return task.loss(model, batch)

    return replace(task, loss=slow)


def _stops_once(file: Path, task: mh.Task) -> mh.Task:
    """The same task; whichever process finds such a file first stops between forward and backward, and says so."""

    def stopping(model: Any, batch: Any) -> torch.Tensor:
        loss = task.loss(model, batch)
        if file.exists():
            try:
                file.rename(f"{file}-{os.getpid()}")
            except FileNotFoundError:
                return loss
            os.kill(os.getpid(), signal.SIGSTOP)
        return loss

    return replace(task, loss=stopping)


def _fails_once(file: Path) -> Any:
    """A scheduler, of which only servers take steps: one of them fails when there is such a file, and takes it away."""

    def rate(step: int) -> float:
        if not step:
            return 1.0
        try:
            file.unlink()  # succeeds in one of them, though all may have seen it
        except FileNotFoundError:
            return 1.0
        raise RuntimeError("this server was told to fail")

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def _fails_at_step_5(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    def rate(step: int) -> float:
        if step == 5:
            raise RuntimeError("step 5 is beyond this schedule")
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def _pid(out: Path, name: str) -> int:
    """The first process of that name."""
    return next(
        event["pid"] for event in events(out) if event["event"] == "started" and event["name"] == name
    )


def _last_step(out: Path) -> int:
    return max(json.loads(row)["step"] for row in (out / "metrics.jsonl").read_text().split("\n")[:-1])


def _recovered(out: Path) -> int:
    return sum(event["event"] == "recovered" for event in events(out))


def _joined(out: Path) -> list[dict[str, Any]]:
    return [event for event in events(out) if event["event"] == "joined"]


def _audit(out: Path, verdict: str = "complete") -> None:
    from manyhands.strategies.ps.audit import audit_run

    found = audit_run(out).found
    report = [*(violation.sentence for violation in found.violations), *found.missing]
    assert found.verdict.value == verdict, f"{report[:5]}\n{[json.dumps(event) for event in events(out)]}"


def _await(condition: Any, within_s: float = 100.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
