"""Gradient boosting in one process and by threads that meet: a tree by hand, equal trees, resume, peers, bad input."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import make_hastie_10_2
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score

from manyhands.boosting.measuring import measure_model
from manyhands.boosting.model import GbdtModel
from manyhands.boosting.options import GbdtOptions
from manyhands.boosting.predicting import GbdtPredictor
from manyhands.boosting.searching import area_words, told_words
from manyhands.boosting.sources import ArraySource, RowBlock, open_source
from manyhands.boosting.table import Holdout
from manyhands.boosting.tally import HistogramMeeting
from manyhands.boosting.task import GbdtStep, GbdtTask
from manyhands.boosting.text_format import parse_model, render_model
from manyhands.boosting.training import GbdtResult, TableChoice, gbdt_task, train_gbdt
from manyhands.boosting.trees import TreeMemory
from manyhands.errors import UserError
from manyhands.inference.predictor import ReadAs
from manyhands.training.kept import Keeping

DATA = Path(__file__).parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="needs the files of ../shared/data")


def drawn_table(rows: int = 700, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Numbers, some of them missing, a categorical column (4), and labels that depend on all of it."""
    drawn = np.random.default_rng(seed)
    values = drawn.normal(size=(rows, 6)).round(3)
    values[:, 4] = drawn.integers(0, 12, rows)
    logit = values[:, 0] * 2 - values[:, 1] ** 2 + (values[:, 4] % 3 == 1) * 2
    values[drawn.random((rows, 6)) < 0.1] = np.nan
    logit += np.isnan(values[:, 2]) * 2
    return values, (logit + drawn.logistic(size=rows) > 0).astype(float)


def choice(values: np.ndarray, labels: np.ndarray, **more: Any) -> TableChoice:
    return TableChoice(train=ArraySource(values, labels), **more)


def trained(table: TableChoice, **options: Any) -> GbdtResult:
    return train_gbdt(table, GbdtOptions(**options))


def predictions(model: GbdtModel, values: np.ndarray) -> np.ndarray:
    return model.predict(RowBlock(labels=None, dense=values))


def test_one_split_is_the_one_found_by_hand() -> None:
    values = np.array([[1.0], [1.0], [1.0], [2.0], [2.0], [2.0], [3.0], [3.0], [3.0]])
    labels = np.array([1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 11.0, 12.0, 13.0])
    options = {"trees": 1, "num_leaves": 2, "min_data_in_leaf": 1, "rate": 0.5, "lambda_l2": 1.0}
    model = trained(choice(values, labels), objective="regression", **options).model
    (tree,) = model.trees
    mean = labels.mean()  # 16/3; gradients are mean - label
    left, right = 6 * mean - 12, 3 * mean - 36  # 20 and -20
    assert tree.threshold.tolist() == [2.5]
    assert tree.gain[0] == pytest.approx(left**2 / 7 + right**2 / 4)
    assert tree.leaf_value == pytest.approx([mean - 0.5 * left / 7, mean - 0.5 * right / 4])
    assert tree.leaf_count.tolist() == [6, 3]
    assert predictions(model, np.array([[2.5], [2.6]])) == pytest.approx(tree.leaf_value)


def by_threads(task: GbdtTask, world: int, trees: int) -> list[TreeMemory]:
    """The trees of every worker, where workers are threads."""
    areas = np.zeros((world, area_words(task.gbdt, task.bins.offsets)), np.int64)
    told, barrier = (
        np.zeros((2, world, told_words(task.gbdt)), np.int64),
        threading.Barrier(world, timeout=60),
    )
    memories, failed = [task.model() for _ in range(world)], []

    def work(rank: int) -> None:
        try:
            step = GbdtStep(
                task, memories[rank], HistogramMeeting(rank, areas, told, lambda: barrier.wait() and None)
            )
            step.fill()
            for number in range(trees):
                step.take(task.portion(number))
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return memories


def assert_same(memories: Sequence[TreeMemory], reference: TreeMemory) -> None:
    expected = {name: one.numpy() for name, one in reference.named_buffers()}
    for memory in memories:
        for name, one in memory.named_buffers():
            assert np.array_equal(one.numpy(), expected[name]), name


@pytest.mark.parametrize("objective", ["binary", "regression"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_any_number_of_workers_grows_the_same_trees(objective: str, world: int) -> None:
    values, labels = drawn_table()
    if objective == "regression":
        labels = labels * 1e3 + np.nan_to_num(values[:, 0])
    weights = np.random.default_rng(0).random(len(labels))
    source = ArraySource(values, labels, weights=weights)
    table = TableChoice(train=source, categorical=("4",), valid_fraction=0.2)
    options = GbdtOptions(objective=objective, trees=6, num_leaves=9, min_data_per_group=5)
    with gbdt_task(table, options, shared=False) as task:
        (alone,) = by_threads(task, 1, 6)
        assert (alone.get_buffer("num_leaves").numpy() == 9).all()
        assert np.isfinite(alone.valid_losses()).all()
        assert (alone.get_buffer("flags").numpy() & 1).any(), "a categorical split is among them"
        assert (alone.get_buffer("flags").numpy() & 2).any(), "and one that sends missing values to the left"
        assert_same(by_threads(task, world, 6), alone)


@pytest.mark.parametrize("parallel", ["data", "voting"])
def test_features_that_share_columns_give_any_number_of_workers_the_same_trees(parallel: str) -> None:
    drawn = np.random.default_rng(7)
    answers = [np.eye(6)[drawn.integers(0, 6, 900)] for _ in range(3)]
    values = np.column_stack([*answers, drawn.normal(size=900)])
    labels = answers[0] @ np.arange(6.0) + answers[1] @ np.arange(6.0) * values[:, -1]
    options = GbdtOptions(trees=5, num_leaves=9, parallel=parallel, top_k=20)
    with gbdt_task(choice(values, labels), options, shared=False) as task:
        assert len(task.train.layout.offsets) - 1 == 4, "three questions and a number"
        (alone,) = by_threads(task, 1, 5)
        assert (alone.get_buffer("num_leaves").numpy() == 9).all()
        for world in (2, 3):
            assert_same(by_threads(task, world, 5), alone)


def test_voting_is_the_same_where_all_features_are_elected_and_cheaper_where_not() -> None:
    values, labels = drawn_table()
    table = choice(values, labels, categorical=("4",))
    with gbdt_task(table, GbdtOptions(trees=4, num_leaves=7), shared=False) as task:
        (alone,) = by_threads(task, 1, 4)
    with gbdt_task(
        table, GbdtOptions(trees=4, num_leaves=7, parallel="voting", top_k=6), shared=False
    ) as task:
        assert_same(by_threads(task, 3, 4), alone)
    with gbdt_task(
        table, GbdtOptions(trees=4, num_leaves=7, parallel="voting", top_k=1), shared=False
    ) as task:
        first, *others = by_threads(task, 3, 4)
        assert_same(others, first)
        assert not np.array_equal(first.get_buffer("gain").numpy(), alone.get_buffer("gain").numpy())
        assert first.get_buffer("gain").numpy()[0, 0] == alone.get_buffer("gain").numpy()[0, 0]


def test_trees_predict_what_training_had_as_scores() -> None:
    values, labels = drawn_table()
    with gbdt_task(choice(values, labels, categorical=("4",)), GbdtOptions(trees=8), shared=False) as task:
        memory = task.model()
        step = task.step(memory, None)  # type: ignore[arg-type]
        step.fill()
        losses = [step.take(task.portion(number)) for number in range(8)]
        bias = float(task.train.opened()[3][0])
        assert isinstance(step, GbdtStep)
        model = GbdtModel.of(
            dict(memory.named_buffers()),
            8,
            task.bins,
            objective="binary",
            bias=bias,
            rate=0.1,
            names=None,
            parameters={},
        )
        scores = model.scores(RowBlock(labels=None, dense=values))
        assert np.allclose(scores, step._train.scores, rtol=0, atol=1e-12)
        assert [one.loss for one in losses] == sorted((one.loss for one in losses), reverse=True)
        chance = 1 / (1 + np.exp(-bias))
        assert chance == pytest.approx(labels.mean())
        entropy = -(chance * np.log(chance) + (1 - chance) * np.log(1 - chance))
        assert losses[0].loss / losses[0].weight == pytest.approx(entropy)


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    values, labels = drawn_table()
    table = choice(values, labels, categorical=("4",), valid_fraction=0.2)
    whole = train_gbdt(table, GbdtOptions(trees=9, early_stopping=50), keep=Keeping(out=tmp_path / "whole"))
    train_gbdt(table, GbdtOptions(trees=4, early_stopping=50), keep=Keeping(out=tmp_path / "run"))
    resumed = train_gbdt(
        table, GbdtOptions(trees=9, early_stopping=50), keep=Keeping(out=tmp_path / "run", resume=True)
    )
    assert resumed.summary["resumed_from_step"] == 4
    assert render_model(resumed.model) == render_model(whole.model)
    assert resumed.valid_losses == whole.valid_losses
    with pytest.raises(UserError, match="num_leaves is 5, but the run was started with 31"):
        train_gbdt(table, GbdtOptions(num_leaves=5), keep=Keeping(out=tmp_path / "run", resume=True))


def test_training_goes_on_with_a_model_as_if_it_had_grown_it() -> None:
    values, labels = drawn_table()
    table = choice(values, labels, categorical=("4",), valid_fraction=0.2)
    whole = trained(table, trees=8)
    first = parse_model(render_model(trained(table, trees=3).model).encode(), "first")
    rest = trained(replace(table, start=first), trees=5)
    assert rest.valid_losses == whole.valid_losses[3:]
    assert rest.model.trees[:3] == first.trees
    ours, theirs = (render_model(one.model).partition("parameters:")[0] for one in (rest, whole))
    assert ours == theirs
    with pytest.raises(UserError, match="the model has 6 columns, and the table 5"):
        trained(replace(choice(values[:, :5], labels), start=first))
    with pytest.raises(UserError, match="the objective of the model is 'binary sigmoid:1', and regression"):
        trained(replace(table, start=first), objective="regression")


def test_early_stopping_keeps_the_trees_up_to_the_best() -> None:
    values, labels = drawn_table()
    labels = np.random.default_rng(1).permutation(labels)  # nothing to learn
    result = trained(choice(values, labels, valid_fraction=0.3), trees=60, early_stopping=4, rate=0.5)
    best = int(np.argmin(result.valid_losses)) + 1
    assert result.trees_grown == best + 4 < 60
    assert len(result.model.trees) == best
    assert any("valid_loss has not fallen in 4 evaluations" in note for note in result.summary["notes"])
    with pytest.raises(UserError, match="early_stopping needs rows to measure on"):
        trained(choice(values, labels), early_stopping=4)


def test_training_ends_where_nothing_can_be_split() -> None:
    values, labels = np.array([[0.0], [1.0]] * 30), np.array([0.0, 1.0] * 30)
    result = trained(choice(values, labels), trees=500, objective="regression", rate=1.0)
    assert result.trees_grown < 500
    assert "no split of all rows gains anything" in str(result.summary["notes"])
    assert predictions(result.model, values) == pytest.approx(labels)


def test_importance_counts_splits_and_gains() -> None:
    values, labels = drawn_table()
    model = trained(choice(values, labels), trees=10).model
    splits, gains = model.importance("split"), model.importance("gain")
    assert splits.sum() == sum(tree.num_leaves - 1 for tree in model.trees)
    assert gains.sum() == pytest.approx(sum(tree.gain.sum() for tree in model.trees))
    assert gains.argmax() == 0
    with pytest.raises(UserError, match="split or gain"):
        model.importance("weight")


def test_held_out_rows_are_a_share_of_all_by_their_number() -> None:
    chosen = Holdout(fraction=0.25, seed=1).chosen(0, 100_000)
    assert 24_000 < chosen.sum() < 26_000
    assert np.array_equal(chosen[500:600], Holdout(fraction=0.25, seed=1).chosen(500, 100))
    assert not Holdout().chosen(0, 1000).any()
    assert not np.array_equal(chosen, Holdout(fraction=0.25, seed=2).chosen(0, 100_000))


def test_the_forms_of_a_table_give_one_model(tmp_path: Path) -> None:
    values, labels = drawn_table(300)
    values = np.nan_to_num(values).astype(np.float32).astype(np.float64)
    np.save(tmp_path / "t.npy", np.column_stack([labels, values]))
    lines = [
        f"{label:g} " + " ".join(f"{at}:{float(x)!r}" for at, x in enumerate(row) if x)
        for label, row in zip(labels, values, strict=True)
    ]
    (tmp_path / "t.svm.gz").write_bytes(gzip.compress("\n".join(lines).encode() + b"\n"))
    expected = render_model(trained(choice(values, labels), trees=5).model)
    for name in ("t.npy", "t.svm.gz"):
        found = trained(TableChoice(train=open_source(tmp_path / name)), trees=5)
        assert render_model(found.model) == expected, name
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"label": labels} | {f"Column_{at}": values[:, at] for at in range(6)}
    parquet.write_table(arrow.table(columns), tmp_path / "t.parquet", row_group_size=100)
    found = trained(TableChoice(train=open_source(tmp_path / "t.parquet")), trees=5)
    assert render_model(found.model) == expected


def predicted_by(model: GbdtModel, path: Path) -> np.ndarray:
    predictor = GbdtPredictor(parse_model(render_model(model).encode(), "the model"))
    return np.concatenate([predictor.answers(block) for block in predictor.blocks(str(path), ReadAs())])


@pytest.mark.parametrize("label", [0, 3, 6, -1])
def test_rows_to_predict_have_their_label_where_training_had_it(label: int, tmp_path: Path) -> None:
    values, labels = drawn_table(300)
    np.save(tmp_path / "t.npy", np.insert(values, label % 7, labels, axis=1))
    np.save(tmp_path / "features.npy", values)
    model = trained(TableChoice(train=open_source(tmp_path / "t.npy", label=str(label))), trees=5).model
    assert model.label_index == label % 7
    for name in ("t.npy", "features.npy"):
        assert np.array_equal(predicted_by(model, tmp_path / name), predictions(model, values)), name


def test_columns_of_parquet_are_found_by_their_names(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values, labels = drawn_table(300)
    names = ["age", "y", "label", "time of day", "carrier", "target"]  # features, whatever they are called
    columns = {name: values[:, at] for at, name in enumerate(names)} | {"delayed": labels}

    def written(name: str, *chosen: str) -> Path:
        table = arrow.table({one: columns[one] for one in chosen})
        parquet.write_table(table, tmp_path / name)
        return tmp_path / name

    train = written("train.parquet", *names, "delayed")
    mixed = written("mixed.parquet", "target", "delayed", *reversed(names[:-1]))
    both = [open_source(path, label="delayed") for path in (train, mixed)]
    expected = trained(choice(values, labels, valid=ArraySource(values, labels)), trees=5)
    found = trained(TableChoice(train=both[0], valid=both[1]), trees=5)
    assert found.model.names[3] == "time_of_day"
    assert found.valid_losses == expected.valid_losses
    for path in (train, mixed, written("features.parquet", *reversed(names))):
        assert np.array_equal(predicted_by(found.model, path), predictions(expected.model, values)), path.name
    assert measure_model(found.model, both[1]) == measure_model(found.model, both[0])
    rest = trained(TableChoice(train=both[1], start=found.model), trees=2)
    assert rest.model.names == found.model.names
    assert rest.train_losses[0] < found.train_losses[-1]
    with pytest.raises(UserError, match=r"few.parquet has no column 'time_of_day', as the model has"):
        predicted_by(found.model, written("few.parquet", "age", "y", "label", "carrier", "delayed"))
    columns["time_of_day"] = labels
    twice = open_source(written("twice.parquet", "time of day", "time_of_day", "delayed"), label="delayed")
    with pytest.raises(UserError, match="columns 'time of day' and 'time_of_day' are both 'time_of_day'"):
        trained(TableChoice(train=twice))


def test_a_model_without_names_takes_parquet_by_position(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values, labels = drawn_table(300)
    model = trained(choice(values, labels), trees=5).model
    columns = {name: values[:, at] for at, name in enumerate("abcdef")}
    for name, more in (("t", {}), ("u", {"label": labels})):
        parquet.write_table(arrow.table({**columns, **more}), tmp_path / f"{name}.parquet")
        assert np.array_equal(predicted_by(model, tmp_path / f"{name}.parquet"), predictions(model, values))


def test_a_large_table_is_sampled_and_binned_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.boosting import sources, table

    values, labels = drawn_table(2_000)
    whole = trained(choice(values, labels), trees=3)
    monkeypatch.setattr(sources, "_BLOCK_ROWS", 300)
    in_blocks = trained(choice(values, labels), trees=3)
    assert render_model(in_blocks.model) == render_model(whole.model)
    monkeypatch.setattr(table, "_SAMPLE_ROWS", 500)
    sampled = table.sample_rows(ArraySource(values, labels), Holdout(), 0)
    assert 100 < sum(map(len, sampled.blocks)) <= 500
    assert sampled.rows == 2_000


def test_more_rows_than_can_be_numbered_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.boosting import table

    values, labels = drawn_table()
    monkeypatch.setattr(table, "_MOST_ROWS", 700)
    trained(choice(values, labels), trees=1)
    monkeypatch.setattr(table, "_MOST_ROWS", 699)
    with pytest.raises(UserError, match="the table has more than 699 rows"):
        trained(choice(values, labels), trees=1)


@pytest.mark.parametrize("last", [(1 << 31) - 2, 1 << 25])
def test_an_absurd_index_is_refused_before_it_fills_the_memory(last: int, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text(f"1 3:1 7:2\n2 {last}:1\n")
    with pytest.raises(UserError, match=f"rows has feature {last}, but here a model has .* columns at most"):
        trained(TableChoice(train=open_source(tmp_path / "rows")))


def test_of_sparse_rows_only_columns_with_values_and_categories_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from manyhands.boosting import table

    asked, numbers = [], table.bins_of_numbers
    monkeypatch.setattr(
        table, "bins_of_numbers", lambda column, *more: asked.append(column) or numbers(column, *more)
    )
    lines = (f"{at % 3} {3 if at % 2 else 90_000}:{at % 5} 7:{at}" for at in range(100))
    (tmp_path / "rows").write_text("\n".join(lines) + "\n")
    source = open_source(tmp_path / "rows")
    sample = table.sample_rows(source, Holdout(), 0)
    bins = sample.bins(255, frozenset({5}), "rows", threads=2)
    assert sorted(asked) == [3, 7, 90_000]
    assert [one.column for one in bins.features] == [3, 5, 7, 90_000]


BAD = {
    "labels that are no numbers": (lambda v, y: (v, np.where(y > 0, np.nan, y)), {}, "row .* has no label"),
    "nothing to split": (lambda v, y: (np.ones_like(v), y), {}, "no feature has two values"),
    "three labels": (
        lambda v, y: (v, y + (np.arange(len(y)) % 3)),
        {"objective": "binary"},
        "labels 0, 1, 2",
    ),
    "one label": (lambda v, y: (v, np.ones_like(y)), {"objective": "binary"}, "has labels 1;"),
    "lengths that differ": (lambda v, y: (v, y[:-1]), {}, "has 700 rows, but its labels have shape"),
    "no table": (lambda v, y: (v[:, 0], y), {}, r"has shape \(700,\)"),
    "text": (lambda v, y: (v.astype(str), y), {}, "a table holds numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_tables_that_make_no_sense_are_refused(name: str) -> None:
    change, options, message = BAD[name]
    with pytest.raises(UserError, match=message):
        trained(choice(*change(*drawn_table())), **options)


def test_files_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY\x01\x00")
    np.save(tmp_path / "t.npy", np.zeros((3, 2)))
    np.savez(tmp_path / "zip.npz", np.zeros((3, 2)))
    (tmp_path / "zip.npz").rename(tmp_path / "zip.npy")
    nested = b"{'descr': " + b"(" * 2000 + b"), 'fortran_order': False, 'shape': (3, 2)}\n"
    for name, head in (("deep.npy", nested), ("none.npy", nested.replace(b"(" * 2000 + b")", b"()"))):
        (tmp_path / name).write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    for name, label, message in (
        ("cut.npy", None, "the head of this npy file is damaged"),
        ("zip.npy", None, "the head of this npy file is damaged"),
        ("deep.npy", None, "the head of this npy file is damaged"),
        ("none.npy", None, "the head of this npy file is damaged"),
        ("t.npy", "9", "label=9: .* has 2 columns"),
        ("t.npy", "age", "label='age': columns of an npy file are numbers"),
        ("t.npy", "--1", "label='--1': columns of an npy file are numbers"),
        ("t.npy", "²", "label='²': columns of an npy file are numbers"),
        ("breast-cancr", None, "embedded: breast-cancer, diabetes"),
    ):
        path = name if "." not in name else tmp_path / name
        with pytest.raises(UserError, match=message):
            open_source(path, label=label)


def test_parquet_files_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    (tmp_path / "text.parquet").write_bytes(b"1 0:1")
    one = np.arange(3.0)
    for name, columns, names in (
        ("t", [one, one], ["a", "b"]),
        ("twice", [one, one, one], ["label", "a", "a"]),
        ("label", [one], ["label"]),
        ("words", [one, arrow.array(["x", "y", "z"])], ["label", "a"]),
    ):
        parquet.write_table(arrow.table(columns, names=names), tmp_path / f"{name}.parquet")
    for name, label, message in (
        ("cut", None, "is no Parquet file that can be read"),
        ("text", None, "is no Parquet file that can be read"),
        ("twice", None, "has two columns of the same name"),
        ("label", None, "has 3 rows and 0 columns"),
        ("words", None, "column 'a' is string, no number"),
        ("t", "c", "has no column 'c'"),
        ("t", "2", "has no column '2'"),
        ("t", "--1", "has no column '--1'"),
        ("t", "²", "has no column '²'"),
    ):
        with pytest.raises(UserError, match=message):
            open_source(tmp_path / f"{name}.parquet", label=label)
    (block,) = open_source(tmp_path / "t.parquet", label="-1").blocks()
    assert block.columns == 1


@pytest.mark.parametrize(
    ("strategy", "workers", "message"),
    [
        ("single", 2, "single is one process; use strategy=allreduce"),
        ("hogwild", 2, "strategy hogwild does not train gbdt"),
        ("ps", 2, "does not train gbdt; allowed: single, allreduce, mirrored"),
        ("tensor", 2, "does not train gbdt"),
        ("allreduce algorithm=ring", 2, "has no other algorithm"),
    ],
)
def test_strategies_that_do_not_grow_trees_are_refused(strategy: str, workers: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_gbdt(choice(*drawn_table()), strategy=strategy, workers=workers)


@pytest.mark.parametrize("columns", [4, 7])
def test_rows_to_measure_on_with_other_columns_are_refused(columns: int) -> None:
    values, labels = drawn_table()
    held = ArraySource(np.zeros((20, columns)), labels[:20], name="held")
    with pytest.raises(UserError, match=f"held has {columns} columns, the table 6"):
        trained(choice(values, labels, valid=held))


def test_the_weights_of_rows_held_out_do_not_change_the_trees() -> None:
    values, labels = drawn_table()
    first = choice(values, labels, valid=ArraySource(values[:50], labels[:50]))
    heavy = ArraySource(values[:50], labels[:50], weights=np.full(50, 1e12))
    plain, weighted = trained(first, trees=4), trained(replace(first, valid=heavy), trees=4)
    assert render_model(weighted.model) == render_model(plain.model)
    assert weighted.valid_losses == pytest.approx(plain.valid_losses)


@pytest.mark.parametrize("fraction", [1e-9, 0.2])
def test_rows_held_out_need_a_weight(fraction: float) -> None:
    values, labels = drawn_table()
    weights = 1.0 - Holdout(fraction=fraction).chosen(0, len(labels))
    table = TableChoice(train=ArraySource(values, labels, weights=weights), valid_fraction=fraction)
    with pytest.raises(UserError, match="no row that is held out has a weight; use a larger valid_fraction"):
        trained(table, trees=3, early_stopping=2)


def test_weights_that_leave_nothing_to_learn_are_refused() -> None:
    values, labels = drawn_table()
    one_sided = ArraySource(values, labels, weights=labels)
    with pytest.raises(UserError, match="the rows of one label have no weight"):
        trained(TableChoice(train=one_sided), objective="binary")
    for weights, message in (
        (np.zeros(700), "all rows have the weight 0"),
        (labels - 0.5, "row .* has a weight"),
    ):
        source = ArraySource(values, labels)
        source._weights = weights  # as a text file would have them
        with pytest.raises(UserError, match=message):
            trained(TableChoice(train=source))


def test_a_column_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"categorical='9': there is no such column; use numbers from 0 to 5"):
        trained(choice(*drawn_table(), categorical=("9",)))
    with pytest.raises(UserError, match="categorical='²': there is no such column"):
        trained(choice(*drawn_table(), categorical=("²",)))
    with pytest.raises(UserError, match="both given"):
        choice(*drawn_table(), valid=open_source("diabetes"), valid_fraction=0.5)
    with pytest.raises(UserError, match="train: gbdt reads rows twice or more; give a file, not stdin"):
        TableChoice(train=open_source("-"))
    with pytest.raises(UserError, match="valid: gbdt reads rows twice or more; give a file, not stdin"):
        choice(*drawn_table(), valid=open_source("-"))
    with pytest.raises(UserError, match=r"valid_fraction=1\.5"):
        choice(*drawn_table(), valid_fraction=1.5)


def test_it_predicts_as_scikit_learn_does() -> None:
    drawn = np.random.default_rng(4)
    values = drawn.integers(0, 20, (3_000, 4)).astype(float)  # few values, so that both have the same bins
    logit = values[:, 0] / 5 - (values[:, 1] - 10) ** 2 / 20 + values[:, 2] * values[:, 3] / 100
    labels = (logit + drawn.logistic(size=3_000) > 0).astype(float)
    ours = trained(choice(values, labels), trees=20).model
    peer = HistGradientBoostingClassifier(max_iter=20, early_stopping=False).fit(values, labels)
    assert np.abs(predictions(ours, values) - peer.predict_proba(values)[:, 1]).max() < 1e-4


def test_drawn_rows_are_learned_as_well_as_by_lightgbm() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    values, labels = make_hastie_10_2(12_000, random_state=1)
    targets, train, test = (labels > 0).astype(float), slice(0, 6_000), slice(6_000, None)
    ours = trained(choice(values[train], targets[train]), trees=50).model
    dataset = lightgbm.Dataset(values[train], targets[train], params={"verbose": -1})
    peer = lightgbm.train({"objective": "binary", "verbose": -1, "num_threads": 1}, dataset, 50)
    found = roc_auc_score(targets[test], predictions(ours, values[test]))
    assert found > 0.95
    assert abs(found - roc_auc_score(targets[test], peer.predict(values[test]))) < 0.002


@needs_data
def test_a9a_is_learned_as_well_as_by_lightgbm() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    train, test = open_source(DATA / "a9a.gz"), open_source(DATA / "a9a.t.gz")
    ours = trained(TableChoice(train=train), trees=60).model
    blocks = [block for block in test.blocks() if block.labels is not None]
    labels = np.concatenate([block.labels for block in blocks])
    found = roc_auc_score(labels, np.concatenate([ours.predict(block) for block in blocks]))

    def dense(source: Any) -> tuple[np.ndarray, np.ndarray]:
        parts = list(source.blocks())
        out = np.zeros((sum(map(len, parts)), 124), np.float32)
        at = 0
        for part in parts:
            which = np.repeat(np.arange(at, at + len(part)), np.diff(part.sparse.starts))
            out[which, part.sparse.indices] = part.sparse.values
            at += len(part)
        return out, np.concatenate([part.labels for part in parts])

    values, targets = dense(train)
    dataset = lightgbm.Dataset(values, (targets > 0).astype(float), params={"verbose": -1})
    peer = lightgbm.train({"objective": "binary", "verbose": -1, "num_threads": 1}, dataset, 60)
    reference = roc_auc_score(labels, peer.predict(dense(test)[0]))
    assert found > 0.903
    assert abs(found - reference) < 0.002
