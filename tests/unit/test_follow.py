"""A run directory followed while it is written, after its end, after a resume and with damage."""

import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import UserError
from manyhands.observe.analyse import follow
from manyhands.observe.analyse.follow import RunFollower, coming_run
from manyhands.observe.analyse.view import Phase, Presence
from manyhands.observe.record.event_files import EventFileWriter
from manyhands.observe.record.events import NOBODY, RECORD, EventKind, Records

S = 1_000_000_000
CONFIG = {
    "task": "digits", "strategy": "mirrored", "workers": 2, "steps": 100, "seed": 0,
    "batch_size": 64, "samples": 1000, "parameters": {},
}  # fmt: skip


def steps_of(role: int, steps: Sequence[int], *, begin_s: float = 100.0, first_id: int = 0) -> Records:
    records = np.zeros(2 * len(steps), RECORD)
    records["kind"] = np.tile([EventKind.COMPUTE, EventKind.STEP], len(steps))
    records["step"] = np.repeat(steps, 2)
    records["start_ns"] = (begin_s + 0.01 * (records["step"] - steps[0])) * S
    records["duration_ns"] = 0.01 * S
    records["role"], records["peer"], records["count"] = role, NOBODY, 8
    records["id"] = first_id + np.arange(len(records))
    return records


def writers(run: RunDirectory) -> list[EventFileWriter]:
    return [
        EventFileWriter.create(run.events_path, name=f"worker-{role}", role=role, max_bytes=1 << 20)
        for role in range(2)
    ]


def rows(steps: Sequence[int]) -> list[dict[str, float]]:
    return [{"step": step, "loss": 1.0 / step, "at_s": 0.01 * step} for step in steps]


def test_what_is_no_run_is_said_and_an_empty_directory_is_a_run_to_come(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory"):
        RunFollower(tmp_path / "none").poll()
    follower = RunFollower(tmp_path / "run")
    (tmp_path / "run").mkdir()
    assert follower.poll().phase is Phase.STARTING
    with RunDirectory.create(tmp_path / "run", CONFIG):
        view = follower.poll()
    assert (view.task, view.strategy, view.steps_asked, len(view.workers)) == ("digits", "mirrored", 100, 2)


def test_a_run_to_come_shows_whom_it_will_have(tmp_path: Path) -> None:
    coming = coming_run(tmp_path / "run", "digits", "mirrored", 2)
    before = coming()
    with RunDirectory.create(tmp_path / "run", CONFIG):
        assert coming().workers == before.workers
    assert [(worker.name, worker.presence) for worker in before.workers] == [
        ("worker 0", Presence.STARTING),
        ("worker 1", Presence.STARTING),
    ]


def test_a_run_is_seen_as_it_grows(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        follower, files = RunFollower(run.path), writers(run)
        for part in range(4):
            steps = range(25 * part, 25 * part + 25)
            for role, file in enumerate(files):
                file.append(steps_of(role, steps, begin_s=100 + 0.25 * part, first_id=50 * part))
            for row in rows(range(steps[0] + 1, steps[-1] + 2)):
                run.metrics.append(row)
            view = follower.poll()
            assert view.step == steps[-1] + 1
            assert [worker.steps for worker in view.workers] == [view.step] * 2
            assert view.curves[0].steps[-1] == view.step
            assert view.phase is not Phase.ENDED
            assert not [warning for warning in view.warnings if "missing" in warning]
        for file in files:
            file.close(0)
        run.write_summary({"steps": 100, "samples_per_s": 5.0})
        view = follower.poll()
    assert (view.phase, view.samples_per_s, view.step) == (Phase.ENDED, 5.0, 100)
    assert view.seconds == pytest.approx(1.0)
    assert RunFollower(tmp_path / "run").poll() == view, "one who comes later sees the same"
    begin, end = follower.wall_s(0.0), follower.wall_of_row({"step": 100}, guess=False)
    assert begin is not None
    assert end is not None
    assert end - begin == pytest.approx(1.0)
    assert follower.wall_of_row({"step": 101}, guess=False) is None


def test_torn_tails_wait_for_their_rest(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        follower = RunFollower(run.path)
        (run.events_path / "worker-1.bin").touch()  # created, and without a header yet
        file = EventFileWriter.create(run.events_path, name="worker-0", role=0, max_bytes=1 << 20)
        records = steps_of(0, range(10)).tobytes()
        path, metrics = file.path, run.metrics_path
        with path.open("ab") as out:
            out.write(records[: 64 * 4 + 30])
        with metrics.open("ab") as out:
            out.write(b'{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
        view = follower.poll()
        assert (view.workers[0].steps, view.curves[0].values) == (2, (0.5,))
        with path.open("ab") as out:
            out.write(records[64 * 4 + 30 :])
        with metrics.open("ab") as out:
            out.write(b'ss": 0.25}\n')
        view = follower.poll()
        assert (view.workers[0].steps, view.curves[0].values) == (10, (0.5, 0.25))
        assert view.notes == ()
        file.close(0)


def test_a_resumed_run_goes_on_in_the_same_view(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        for role, file in enumerate(writers(run)):
            file.append(steps_of(role, range(50)))
            file.close(0)
        for row in rows(range(1, 51)):
            run.metrics.append(row)
        run.write_summary({"steps": 50})
    follower = RunFollower(run.path)
    assert follower.poll().phase is Phase.ENDED
    with RunDirectory.open(tmp_path / "run") as run:
        run.metrics.truncate_after(40)
        for role, file in enumerate(writers(run)):
            file.append(steps_of(role, range(40, 60), begin_s=200.0))
            file.close(0)
            later = run.summary_path.stat().st_mtime_ns + S
            os.utime(file.path, ns=(later, later))
        for row in rows(range(41, 61)):
            run.metrics.append(row)
        view = follower.poll()
        assert view.phase is not Phase.ENDED, "that summary is an earlier one's"
        assert (view.step, view.workers[0].steps) == (60, 70)
        assert list(view.curves[0].steps) == list(range(1, 61))
        run.write_summary({"steps": 60})
        os.utime(run.summary_path, ns=(later, later))
    view = follower.poll()
    assert (view.phase, view.warnings) == (Phase.ENDED, ())


def test_a_copy_of_a_run_has_ended_whatever_the_age_of_its_files(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        (file, other) = writers(run)
        file.append(steps_of(0, range(100)))
        file.close(0)
        other.close(0)
        run.write_summary({"steps": 100})
        os.utime(run.summary_path, ns=(0, 0))
    assert RunFollower(run.path).poll().phase is Phase.ENDED


def test_a_run_that_was_killed_is_said_to_be_stopped(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        files = writers(run)
        files[0].append(steps_of(0, range(20)))
        for file in files:
            file.close(0)
    view = RunFollower(run.path).poll()
    assert view.phase is Phase.QUIET
    assert any("it was stopped" in warning for warning in view.warnings)


def test_damage_is_noted_and_the_rest_is_shown(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        first, second = writers(run)
        bad = steps_of(0, range(20))
        bad["kind"][10] = 99
        first.append(bad)
        second.append(steps_of(1, range(20)))
        for file in (first, second):
            file.close(0)
        run.metrics_path.write_text(
            '{"step": 1, "loss": 1.0}\nnonsense\n{"loss": 2}\n{"step": 2, "loss": 0.5}\n'
        )
        run.append_member(
            {"event": "died", "at_s": 1.0, "member": 3, "name": "server 0", "sentence": "it died"}
        )
        (run.events_path / "notes.bin").write_text("x" * 600)
        follower = RunFollower(run.path)
        view = follower.poll()
        assert follower.poll().notes == view.notes
    assert [worker.steps for worker in view.workers] == [0, 20]
    assert view.curves[0].values == (1.0, 0.5)
    assert view.happenings[0].sentence == "it died"
    assert [
        word for word in ("worker-0.bin", "metrics.jsonl", "notes.bin") if word in " ".join(view.notes)
    ] == [
        "worker-0.bin",
        "metrics.jsonl",
        "notes.bin",
    ]


def test_a_look_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        assert RunDirectory.is_live(run.path) is True
    assert RunDirectory.is_live(run.path) is False
    assert RunDirectory.is_live(RunDirectory.open(run.path, lock=False).path) is False
    with RunDirectory.open(run.path):
        assert RunDirectory.is_live(run.path) is True


def test_a_file_that_names_roles_and_peers_without_end_costs_no_memory(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        records = steps_of(0, range(3))
        records["kind"], records["peer"] = EventKind.WAIT, 2**15 - 1
        far = steps_of(30_000, range(3))
        for role, written in ((0, records), (30_000, far)):
            file = EventFileWriter.create(
                run.events_path, name=f"worker-{role}", role=role, max_bytes=1 << 20
            )
            file.append(written)
            file.close(0)
        tracemalloc.start()
        view = RunFollower(tmp_path / "run").poll()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 100 << 20
    assert [worker.name for worker in view.workers][:1] == ["worker 0"]
    assert not any(worker.role == 30_000 for worker in view.workers)
    assert any("role 30000; views show roles below 512" in note for note in view.notes)


def test_a_line_without_end_is_damage_and_what_follows_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_MOST_BYTES", 256)
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        run.metrics_path.write_bytes(b"x" * 1000 + b"\n" + b'{"step": 7, "loss": 0.5}\n')
        view = RunFollower(tmp_path / "run").poll()
    assert view.step == 7
    assert any("not JSON objects" in note for note in view.notes)
