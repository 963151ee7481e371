"""Training from files in one process: what a9a must give, labels, memory, interruption; metrics by scikit-learn."""

from __future__ import annotations

import gzip
import io
import signal
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, confusion_matrix, log_loss, roc_auc_score

from manyhands.data.row_files import Reading, RowFile
from manyhands.engine.training import Keeping
from manyhands.errors import DataError, UserError
from manyhands.places.local.signals import ending
from manyhands.workloads.array_files import mapped_arrays, unload
from manyhands.workloads.logreg import training
from manyhands.workloads.logreg.labels import Labels, Metrics, labels_of, measure
from manyhands.workloads.logreg.model import MODEL_FILE, LogregModel
from manyhands.workloads.logreg.options import LogregOptions
from manyhands.workloads.logreg.task import LogregTask
from manyhands.workloads.logreg.training import LogregResult, train_logreg

DATA = Path(__file__).parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="needs the files of ../shared/data")


def small_file(folder: Path, labels: tuple[str, str] = ("-1", "1"), rows: int = 400) -> Path:
    path = folder / "small"
    path.write_text(small_text(labels, rows))
    return path


@cache
def small_text(labels: tuple[str, str], rows: int) -> str:
    random = np.random.default_rng(11)
    truth = random.normal(size=31) * 2
    lines = []
    for _ in range(rows):
        features = np.sort(random.choice(np.arange(1, 31), 6, replace=False))
        values = random.normal(size=6).round(3)
        is_yes = truth[features] @ values + random.logistic() > 0
        pairs = " ".join(f"{i}:{x}" for i, x in zip(features, values, strict=True))
        lines.append(f"{labels[bool(is_yes)]} {pairs}")
    return "\n".join(lines) + "\n"


def train(path: Path | str, strategy: str = "single", workers: int = 1, **options: Any) -> LogregResult:
    return train_logreg(path, LogregOptions(**options), strategy=strategy, workers=workers)


def assert_good(metrics: Metrics) -> None:
    assert metrics.accuracy >= 0.848
    assert metrics.auc is not None
    assert metrics.auc >= 0.901
    assert metrics.log_loss <= 0.327


@needs_data
@pytest.mark.parametrize("learner", ["sgd", "adagrad", "ftrl"])
@pytest.mark.parametrize(
    ("strategy", "workers"), [("single", 1), ("hogwild", 2), ("hogwild order=locked", 2)]
)
def test_a9a_is_learned(strategy: str, workers: int, learner: str) -> None:
    result = train(DATA / "a9a.gz", strategy, workers, learner=learner)
    assert result.examples == 32561
    assert len(result.progressive_loss) == 5
    assert_good(result.model.evaluate(RowFile(DATA / "a9a.t.gz")))


@needs_data
@pytest.mark.parametrize("options", [{"learner": "ftrl", "l1": 3.0}, {"l2": 1e-5}])
def test_a9a_is_learned_with_hashing_and_penalties(options: dict[str, Any]) -> None:
    result = train_logreg(DATA / "a9a.gz", LogregOptions(**options), reading=Reading(bits=18))
    assert result.model.weight.size == 1 << 18
    assert_good(result.model.evaluate(result.model.file(DATA / "a9a.t.gz")))


def test_metrics_are_those_of_scikit_learn() -> None:
    random = np.random.default_rng(1)
    margins = random.normal(size=2000).round(1) * 4  # many ties
    targets = (margins + 3 * random.logistic(size=2000) > 0).astype(np.float32)
    weights = random.integers(1, 4, 2000).astype(np.float32)
    chances = 1 / (1 + np.exp(-margins))
    for counted in (None, weights):
        found = measure(margins, targets, counted)
        assert found.accuracy == pytest.approx(accuracy_score(targets, chances > 0.5, sample_weight=counted))
        assert found.auc == pytest.approx(roc_auc_score(targets, chances, sample_weight=counted))
        assert found.log_loss == pytest.approx(log_loss(targets, chances, sample_weight=counted))
        assert found.confusion == tuple(map(tuple, confusion_matrix(targets, chances > 0.5)))
    scores = random.normal(size=(2000, 4)) * 3
    own = random.integers(0, 4, 2000)
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    found = measure(scores, own, weights)
    assert found.log_loss == pytest.approx(log_loss(own, chances, sample_weight=weights))
    assert found.accuracy == pytest.approx(accuracy_score(own, scores.argmax(1), sample_weight=weights))
    assert (found.confusion, found.auc) == (tuple(map(tuple, confusion_matrix(own, scores.argmax(1)))), None)
    assert measure(margins, np.ones(2000, np.float32)).auc is None
    assert measure(np.array([1000.0, -1000.0]), np.array([0, 1], np.float32)).log_loss == pytest.approx(1000)


def test_the_labels_of_files(tmp_path: Path) -> None:
    found = [train(small_file(tmp_path, pair)) for pair in (("-1", "1"), ("0", "1"), ("1", "2"))]
    assert [(one.model.labels.no, one.model.labels.yes) for one in found] == [(-1, 1), (0, 1), (1, 2)]
    for one in found[1:]:
        np.testing.assert_array_equal(one.model.table, found[0].model.table)
    assert labels_of(np.array([2]), "x") == Labels(1, 2)
    assert labels_of(np.array([7, 5, 7]), "x") == Labels(5, 7)
    assert labels_of(np.array([0, 2, 1]), "x", ["b", "c", "a"]) == Labels("a", "b", "c")
    (tmp_path / "one").write_text("1 1:1\n1 2:1\n")
    with pytest.raises(DataError, match=r"one: all rows have label 1; a classifier needs two labels"):
        train(tmp_path / "one")
    (tmp_path / "part").write_text("1 1:1\n0.5 2:1\n")
    with pytest.raises(DataError, match=r"has label 0.5; classes are integers or names"):
        train(tmp_path / "part")
    (tmp_path / "none.vw").write_text("1 |f 1\n-1 |f 2\n|f 3\n")
    with pytest.raises(DataError, match=r"none.vw: row 3 has no label"):
        train(tmp_path / "none.vw")
    (tmp_path / "many").write_text("".join(f"{at} 1:1\n" for at in range(1200)))
    with pytest.raises(DataError, match="labels; a classifier has at most 1,000"):
        train(tmp_path / "many")


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_labels_that_come_late_are_classes_like_the_others(tmp_path: Path, memory: int) -> None:
    late, rows = tmp_path / "late", Reading(block_bytes=60)
    late.write_text("1 1:1\n" * 50 + "2 2:1\n" * 50)
    assert train_logreg(late, reading=rows, memory_bytes=memory).model.labels == Labels(1, 2)
    late.write_text("1 1:1\n" * 50 + "0 2:1\n" * 50 + "2 3:1\n" * 50)
    model = train_logreg(late, LogregOptions(passes=20), reading=rows, memory_bytes=memory).model
    assert model.labels == Labels(0, 1, 2)
    assert model.evaluate(model.file(late)).confusion == ((50, 0, 0), (0, 50, 0), (0, 0, 50))
    (tmp_path / "new").write_text("1 1:1\n0 2:1\n3 3:1\n")
    with pytest.raises(DataError, match="new: row 3 has label 3, which is new; labels are 0, 1, 2"):
        model.evaluate(model.file(tmp_path / "new"))


def write_rows(path: Path, values: np.ndarray, labels: np.ndarray) -> Path:
    lines = [" ".join(f"{at}:{x:.9g}" for at, x in enumerate(row, 1)) for row in values.astype(np.float32)]
    path.write_text("".join(f"{label} {line}\n" for label, line in zip(labels, lines, strict=True)))
    return path


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("hogwild", 2)])
@pytest.mark.parametrize("learner", ["adagrad", "sgd"])
def test_several_classes_are_learned_as_well_as_by_scikit_learn(
    strategy: str, workers: int, learner: str, tmp_path: Path
) -> None:
    drawn = np.random.default_rng(2)
    values = drawn.normal(size=(18_000, 20))
    labels = (values @ drawn.normal(size=(20, 4)) + drawn.gumbel(size=(18_000, 4))).argmax(axis=1)
    train_part, test_part = slice(0, 14_000), slice(14_000, None)  # three steps: two workers have some
    peer = LogisticRegression().fit(values[train_part], labels[train_part])
    chances = peer.predict_proba(values[test_part])
    path = write_rows(tmp_path / "train", values[train_part], labels[train_part])
    test = write_rows(tmp_path / "test", values[test_part], labels[test_part])
    model = train(path, strategy, workers, learner=learner, passes=10).model
    found = model.evaluate(model.file(test))
    assert found.log_loss == pytest.approx(log_loss(labels[test_part], chances), abs=0.002)
    assert found.accuracy == pytest.approx(
        accuracy_score(labels[test_part], chances.argmax(axis=1)), abs=0.003
    )
    assert (
        np.abs(np.concatenate(list(map(model.probabilities, model.file(test).blocks()))) - chances).mean()
        < 0.01
    )
    model.save(tmp_path / MODEL_FILE)
    loaded = LogregModel.load(tmp_path)
    np.testing.assert_array_equal(loaded.table, model.table)
    assert loaded.labels == model.labels == Labels(0, 1, 2, 3)


@pytest.mark.parametrize("strategy", ["single", "hogwild order=turns"])
def test_memory_does_not_change_the_result(tmp_path: Path, strategy: str) -> None:
    path = small_file(tmp_path)
    workers = 1 if strategy == "single" else 2
    kept = train(path, strategy, workers, rate=0.2)
    small = Reading(block_bytes=500)
    read_again = train_logreg(
        path, LogregOptions(rate=0.2), strategy=strategy, workers=workers, reading=small, memory_bytes=0
    )
    np.testing.assert_array_equal(read_again.model.table, kept.model.table)
    assert read_again.progressive_loss == pytest.approx(kept.progressive_loss, rel=1e-12)
    assert read_again.examples == kept.examples == 400


def test_stdin_is_read_once_and_kept_in_memory_or_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = gzip.compress(small_file(tmp_path).read_bytes())

    def give() -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    give()
    kept = train("-")
    np.testing.assert_array_equal(kept.model.table, train(tmp_path / "small").model.table)
    give()
    once = train_logreg("-", LogregOptions(passes=1), memory_bytes=10)
    np.testing.assert_array_equal(once.model.table, train(tmp_path / "small", passes=1).model.table)
    give()
    spooled = train_logreg("-", memory_bytes=10)
    np.testing.assert_array_equal(spooled.model.table, kept.model.table)


def test_an_absurd_index_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "available_bytes", lambda: 10**9)
    (tmp_path / "absurd").write_text("1 1:1\n-1 2000000000:1\n")
    for strategy, workers in (("single", 1), ("ps", 2)):
        with pytest.raises(UserError, match=r"up to 2000000000 needs .* only 953.7 MiB is available; hash"):
            train(tmp_path / "absurd", strategy, workers)


def test_the_usual_rate_fits_the_size_of_the_values(tmp_path: Path) -> None:
    """Values that are ten times larger, and weights ten times smaller: the same model."""
    plain = small_file(tmp_path).read_text().splitlines()
    larger = []
    for line in plain:
        label, *pairs = line.split()
        larger.append(
            " ".join([label, *(f"{i}:{float(x) * 10:.8g}" for i, x in (p.split(":") for p in pairs))])
        )
    (tmp_path / "larger").write_text("\n".join(larger) + "\n")
    one, other = train(tmp_path / "small"), train(tmp_path / "larger")
    assert other.rate == pytest.approx(one.rate / 10, rel=1e-6)
    found = [result.model.evaluate(RowFile(tmp_path / "small")).log_loss for result in (one,)]
    found += [result.model.evaluate(RowFile(tmp_path / "larger")).log_loss for result in (other,)]
    assert found[1] == pytest.approx(found[0], rel=0.1)


def test_features_that_come_late_make_the_table_grow(tmp_path: Path) -> None:
    (tmp_path / "grows").write_text("".join(f"{i % 2} {i * i}:1 {i % 2 + 1}:1\n" for i in range(3, 60)))
    result = train_logreg(tmp_path / "grows", reading=Reading(block_bytes=40), memory_bytes=0)
    assert result.model.weight.size == 59 * 59 + 1
    assert result.model.evaluate(RowFile(tmp_path / "grows")).accuracy == 1.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("hogwild order=turns", 2)])
def test_an_interrupted_training_goes_on_to_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, strategy: str, workers: int, number: signal.Signals
) -> None:
    path, keep = small_file(tmp_path, rows=9_000), Keeping(out=tmp_path / "run")

    def stop(_number: int, _loss: float) -> None:
        signal.raise_signal(number)

    with ending() as end:
        found = train_logreg(
            path,
            LogregOptions(passes=10**6),
            strategy=strategy,
            workers=workers,
            after_pass=stop,
            keep=keep,
        )
    assert end.signal == number
    assert found.interrupted
    assert np.abs(found.model.table).max() > 0.01
    passes = len(found.progressive_loss) + 2
    options = LogregOptions(passes=passes)
    whole = train_logreg(path, options, strategy=strategy, workers=workers)
    resumed = train_logreg(path, options, strategy=strategy, workers=workers, keep=replace(keep, resume=True))
    np.testing.assert_array_equal(resumed.model.table, whole.model.table)
    assert resumed.progressive_loss == pytest.approx(whole.progressive_loss, rel=1e-12)
    with pytest.raises(UserError, match=r"rate is 0\.5, but the run was started with"):
        train_logreg(path, LogregOptions(rate=0.5), keep=replace(keep, resume=True))


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("hogwild", 2)])
def test_kernels_are_compiled_before_the_first_step(
    strategy: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, step = [], LogregTask.step
    monkeypatch.setattr(LogregTask, "warm", lambda task: report.append("compiled"))
    monkeypatch.setattr(LogregTask, "step", lambda *given: report.append("step") or step(*given))
    train(small_file(tmp_path), strategy, workers, passes=1)
    assert report == ["compiled", *["step"] * workers]


def test_without_a_directory_an_interruption_is_raised(tmp_path: Path) -> None:
    def stop(_number: int, _loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_logreg(small_file(tmp_path), LogregOptions(passes=10**6), after_pass=stop)


def test_a_model_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = small_file(tmp_path)
    result = train_logreg(path, reading=Reading(bits=9))
    result.model.save(tmp_path / MODEL_FILE)
    for place in (tmp_path, tmp_path / MODEL_FILE):
        loaded = LogregModel.load(place)
        assert (loaded.bits, loaded.hash, loaded.labels) == (9, "numbers", Labels(-1, 1))
        np.testing.assert_array_equal(loaded.table, result.model.table)
    by_library = safetensors.numpy.load_file(tmp_path / MODEL_FILE)
    np.testing.assert_array_equal(by_library["weight"], result.model.weight)
    (rows,) = loaded.file(path).blocks()
    margins = [
        loaded.bias + loaded.weight[rows.indices[a:b]] @ rows.values[a:b] for a, b in ((0, 6), (6, 12))
    ]
    np.testing.assert_allclose(
        loaded.probabilities(rows)[:2], 1 / (1 + np.exp(-np.array(margins))), rtol=1e-5
    )


def test_features_that_no_example_taught_count_nothing(tmp_path: Path) -> None:
    model = train(small_file(tmp_path)).model
    (tmp_path / "new").write_text("1 5000:3\n1 2000000000:1\n")
    (rows,) = model.file(tmp_path / "new").blocks()
    assert model.margins(rows).tolist() == [model.bias, model.bias]


def test_files_that_are_no_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        LogregModel.load(tmp_path)
    (tmp_path / "noise").write_bytes(b"noise" * 100)
    with pytest.raises(UserError, match=r"model .*noise is not a safetensors file"):
        LogregModel.load(tmp_path / "noise")
    other = {"weight": np.zeros(3, np.float32), "bias": np.zeros(1, np.float32)}
    header = {"format": "manyhands.logreg.1", "labels": "-1 1", "bits": "9", "hash": "numbers"}
    for wrong, sentence in (
        ({"format": "pt"}, "its format is 'pt'"),
        ({"bits": "9"}, "it has 3 weights for 9 bits"),
        ({"labels": "5 6"}, "its labels are '5 6'"),
        ({"labels": "[1, 2, 3]"}, "its weights are not a float32 vector"),
    ):
        safetensors.numpy.save_file(other, tmp_path / "other", {**header, **wrong})
        with pytest.raises(UserError, match=sentence):
            LogregModel.load(tmp_path / "other")


@pytest.mark.parametrize(
    ("strategy", "workers", "options", "sentence"),
    [
        ("single", 2, {}, "workers=2: single is one process; use strategy=hogwild"),
        ("hogwild", 0, {}, "workers=0 must be an integer of at least 1"),
        ("tensor", 2, {}, "strategy tensor splits vectors"),
        (
            "ps",
            2,
            {"l1": 0.1},
            "learner adagrad does not support l1 with strategies that use batches; use learner=ftrl",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, strategy: str, workers: int, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        train(small_file(tmp_path), strategy, workers, **options)


def test_threads_that_had_nothing_to_do_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = small_file(tmp_path)
    alone, together = train(path, passes=3), train(path, "hogwild", 2, passes=3)
    np.testing.assert_array_equal(together.model.table, alone.model.table)
    (note,) = together.summary["notes"]
    assert note.startswith(
        "only 1 of 2 threads worked at once, and the numbers are those of strategy=single: a pass over 400 "
        "records is 1 step, and one worker computes each step"
    )
    assert note in caplog.text
    assert alone.summary["notes"] == train(path, "hogwild", 1, passes=3).summary["notes"] == []


@needs_data
def test_threads_that_all_worked_are_not() -> None:
    summary = train(DATA / "a9a.gz", "hogwild", 2).summary
    assert summary["steps"] > 5, "there are several steps in a pass"
    both_worked = all(worker["steps"] for worker in summary["per_worker"])
    assert (summary["notes"] == []) == both_worked


def test_what_was_read_of_a_mapped_array_leaves_memory(tmp_path: Path) -> None:
    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) << 10

    np.arange(1 << 23, dtype=np.float64).tofile(tmp_path / "numbers")
    array = mapped_arrays(str(tmp_path), {"numbers": np.float64})["numbers"]
    total, before = array.sum(), resident()
    unload(array, 1 << 10, 1 << 23)
    assert before - resident() > 32 << 20
    assert array.sum() == total
    unload(np.zeros(3), 0, 3)  # which is not mapped
