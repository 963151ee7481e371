"""Event files for TensorBoard, read back by TensorBoard itself."""

import gc
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from disks import fill as fill_disk
from disks import small_disk
from manyhands.cli.main import app
from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import UserError
from manyhands.observe.draw.tensorboard import LiveTensorboard, write_run
from manyhands.observe.record.event_files import EventFileWriter, read_header
from manyhands.observe.record.events import NOBODY, RECORD, EventKind, Records

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
S = 1_000_000_000
CONFIG = {
    "task": "digits", "strategy": "mirrored", "workers": 2, "steps": 50, "seed": 0,
    "batch_size": 64, "samples": 1000, "parameters": {},
}  # fmt: skip


def steps_of(role: int, count: int) -> Records:
    """Steps of 0.1 s: half of it computing, a quarter waiting, a quarter exchanging."""
    records = np.zeros(4 * count, RECORD)
    records["kind"] = np.tile([EventKind.COMPUTE, EventKind.WAIT, EventKind.EXCHANGE, EventKind.STEP], count)
    records["step"] = np.repeat(np.arange(count), 4)
    records["start_ns"] = (100 + 0.1 * records["step"]) * S
    records["duration_ns"] = np.tile([0.05 * S, 0.025 * S, 0.025 * S, 0.1 * S], count)
    records["role"], records["peer"], records["count"] = role, NOBODY, 8
    records["id"] = np.arange(len(records))
    return records


def fill(run: RunDirectory) -> None:
    for role in range(2):
        file = EventFileWriter.create(run.events_path, name=f"worker-{role}", role=role, max_bytes=1 << 20)
        file.append(steps_of(role, 50))
        file.close(0)
    for step in range(1, 51):
        run.metrics.append({"step": step, "loss": 1 / step, "at_s": 0.1 * step})
    run.metrics.append({"step": 50, "metrics": {"accuracy": 0.75, "odd": None}, "at_s": 5.2})
    run.write_summary({"steps": 50, "samples_per_s": 160.0})


def read(directory: Path) -> Any:
    found = event_accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    found.Reload()
    return found


def check(directory: Path, run: Path) -> None:
    found = read(directory)
    loss = found.Scalars("loss")
    assert [point.step for point in loss] == list(range(1, 51))
    assert [point.value for point in loss] == pytest.approx([1 / step for step in range(1, 51)])
    offset_s = read_header(run / "events" / "worker-0.bin").wall_offset_ns / 1e9
    assert [point.wall_time for point in loss] == pytest.approx(
        [offset_s + 100 + 0.1 * step for step in range(1, 51)], abs=1e-3
    )
    (accuracy,) = found.Scalars("metrics/accuracy")
    assert (accuracy.step, accuracy.value) == (50, 0.75)
    for worker in range(2):
        shares = {
            part: found.Scalars(f"time_of_worker_{worker}/{part}")[-1].value for part in ("compute", "wait")
        }
        assert shares == pytest.approx({"compute": 0.5, "wait": 0.25}, abs=0.02)
    assert "metrics/odd" not in found.Tags()["scalars"]
    assert "staleness/mean" not in found.Tags()["scalars"]


def test_a_run_that_is_over_is_written_with_true_times(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        fill(run)
    result = CliRunner().invoke(
        app, ["show", str(run.path), "--as", "tensorboard", "--out", str(tmp_path / "board")]
    )
    assert result.exit_code == 0, result.output
    assert "50 steps" in result.output
    check(tmp_path / "board", run.path)
    speed = read(tmp_path / "board").Scalars("speed/samples_per_s")
    assert len(speed) > 50
    assert speed[-1].value == pytest.approx(160, rel=0.1)
    assert [point.step for point in speed] == sorted(point.step for point in speed)


def test_a_run_is_written_while_it_goes_on(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with (
        LiveTensorboard(tmp_path / "run", tmp_path / "board"),
        RunDirectory.create(tmp_path / "run", CONFIG) as run,
    ):
        fill(run)
    check(tmp_path / "board", run.path)
    assert set(threading.enumerate()) <= before, "no thread is left"


def test_what_can_not_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG) as run, pytest.raises(UserError, match="no step yet"):
        write_run(run.path, tmp_path / "board")
    assert not (tmp_path / "board").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot hold event files"):
        LiveTensorboard(run.path, tmp_path / "file")
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with pytest.raises(UserError, match=r"pip install 'manyhands\[tensorboard\]'"):
        LiveTensorboard(run.path, tmp_path / "board")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_ends_the_event_files_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """(The package's writer leaves a file that it cannot flush to the collector, which complains about it.)"""
    with (
        small_disk(tmp_path / "disk", 64 << 10) as disk,
        RunDirectory.create(tmp_path / "run", CONFIG) as run,
    ):
        fill(run)
        with LiveTensorboard(run.path, disk / "boards"):
            fill_disk(disk)
    said = caplog.text
    caplog.clear()  # and with it the error, which holds that file
    gc.collect()
    assert "no more event files for TensorBoard: " in said
    assert "No space left on device" in said


ODD: tuple[Any, ...] = ([], ["x"], {}, "x", True, 10**400, -(10**400), float("nan"))


def test_metrics_of_another_kind_are_left_out(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        fill(run)
        for step, value in enumerate(ODD, 51):
            metrics = {"accuracy": value, "\ud800": 0.5, "x" * 5000: 0.25, "vast": 1e308}
            run.metrics.append({"step": step, "metrics": metrics, "at_s": 5.3})
    write_run(tmp_path / "run", tmp_path / "board")
    found = read(tmp_path / "board")
    assert [(point.step, point.value) for point in found.Scalars("metrics/accuracy")] == [(50, 0.75)]
    assert len(found.Scalars("metrics/\\ud800")) == len(ODD)
    assert max(map(len, found.Tags()["scalars"])) < 2100
