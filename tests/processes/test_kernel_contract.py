"""Compiled tasks under every strategy that trains them, through the wiring of `fit`: events, history, kill, resume."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.data.store.rundir import RunDirectory
from manyhands.engine.kernel_task import KernelStep, Portion, Taken
from manyhands.engine.run import PassLosses
from manyhands.errors import UserError, WorkerFailed
from manyhands.native.group.shared_group import SharedGroup
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import read_run_events
from manyhands.strategies.registry import STRATEGIES
from manyhands.workloads.glove.cooccurrence_files import RECORD
from manyhands.workloads.glove.glove_task import GloveTask, RecordStep, TensorStep
from manyhands.workloads.glove.options import GloveOptions

SIZE = 120
ROWS = {"single": 1, "hogwild": 2, "hogwild hands=processes": 2, "mirrored": 2, "allreduce": 2, "tensor": 2}
"""Each strategy that has a training for compiled steps, with its workers."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    drawn = np.random.default_rng(2)
    records = np.empty(2_100, RECORD)
    for name in ("word", "context"):
        records[name] = (SIZE ** drawn.random(len(records))).astype(np.int32)
    records["count"] = np.exp(drawn.normal(0.0, 2.0, len(records)))
    records.tofile(tmp_path / "records.bin")
    return tmp_path / "records.bin"


def task_of(path: Path, passes: int = 2) -> GloveTask:
    return GloveTask.of(path, SIZE, GloveOptions(dim=6, passes=passes), any_batch=True)


def test_every_strategy_with_a_training_for_compiled_steps_has_a_row() -> None:
    assert {text.split()[0] for text in ROWS} == {word for word, home in STRATEGIES.items() if home.kernel}


@pytest.mark.parametrize(
    "text", [text for text in ROWS if text not in ("mirrored", "hogwild hands=processes")]
)
def test_a_run_is_recorded_and_goes_on_to_where_it_would_have_been(
    text: str, path: Path, tmp_path: Path
) -> None:
    workers, out = ROWS[text], tmp_path / "run"
    whole = mh.fit(task_of(path), text, workers=workers)
    half = mh.fit(task_of(path), text, workers=workers, epochs=1, out=out)
    resumed = mh.fit(task_of(path), text, workers=workers, out=out, resume=True)
    assert resumed.summary["resumed_from_step"] == half.summary["steps"]
    assert [row["step"] for row in resumed.history.steps] == [row["step"] for row in whole.history.steps]
    if text != "hogwild":  # where chance decides
        assert torch.equal(resumed.model.state_dict()["memory"], whole.model.state_dict()["memory"])
        assert resumed.history.loss == whole.history.loss
    assert [row["step"] for row in resumed.history.evaluations] == [
        half.summary["steps"],
        whole.summary["steps"],
    ]
    assert whole.summary["samples"] == 2 * 2_100
    assert ("overlap" in whole.summary) == (text == "hogwild")
    roles = read_run_events(out / "events").roles
    assert len(roles) == workers
    for role in roles:
        assert len(role.of(EventKind.STEP)) == len(role.of(EventKind.COMPUTE))
        assert text == "hogwild" or len(role.of(EventKind.STEP))  # where whoever is first takes the next
    counted = sum(int(role.of(EventKind.STEP)["count"].sum()) for role in roles)
    assert counted == 2 * 2_100, "of both lives"
    other = GloveTask.of(path, SIZE, GloveOptions(dim=6, rate=0.1), any_batch=True)
    with pytest.raises(UserError, match=r"rate is 0\.1, but the run was started with 0\.05"):
        mh.fit(other, text, workers=workers, out=out, resume=True)


def test_a_killed_worker_ends_the_run_by_name(path: Path) -> None:
    class Fatal(TensorStep):
        def take(self, portion: Portion) -> Taken:
            if portion.begin and self._group.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().take(portion)

    class FatalTask(GloveTask):
        def step_on_slices(self, group: SharedGroup, control_bytes: int) -> KernelStep:
            return Fatal(self, group, control_bytes)

    task = FatalTask.of(path, SIZE, GloveOptions(dim=6), any_batch=True)
    with pytest.raises(WorkerFailed, match=r"worker 1 .*was killed by SIGKILL"):
        mh.fit(task, "tensor", workers=2)


def test_an_order_to_stop_ends_all_threads(path: Path) -> None:
    begun = time.monotonic()

    def stop(rows: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mh.fit(task_of(path, 10**6), "hogwild order=locked", workers=3, options=mh.Options(on_rows=stop))
    assert time.monotonic() - begun < 60
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("manyhands-worker-")]


@pytest.mark.parametrize("text", ["single", "tensor"])
def test_a_step_that_has_nothing_left_to_do_ends_the_run_for_all(
    text: str, path: Path, tmp_path: Path
) -> None:
    class Knows(KernelStep):
        taken = 0

        def take(self, portion: Portion) -> Taken:
            self.taken += portion.end == 2_100
            return super().take(portion)  # type: ignore[safe-super]

        @property
        def is_done(self) -> bool:
            return self.taken >= 2

    class Sliced(Knows, TensorStep):
        pass

    class Alone(Knows, RecordStep):
        pass

    class Ends(GloveTask):
        def step(self, model: Any, gate: Any) -> KernelStep:
            return Alone(self, model, gate)

        def step_on_slices(self, group: SharedGroup, control_bytes: int) -> KernelStep:
            return Sliced(self, group, control_bytes)

    task = Ends.of(path, SIZE, GloveOptions(dim=6, passes=50), any_batch=True)
    run = mh.fit(task, text, workers=ROWS[text], out=tmp_path / "run")
    per_pass = task.for_strategy(mh.Strategy.parse(text), ROWS[text]).passes.steps
    assert run.summary["steps"] == 2 * per_pass
    assert run.summary["stopped_early"]
    assert RunDirectory.open(tmp_path / "run", lock=False).checkpoints().load().step == 2 * per_pass


@pytest.mark.parametrize("text", ["central", "local"])
def test_a_strategy_without_compiled_steps_is_refused(text: str, path: Path) -> None:
    with pytest.raises(UserError, match=f"strategy {text} does not train glove"):
        mh.fit(task_of(path), text, workers=2)


def test_threads_stop_where_a_callback_asks_for_it(path: Path, tmp_path: Path) -> None:
    class Stops(mh.Callback):
        def on_step(self, row: Mapping[str, Any]) -> bool | None:
            return bool(row["step"] >= 5)

    task, options = task_of(path, passes=50_000), mh.Options(callbacks=[Stops()], checkpoint_every=10**9)
    run = mh.fit(task, "hogwild", workers=2, out=tmp_path / "run", options=options)
    end = run.summary["steps"]
    assert 5 <= end < run.summary["steps_asked"]
    assert [row["step"] for row in run.history.steps] == list(range(1, end + 1))
    assert f"stopped after step {end}: Stops asked for it" in run.summary["notes"]
    assert RunDirectory.open(tmp_path / "run", lock=False).checkpoints().load().step == end


@pytest.mark.parametrize("text", ["single", "hogwild"])
def test_no_step_of_the_history_is_lost_to_a_signal(
    text: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, came = PassLosses.add, []

    def interrupted(passes: PassLosses, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if rows and not came:
            came.append(rows[-1]["step"])
            signal.raise_signal(
                signal.SIGINT
            )  # these rows have been taken from the threads and are not kept yet
        return add(passes, rows)

    monkeypatch.setattr(PassLosses, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mh.fit(task_of(path, passes=1_000_000), text, workers=ROWS[text], out=tmp_path / "run")
    directory = RunDirectory.open(tmp_path / "run")
    try:
        steps = [row["step"] for row in directory.metrics.read() if "loss" in row]
        assert came[0] in steps
        assert steps == list(range(1, len(steps) + 1)), "a hole"
        assert directory.checkpoints().load().step <= len(steps)
    finally:
        directory.close()
