"""Run directories: what may be created where, metrics with torn lines, what a resumed run must share."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands.data.store.atomic import MetricsLog, WriteFailed, write_json
from manyhands.data.store.rundir import RunDirectory, fingerprint, parameter_shapes
from manyhands.errors import DataError, UserError, WorkerFailed

CONFIG: dict[str, Any] = {
    "task": "digits",
    "seed": 0,
    "batch_size": 64,
    "samples": 1437,
    "parameters": {"fc.weight": "float32 10×64"},
    "strategy": "allreduce",
    "workers": 2,
    "steps": 50,
}


# ---- creating and opening ----


def test_a_created_run_is_opened_again_with_the_same_configuration(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "x"
    with RunDirectory.create(path, CONFIG) as directory:
        assert directory.config == CONFIG
        directory.metrics.append({"step": 1, "loss": 0.5})
        directory.write_summary({"steps": 1})
    with RunDirectory.open(str(path)) as directory:
        assert directory.config == CONFIG
        assert directory.metrics.read() == [{"step": 1, "loss": 0.5}]
        assert directory.read_summary() == {"steps": 1}
        assert directory.events_path.is_dir()
        assert directory.checkpoints(keep=2).steps() == ()


def test_a_run_that_goes_on_keeps_what_is_asked_for_now(tmp_path: Path) -> None:
    longer = {**CONFIG, "steps": 9000, "workers": 7}
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        began = run.origin
        assert set(began) == {"command", "host", "unix_s"}
        run.update_config(longer)
        assert run.config == longer
        assert run.origin == began
    assert RunDirectory.open(tmp_path / "run", lock=False).config == longer


def test_what_ended_a_run_is_blamed_on_whom_it_happened_to(tmp_path: Path) -> None:
    server = WorkerFailed("server 0 (pid 7) raised\nand more", worker_rank=-1)
    server.blamed = "server 0"
    with RunDirectory.create(tmp_path, CONFIG) as directory:
        began_s = time.time()
        directory.record_end(server, 1.5)
        directory.record_end(WorkerFailed("rank 1 is gone", worker_rank=1), 2.0)
        directory.record_end(WorkerFailed("a server is gone", worker_rank=-1), 2.5)
        rows = [json.loads(line) for line in directory.members_path.read_text().splitlines()]
    assert all(began_s <= row.pop("unix_s") <= time.time() for row in rows)
    assert rows == [
        {"event": "fault", "at_s": 1.5, "name": "server 0", "sentence": "server 0 (pid 7) raised"},
        {"event": "fault", "at_s": 2.0, "name": "worker 1", "sentence": "rank 1 is gone"},
        {"event": "fault", "at_s": 2.5, "sentence": "a server is gone"},
    ]


def test_what_json_can_not_say_is_made_plain_in_the_configuration(tmp_path: Path) -> None:
    config = {**CONFIG, "sizes": (1, 2), "rate": np.float32(0.5), "limit_s": math.inf, "out": Path("x")}
    with RunDirectory.create(tmp_path, config) as directory:
        assert directory.config == {**CONFIG, "sizes": [1, 2], "rate": 0.5, "limit_s": None, "out": "x"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**CONFIG, "seed": None}, "'seed' is None; it must be int"),
        ({key: value for key, value in CONFIG.items() if key != "task"}, "'task' is None; it must be str"),
        ({**CONFIG, "parameters": 3}, "'parameters' is 3"),
        ({**CONFIG, "model": {"layers": [object()]}}, r"config.json.config.model.layers\[0\] is a object"),
        ({**CONFIG, "table": {1: 2}}, r"config.json.config.table has the key 1"),
    ],
)
def test_a_configuration_that_can_not_be_kept_is_refused_and_the_place_stays_free(
    config: Any, named: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=named):
        RunDirectory.create(tmp_path, config)
    RunDirectory.create(tmp_path, CONFIG).close()


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, CONFIG).close()
    with pytest.raises(
        UserError, match=r"already holds a run of 'digits'; pass resume=True or choose another out"
    ):
        RunDirectory.create(tmp_path, {**CONFIG, "seed": 1})
    assert RunDirectory.open(tmp_path, lock=False).config == CONFIG


@pytest.mark.parametrize("name", ["thesis.tex", "config.json", ".git"])
def test_a_directory_with_something_else_in_it_is_refused_and_not_touched(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=rf"not empty and holds no run \(it contains '{name}'\)"):
        RunDirectory.create(tmp_path, CONFIG)
    assert os.listdir(tmp_path) == [name]


def test_what_a_create_that_died_left_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("1 on nowhere\n")
    (tmp_path / ".config.json.writing").write_text('{"form')
    with RunDirectory.create(tmp_path, CONFIG):
        assert sorted(os.listdir(tmp_path)) == ["checkpoints", "config.json", "events", "run.lock"]


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match=r"file cannot be a run directory: Not a directory"):
        RunDirectory.create(file, CONFIG)
    with pytest.raises(UserError, match=r"file/x cannot be"):
        RunDirectory.create(file / "x", CONFIG)
    with pytest.raises(UserError, match=r"file holds no run"):
        RunDirectory.open(file)


def test_opening_what_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no run \(config.json is missing\)"):
        RunDirectory.open(tmp_path / "missing")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "config.json is damaged: it is not JSON"),
        ('{"format": "manyhands run", "vers', "config.json is damaged: it is not JSON"),
        ("[1]", "config.json is damaged: it is not a JSON object"),
        ('{"hidden_size": 768}', "config.json is not a run configuration"),
        (
            '{"format": "manyhands run", "version": 99, "config": {}}',
            "version 99, not 'manyhands run' version 1",
        ),
    ],
)
def test_a_damaged_configuration_is_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=named):
        RunDirectory.open(tmp_path)


def test_a_summary_is_none_before_the_end_and_named_when_damaged(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, CONFIG) as directory:
        assert directory.read_summary() is None
        (tmp_path / "summary.json").write_text("{")
        with pytest.raises(DataError, match=r"summary.json is damaged"):
            directory.read_summary()


def test_two_runs_never_write_into_one_directory(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, CONFIG):
        with pytest.raises(UserError, match=rf"is in use by another run \(process {os.getpid()} on "):
            RunDirectory.open(tmp_path)
        assert RunDirectory.open(tmp_path, lock=False).config == CONFIG
    with RunDirectory.open(tmp_path) as directory:
        directory.close()
        RunDirectory.open(tmp_path).close()


# ---- writing whole ----


def test_a_json_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(UserError, match=r"x.json.b is a set"):
        write_json(path, {"b": {1}})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.json"]
    with pytest.raises(WriteFailed, match=r"missing/x.json could not be written: No such file or directory"):
        write_json(tmp_path / "missing" / "x.json", {})


# ---- metrics ----

RECORDS = [{"step": step, "loss": 1 / step} for step in range(1, 6)] + [
    {"step": 5, "metrics": {"accuracy": 0.9}}
]


def written(path: Path) -> MetricsLog:
    with MetricsLog(path) as log:
        for record in RECORDS:
            log.append(record)
    return MetricsLog(path)


def test_records_are_read_while_they_are_written_and_none_is_lost_in_between(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert MetricsLog(path).read() == []
    with MetricsLog(path) as log:
        for count, record in enumerate(RECORDS, start=1):
            log.append(record)
            assert MetricsLog(path).read() == RECORDS[:count]
    assert [json.loads(line) for line in path.read_text().splitlines()] == RECORDS


def test_a_number_that_is_not_finite_is_null_for_every_json_reader(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append({"step": 1, "loss": math.nan, "norm": -math.inf, "rate": np.float64(0.1)})
    assert path.read_text() == '{"step": 1, "loss": null, "norm": null, "rate": 0.1}\n'


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400))
def test_wherever_the_file_is_torn_the_whole_lines_stay_and_writing_goes_on(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    content = written(path).path.read_bytes()[:cut]
    path.write_bytes(content)
    whole = RECORDS[: content.count(b"\n")]
    with MetricsLog(path) as log:
        assert log.read() == whole
        log.append({"step": 9})
        assert log.read() == [*whole, {"step": 9}]


@pytest.mark.parametrize(("step", "kept"), [(0, 0), (1, 1), (4, 4), (5, 6), (99, 6)])
def test_truncating_keeps_the_steps_up_to_the_checkpoint(step: int, kept: int, tmp_path: Path) -> None:
    log = written(tmp_path / "metrics.jsonl")
    assert log.truncate_after(step) == len(RECORDS) - kept
    log.append({"step": step + 1})
    assert log.read() == [*RECORDS[:kept], {"step": step + 1}]
    log.close()
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_truncating_while_writing_goes_on_in_the_new_file(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for record in RECORDS:
            log.append(record)
        log.truncate_after(2)
        log.append({"step": 3})
        assert log.read() == [*RECORDS[:2], {"step": 3}]


@pytest.mark.parametrize("line", [b"{half\n", b"\0\0\0\n", b"[1]\n", b'{"loss": 1}\n', b'{"step": "1"}\n'])
def test_a_damaged_line_is_named_with_its_place(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl line 2 \(at byte 12\) is no"):
        MetricsLog(path).read()


@pytest.mark.parametrize(
    ("record", "named"),
    [({"loss": 1.0}, "its `step` is not an integer"), ({"step": 1, "x": {2}}, "record.x is a set")],
)
def test_a_record_that_is_none_is_refused(record: Any, named: str, tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log, pytest.raises(UserError, match=named):
        log.append(record)
    assert MetricsLog(tmp_path / "metrics.jsonl").read() == []


# ---- what must stay the same ----


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"strategy": "single", "workers": 8, "steps": 1000, "out": "elsewhere"}, None),
        ({"task": "mnist"}, "task is 'mnist', but the run was started with 'digits'"),
        ({"seed": 1}, "seed is 1, but the run was started with 0"),
        ({"batch_size": 32}, "batch_size is 32, but the run was started with 64"),
        ({"samples": 10}, "samples is 10, but the run was started with 1437"),
        (
            {"parameters": {"fc.weight": "float32 10×32"}},
            "'fc.weight' is float32 10×32, but in the run it was float32 10×64",
        ),
        ({"parameters": {}}, "'fc.weight' is absent, but in the run it was float32 10×64"),
        (
            {"parameters": {**CONFIG["parameters"], "b": "float32 1"}},
            "'b' is float32 1, but in the run it was absent",
        ),
    ],
)
def test_a_resumed_run_may_change_how_but_not_what(change: dict[str, Any], sentence: str | None) -> None:
    conflict = fingerprint(CONFIG).conflict(fingerprint({**CONFIG, **change}))
    if sentence is None:
        assert conflict is None
    else:
        assert conflict is not None
        assert sentence in conflict


def test_parameter_shapes_name_dtype_and_sizes() -> None:
    model = nn.Sequential(nn.Linear(64, 10), nn.PReLU()).double()
    shapes = parameter_shapes(model.named_parameters())
    assert shapes == {"0.weight": "float64 10×64", "0.bias": "float64 10", "1.weight": "float64 1"}
