"""Small files that ask for much memory, or hold values of another kind: refused, or left out and told."""

import json
import re
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from file_readers_runs import ended_run
from manyhands.data.store.rundir import RunDirectory, fingerprint
from manyhands.errors import DataError, UserError
from manyhands.lab.compare.comparison import Trial
from manyhands.lab.compare.run_comparison import measure
from manyhands.observe.analyse.follow import existing_run
from manyhands.observe.draw.charts import Series, line_chart
from manyhands.observe.draw.page import report
from manyhands.observe.draw.prometheus import metrics_text
from manyhands.observe.record.checked_values import number, text, whole
from manyhands.observe.record.event_files import _HEADER, _LAYOUTS, _OLD_RECORD, EventFileWriter, read_events
from manyhands.observe.record.events import MAX_ROLE, MAX_SHOWN, RECORD, EventKind
from manyhands.strategies.ps import replay
from manyhands.strategies.ps.log_rows import LostRow, row_from_json, row_to_json
from manyhands.strategies.ps.update_files import RunRecord, write_record
from manyhands.strategy import Strategy
from manyhands.workloads.glove.vector_files import Vectors
from manyhands.workloads.glove.vocabulary import Vocabulary
from manyhands.workloads.logreg import training
from manyhands.workloads.logreg.labels import Labels
from manyhands.workloads.logreg.model import LogregModel
from manyhands.workloads.logreg.training import train_logreg
from manyhands.workloads.tasks import TASKS


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """What happens inside takes no more memory than this."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= num_bytes, f"{peak / 1e6:.0f} MB"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run on two servers that has ended."""
    ended_run(tmp_path)
    return tmp_path / "run"


def shown(run: Path) -> str:
    view = existing_run(run).poll()
    metrics_text(view).encode()
    return report(view).encode().decode()


def events_of(role: int, **fields: Any) -> np.ndarray:
    records = np.zeros(3, RECORD)
    records["kind"], records["role"], records["id"] = EventKind.WAIT, role, np.arange(3)
    records["start_ns"], records["duration_ns"], records["peer"] = 1_000_000_000, 1000, -1
    for name, value in fields.items():
        records[name][1] = value
    return records


def write_events(folder: Path, role: int, records: np.ndarray) -> Path:
    writer = EventFileWriter.create(folder, name=f"worker-{role}", role=role, max_bytes=1 << 20)
    writer.append(records)
    writer.close(0)
    return writer.path


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_peer_of_one_event_takes_no_memory(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", _config()) as run:
        write_events(run.events_path, 0, events_of(0, peer=MAX_ROLE))
    with at_most(100 << 20):
        shown(tmp_path / "run")


@pytest.mark.parametrize(
    ("field", "value"),
    [("peer", -2), ("wire", 9), ("codec", 31), ("codec", 9 | 5 << 5 | 5 << 10), ("codec", 2**16 - 1), ("step", 2**62),
     ("step", -2), ("start_ns", 2**63), ("duration_ns", 2**64 - 1), ("num_bytes", 2**64 - 1), ("id", 2**64 - 1)],
)  # fmt: skip
def test_a_value_that_no_role_records_is_refused_by_offset(tmp_path: Path, field: str, value: int) -> None:
    path = write_events(tmp_path, 0, events_of(0, **{field: value}))
    with pytest.raises(DataError, match=f"offset {_HEADER.itemsize + RECORD.itemsize}: not the next event"):
        read_events(path)


@pytest.mark.parametrize("peer", [-2, MAX_ROLE + 1, 2**16, 2**31 - 1])
def test_a_peer_that_no_role_has_is_reported_as_a_file_of_version_2_has_it(tmp_path: Path, peer: int) -> None:
    path = write_events(tmp_path, 0, events_of(0))
    now = read_events(path)
    records = np.zeros(len(now), _OLD_RECORD)
    for name in ("kind", "role", "id", "start_ns", "duration_ns", "peer"):
        records[name] = now[name]
    header = np.frombuffer(path.read_bytes(), _HEADER, 1).copy()
    header["version"], header["layout"] = 2, _LAYOUTS[2]
    path.write_bytes(header.tobytes() + records.tobytes())
    assert read_events(path).tobytes() == now.tobytes()
    records["peer"][1] = peer
    path.write_bytes(header.tobytes() + records.tobytes())
    offset = _HEADER.itemsize + RECORD.itemsize
    with pytest.raises(
        DataError, match=rf"offset {offset}: not the next event of role 0 \(.*, peer {peer}, step"
    ):
        read_events(path)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(EventKind.APPLY, float("nan")), (EventKind.APPLY, float("inf")), (EventKind.APPLY, -1.0),
     (EventKind.HOLD, float("nan")), (EventKind.HOLD, -2.0), (EventKind.HOLD, MAX_ROLE + 1.0)],
)  # fmt: skip
def test_a_staleness_or_a_worker_that_is_none_is_refused_by_offset(
    tmp_path: Path, kind: EventKind, value: float
) -> None:
    path = write_events(tmp_path, 0, events_of(0, kind=kind, value=value))
    with pytest.raises(DataError, match=rf"offset {_HEADER.itemsize + RECORD.itemsize}: .*, value {value}\)"):
        read_events(path)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(EventKind.STEP, float("nan")), (EventKind.APPLY, 1e9), (EventKind.HOLD, -1.0), (EventKind.HOLD, MAX_ROLE)],
)  # fmt: skip
def test_what_a_role_may_record_as_a_value_is_read(tmp_path: Path, kind: EventKind, value: float) -> None:
    records = events_of(0, kind=kind, value=value)
    assert read_events(write_events(tmp_path, 0, records)).tobytes() == records.tobytes()


def test_a_role_beyond_those_that_views_show_is_noted(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", _config()) as run:
        write_events(run.events_path, 0, events_of(0))
        write_events(run.events_path, MAX_ROLE, events_of(MAX_ROLE))
    with at_most(100 << 20):
        assert f"of role {MAX_ROLE}; views show roles below {MAX_SHOWN}" in shown(tmp_path / "run")


@pytest.mark.parametrize("workers", [10**12, 2**31, -5, "x", None, [], 1e300, True])
def test_the_workers_of_a_configuration_take_no_memory(tmp_path: Path, workers: Any) -> None:
    with RunDirectory.create(tmp_path / "run", _config()):
        pass
    reported = json.loads((tmp_path / "run" / "config.json").read_text())
    reported["config"] |= {"workers": workers, "steps": workers, "task": workers, "strategy": workers}
    (tmp_path / "run" / "config.json").write_text(json.dumps(reported))
    with at_most(200 << 20):
        shown(tmp_path / "run")


def _config() -> dict[str, Any]:
    return {"task": "digits", "strategy": "mirrored", "workers": 2, "steps": 9, "seed": 0, "batch_size": 8,
            "samples": 9, "parameters": {}}  # fmt: skip


# ── JSON of another kind ──────────────────────────────────────────────────────────────────────────────────────────────

ODD: tuple[Any, ...] = (None, True, -1, 10**400, 1e308, "x", "\ud800", [], [[]], {}, {"a": {}}, float("nan"))


def follow_up(run: Path, row: dict[str, Any]) -> str:
    """The page of the run, to whose history this row came, and then a good one."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n" + json.dumps({"step": 22, "at_s": 2.3, "loss": 0.5}) + "\n")
    page = shown(run)
    assert "22 of 40" in page, "what follows is shown"
    return page


@pytest.mark.parametrize("odd", [True, 10**400, "x", "\ud800", [[]], {"a": {}}, float("nan")], ids=repr)
@pytest.mark.parametrize("key", ["step", "at_s", "loss"])
def test_a_row_of_metrics_of_another_kind_is_left_out_and_counted(run: Path, key: str, odd: Any) -> None:
    page = follow_up(run, {"step": 21, "at_s": 2.2, "loss": 0.1, key: odd})
    assert "metrics.jsonl: 1 invalid row left out" in page


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_metrics_of_another_kind_are_left_out_one_by_one_or_with_their_row(run: Path, odd: Any) -> None:
    left_out = "metrics.jsonl: 1 invalid row left out"
    no_table = odd is not None and not isinstance(odd, dict)
    assert (left_out in follow_up(run, {"step": 21, "at_s": 2.2, "metrics": odd})) == no_table
    page = follow_up(run, {"step": 21, "at_s": 2.2, "metrics": {"accuracy": odd, "\ud800": 0.5}})
    assert (left_out in page) == no_table, "of this row only what is no number"
    curves = {
        curve.name: dict(zip(curve.steps, curve.values, strict=True))
        for curve in existing_run(run).poll().curves
    }
    assert curves["\\ud800"] == {21: 0.5}
    assert curves["accuracy"].get(21) == (odd if odd in (-1, 1e308) else None)


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_rows_of_members_of_another_kind_break_nothing(run: Path, odd: Any) -> None:
    keys = ("shards", "slots", "names", "epoch", "member", "name", "sentence", "at_s", "event")
    with (run / "members.jsonl").open("a") as file:
        for event in ("layout", "view", "died", "started"):
            for key in keys:
                row = {
                    "event": event,
                    "shards": [odd],
                    "slots": [odd],
                    "names": {"0": odd},
                    "member": 0,
                    key: odd,
                }
                file.write(json.dumps(row) + "\n")
        shards = [{"shard": 0, "primary": odd, "backup": odd}]
        file.write(
            json.dumps({"event": "view", "shards": shards, "slots": [], "names": {"2": "server 0"}}) + "\n"
        )
        file.write(json.dumps({"event": "died", "sentence": "the last one"}) + "\n")
    page = shown(run)
    assert "the last one" in page
    assert "members.jsonl: " in page


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("key", ["samples_per_s", "steps", "per_worker", "staleness", "notes", "samples"])
def test_a_summary_of_another_kind_breaks_no_view_and_is_one_sentence_in_a_comparison(
    run: Path, key: str, odd: Any
) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {key: odd}))
    assert "40" in shown(run)
    is_good = key == "samples_per_s" or (key == "staleness" and not odd) or (
        (key, odd) in (("steps", -1), ("samples", -1))
    )  # fmt: skip
    is_good |= key == "notes" and odd in ("x", "\ud800", [], {}, [[]], {"a": {}})
    asked = Trial(place=0, repeat=0), run, Strategy.parse("ps servers=2 consistency=async")
    if is_good:
        measure(*asked)
    else:
        with pytest.raises(DataError, match="does not hold what the end of a run writes"):
            measure(*asked)


def test_values_are_taken_for_what_they_should_be() -> None:
    assert [whole(value) for value in (3, -3, True, 2.0, "3", None, 2**53, 10**400)] == [3, -3] + [None] * 6
    assert [number(value) for value in (3, 2.5, True, "3", None, 10**400, float("nan"))] == [3.0, 2.5] + [
        None
    ] * 5
    assert text("a\x1b[31m\ud800é\n") == "a\\x1b[31m\\ud800é\\n"
    assert [text(value) for value in (None, 3, [])] == ["", "", ""]
    assert len(text("x" * 10_000)) == 2000


@pytest.mark.parametrize(
    "ys",
    [
        (1e-320, 0.0),
        (-1e308, 1e308),
        (5e-324, 5e-324),
        (1e308, 1.0),
        (0.0, 0.0),
        (1e308, 1e308),
        (-1e308, -1e308),
        (1e308, 1.5e308),
        (5e-324, 1.7e308),
    ],
)
@pytest.mark.parametrize("log_y", [False, True])
def test_vast_and_tiny_values_are_drawn(ys: tuple[float, float], log_y: bool) -> None:
    for series in (Series(name="a", xs=(0, 1), ys=ys), Series(name="a", xs=ys, ys=(1, 2))):
        drawn = line_chart([series], title="t", x_label="x", y_label="y", log_y=log_y)
        assert "nan" not in drawn
        assert "inf" not in drawn
        [path] = re.findall(r' d="M([^"]*)"', drawn) or [""]
        assert path or (log_y and max(series.ys) <= 0), "drawn"
        assert all(0 <= float(place) <= 360 for place in re.findall(r"[\d.e+-]+", path)), "inside the picture"


# ── data files ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("strategy", ["single", "hogwild hands=processes", "allreduce", "ps servers=2"])
def test_an_absurd_feature_is_refused_with_the_figure_and_all_copies_counted(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(b"1 1000000000:1\n-1 1:1")
    assert path.stat().st_size == 21
    # Room for the table alone, as on a machine of 16 GiB: the copies of it would not fit.
    monkeypatch.setattr(training, "available_bytes", lambda: 17 << 30)
    workers = 1 if strategy == "single" else 2
    with (
        at_most(200 << 20),
        pytest.raises(UserError, match=r"up to 1000000000 needs .* GiB with its copies.*bits"),
    ):
        train_logreg(path, strategy=strategy, workers=workers)


@pytest.mark.parametrize("learner", ["sgd", "adagrad", "ftrl"])
def test_what_the_learner_counts_is_what_it_takes(
    tmp_path: Path, learner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from manyhands.workloads.logreg.options import LogregOptions

    path, size = tmp_path / "rows", 2_000_000
    path.write_bytes(b"1 %d:1\n-1 1:1\n" % (size - 1))
    options = LogregOptions(learner=learner, passes=2)
    asked: list[int] = []
    monkeypatch.setattr(training, "check_capacity", lambda size, row_bytes: asked.append(size * row_bytes))
    train_logreg(path, options)  # whatever is compiled or imported is there from now on
    tracemalloc.start()
    try:
        train_logreg(path, options).model.save(tmp_path / "model.safetensors")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= asked[-1] + (8 << 20)


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (b"9" * 5000 + b" 5\nthe 1 2 3 4 5\n", "line 1: 99999999999999999999… is not a number of vectors"),
        (b"1 " + b"9" * 5000 + b"\nthe 1 2 3 4 5\n", "line 1: 99999999999999999999… is not a number"),
        (b"the 1 2\ncat nan 2\n", "line 2: 'nan' is not a finite number"),
        (b"the 1 2\ncat 1 -inf\n", "line 2: '-inf' is not a finite number"),
        (b"the 1 2\ncat 1 1e99\n", "line 2: '1e99' is not a finite number"),
        (b"2 2\nthe 1 2\ncat NaN 2\n", "line 3: 'NaN' is not a finite number"),
        (b"1 1\nthe \x00\x00\xc0\x7f\n", "vector 1 of 1 has a number that is not finite"),
    ],
)  # fmt: skip
def test_vectors_that_are_no_numbers_are_refused(tmp_path: Path, content: bytes, reported: str) -> None:
    (tmp_path / "vectors").write_bytes(content)
    with pytest.raises(DataError, match=reported):
        Vectors.load(tmp_path / "vectors")


def test_vast_vectors_have_directions_too() -> None:
    unit = Vectors(["a", "b"], np.array([[1e30, 0.0], [3.0, 4.0]], np.float32)).unit
    assert np.array_equal(unit, np.array([[1, 0], [0.6, 0.8]], np.float32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_model_with_weights_that_are_no_numbers_is_refused(tmp_path: Path, bad: float) -> None:
    table = np.array([0.5, bad, 1.0], np.float32)
    LogregModel(table=table, labels=Labels(-1.0, 1.0)).save(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="its weights are not all finite"):
        LogregModel.load(tmp_path)


@pytest.mark.parametrize("count", [b"9" * 5000, b"99999999999999999999999999", b"9223372036854775807", b"-1"])
def test_a_count_that_no_corpus_has_is_refused(tmp_path: Path, count: bytes) -> None:
    (tmp_path / "vocab.txt").write_bytes(b"the 3\ncat " + count + b"\n")
    with pytest.raises(DataError, match="line 2"):
        Vocabulary.load(tmp_path / "vocab.txt")


# ── replay ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["digits", "gpt"])
def test_a_recorded_model_of_absurd_width_is_refused_with_the_figure(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("a text to learn from, " * 200)
    options = {"path": tmp_path / "text"} if name == "gpt" else {}
    record = SimpleNamespace(workers=2)
    monkeypatch.setattr(replay, "available_bytes", lambda: 8 << 30)
    replay._check_capacity(tmp_path, TASKS[name].build(**options), record)
    for width in (4 * 10**6, 4 * 10**12, 4 * 10**30):
        task = TASKS[name].build(**options, width=width)
        with at_most(100 << 20), pytest.raises(UserError, match=r"the model of its config\.json"):
            replay._check_capacity(tmp_path, task, record)


@pytest.mark.parametrize("odd", [None, 1, True, [], {}, "\ud800", "A" * 3000], ids=repr)
def test_a_recorded_task_of_another_kind_is_refused(tmp_path: Path, odd: Any) -> None:
    for config in ({"task": odd, "task_options": {}}, {"task_options": {}}):
        with pytest.raises(UserError, match=r"config\.json: its task is .*; allowed: digits, ") as caught:
            replay._built_in(tmp_path, config)
        assert len(printed(caught.value)) < 1000


@pytest.mark.parametrize("odd", [[], {}, "x", 10**400, -(10**400), float("nan"), float("inf")], ids=repr)
@pytest.mark.parametrize(
    "option", ["batch_size", "learning_rate", "split_seed", "width", "name", "self", "", "\ud800"]
)
def test_recorded_options_of_another_kind_are_refused_by_name(tmp_path: Path, option: str, odd: Any) -> None:
    if odd == 10**400 and option in ("batch_size", "width", "split_seed"):
        return  # integers as they come: what a model of them takes is looked at before it is made
    with pytest.raises(UserError, match="ud800" if option == "\ud800" else option or "option ''") as caught:
        replay._built_in(tmp_path, {"task": "digits", "task_options": {option: odd}})
    printed(caught.value)


@pytest.mark.parametrize("path", ["a\0b", "\ud800"], ids=repr)
def test_an_option_that_no_file_can_be_called_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match=r"path is .*; it must be a path") as caught:
        replay._built_in(tmp_path, {"task": "gpt", "task_options": {"path": path}})
    printed(caught.value)


def printed(error: Exception) -> str:
    """The sentence of an error as a terminal gets it."""
    return str(error).encode().decode()


@pytest.mark.parametrize("odd", ["\ud800", "A" * 3000, 10**400, [[]], None], ids=repr)
def test_a_recorded_shape_of_another_kind_can_be_reported(odd: Any) -> None:
    before, now = _config() | {"parameters": {"\ud800": odd}}, _config() | {"parameters": {"a": "float32 3"}}
    for one, other in ((before, now), (now, before)):
        reported = fingerprint(one).conflict(fingerprint(other))
        assert reported is not None
        assert len(reported.encode()) < 1000


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_weights_are_not_compared_with_a_summary_of_another_kind(run: Path, odd: Any) -> None:
    for servers in (odd, [odd], [{"shard": odd, "sha256": "ab"}], [{"shard": 0, "sha256": odd}]):
        (run / "summary.json").write_text(json.dumps({"servers": servers}))
        assert not replay.is_same(RunDirectory.open(run, lock=False).read_summary() or {}, ["ab"])
    (run / "summary.json").write_text(json.dumps({"servers": [{"shard": 0, "sha256": "ab"}]}))
    assert replay.is_same(RunDirectory.open(run, lock=False).read_summary() or {}, ["ab"])


@pytest.mark.parametrize(
    ("strategy", "reported"),
    [
        ("mirrored", r"run\.json: strategy='mirrored' must be ps"),
        ("ps servers=1000000000", "has no log of shard 1: "),
        ("x", "x"),
    ],
)
def test_a_recorded_strategy_of_another_kind_is_refused(tmp_path: Path, strategy: str, reported: str) -> None:
    record = RunRecord(torch="", cpu="", threads=1, strategy=strategy, workers=2, steps=9, seed=0, device="cpu",
                       autocast=False, layout="")  # fmt: skip
    with RunDirectory.create(tmp_path / "run", _config() | {"task_options": {}, "strategy": "ps"}):
        write_record(tmp_path / "run", record)
    (tmp_path / "run" / "updates" / "shard-0.member-1.jsonl").write_text("")
    with at_most(100 << 20), pytest.raises(UserError, match=reported):
        replay.replay(tmp_path / "run")


@pytest.mark.parametrize(
    "line",
    ["[" * 5000, '{"row":' * 5000, '{"row": []}', "1" * 5000, '{"row": "lost"}', "{}", "null", '"x"'],
    ids=lambda line: line[:12],
)
def test_a_line_of_a_log_that_is_none_is_refused(line: str) -> None:
    with pytest.raises(DataError, match=r"a line of the log|row needs exactly"):
        row_from_json(line)


def test_a_loss_of_absurdly_many_updates_is_refused() -> None:
    row = LostRow(**dict.fromkeys(LostRow._fields, 0))
    assert row_from_json(row_to_json(row)) == row
    for first, until in ((0, 2**25), (5, 3), (0, 2**53)):
        with pytest.raises(DataError, match="lost clocks; at least 0"):
            row_from_json(row_to_json(row._replace(first=first, until=until)))
    for until in (10**30, -1):
        with pytest.raises(DataError, match=f"until={until} must be int from 0 to"):
            row_from_json(row_to_json(row._replace(until=until)))
