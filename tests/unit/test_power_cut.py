"""A power cut at any moment, whatever the disk had not yet written: what was said to be kept is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from manyhands.data.store.atomic import MetricsLog
from manyhands.data.store.checkpoint import CheckpointStore, Snapshot
from manyhands.data.store.rundir import RunDirectory
from manyhands.strategies.ps.live.snapshots import ShardSnapshot, ShardSnapshots
from manyhands.strategies.ps.log_rows import LateRow
from manyhands.strategies.ps.shard_layout import ShardState
from manyhands.strategies.ps.update_files import (
    RunRecord,
    ShardRecorder,
    read_logs,
    read_record,
    write_record,
)
from powercut import State, watched

CONFIG = {"task": "t", "seed": 0, "batch_size": 1, "samples": 1, "parameters": {}}


def snapshot(step: int, value: float) -> Snapshot:
    return Snapshot(step=step, model={"w": torch.full((3,), value)}, optimizer={}, score=value)


def value_of(store: CheckpointStore) -> float:
    loaded = store.load()
    assert loaded.skipped == (), "something half-made looks like a checkpoint"
    return float(loaded.model["w"][0])


@pytest.mark.parametrize(
    ("step", "keep"), [(3, 9), (3, 1), (2, 9)], ids=["new", "others rotate out", "replaced"]
)
def test_a_checkpoint_is_there_whole_or_not_at_all(step: int, keep: int, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    for before in (1, 2):
        CheckpointStore(folder / "checkpoints").save(snapshot(before, before))
    with watched(folder) as disk:
        CheckpointStore(folder / "checkpoints", keep).save(snapshot(step, 30.0))
        last = disk.states[-1].moment
    met = set()
    for state in disk.states:
        found = CheckpointStore(state.write(tmp_path / "after", folder) / "checkpoints")
        value = value_of(found)
        met.add(value)
        assert value == 30.0 if state.moment == last else value in (2.0, 30.0)
    assert met == {2.0, 30.0}
    found.save(snapshot(9, 9.0))
    assert value_of(found) == 9.0


def test_a_run_that_was_begun_is_there_when_its_first_snapshot_is(tmp_path: Path) -> None:
    """Every directory above a snapshot has to be safe, too, and the log that leads to it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    record = RunRecord(
        torch="2", cpu="AVX2", threads=1, strategy="ps", workers=1, steps=9, seed=0, device="cpu", autocast=False,
        layout="ab",
    )  # fmt: skip
    rows = [LateRow(shard=0, term=0, sequence=number, slot=0, clock=number) for number in range(3)]
    with watched(folder) as disk:
        run = RunDirectory.create(folder / "runs" / "x", CONFIG)
        write_record(run.path, record)
        log = ShardRecorder(run.path, 1)
        assert [log.write(row) for row in rows[:2]] == [None, None]
        assert log.sync(0) is None
        state = ShardState(model={"w": torch.ones(2)}, optimizer={}, batches=2)
        ShardSnapshots(run.path, 1, 2).save(0, ShardSnapshot(version=2, state=state, held={}, core="{}"))
        saved = disk.states[-1].moment
        assert log.write(rows[2]) is None
        log.close()
        run.close()
    after = [state for state in disk.states if state.moment >= saved]
    assert after
    for state in after:
        path = state.write(tmp_path / "after", folder) / "runs" / "x"
        assert RunDirectory.open(path, lock=False).config["task"] == "t"
        assert ShardSnapshots(path, 1).versions(0) == {2}
        assert read_record(path) == record
        assert read_logs(path).files[0][0] in (rows[:2], rows), "what leads to the snapshot is there"


def test_lines_that_were_synced_stay_and_what_was_not_is_dropped_whole(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    with watched(folder) as disk:
        log = MetricsLog(folder / "metrics.jsonl")
        for step in (1, 2):
            log.append({"step": step})
        log.close()
        synced = disk.states[-1].moment
        for step in (3, 4):
            log.append({"step": step})
    lengths = set()
    for state in disk.states:
        log = MetricsLog(state.write(tmp_path / "after", folder) / "metrics.jsonl")
        steps = [row["step"] for row in log.read()]
        lengths.add(len(steps))
        assert steps == [1, 2, 3, 4][: len(steps)]
        assert len(steps) >= 2 or state.moment < synced
        log.append({"step": 9})
        log.close()
        assert [row["step"] for row in log.read()] == [*steps, 9], "nothing is glued to what was torn"
    assert lengths == {0, 1, 2, 3, 4}


def test_a_summary_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    RunDirectory.create(folder, CONFIG).write_summary({"steps": 1})
    with watched(folder) as disk:
        RunDirectory.open(folder, lock=False).write_summary({"steps": 2})
        last = disk.states[-1].moment
    found = [
        (state.moment, RunDirectory.open(state.write(tmp_path / "after", folder), lock=False).read_summary())
        for state in disk.states
    ]
    assert {summary["steps"] for _, summary in found if summary} == {1, 2}
    assert all(summary for _, summary in found)
    assert all(summary == {"steps": 2} for moment, summary in found if moment == last)


# ── the judge on trial ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("careless", ["no sync of files", "no sync of folders"])
def test_a_writer_that_does_not_sync_is_caught(
    careless: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "disk"
    CheckpointStore(folder / "checkpoints").save(snapshot(2, 2.0))
    with watched(folder) as disk:
        skip_syncs(careless, monkeypatch)
        CheckpointStore(folder / "checkpoints", 1).save(snapshot(3, 30.0))
        last = disk.states[-1].moment

    def is_kept(state: State) -> bool:
        try:
            return value_of(CheckpointStore(state.write(tmp_path / "after", folder) / "checkpoints")) == 30.0
        except Exception:
            return False

    assert not all(is_kept(state) for state in disk.states if state.moment == last)


def skip_syncs(careless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `os.fsync` do nothing, not even in the eyes of the disk, for files or for folders."""
    watching = os.fsync

    def lazily(descriptor: int) -> None:
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")
        if is_folder != (careless == "no sync of folders"):
            watching(descriptor)

    monkeypatch.setattr(os, "fsync", lazily)
