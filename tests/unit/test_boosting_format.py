"""Models in LightGBM's text format: round trip, read by LightGBM itself and from it, and damaged files."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.data.row_files import Rows
from manyhands.errors import DataError, UserError
from manyhands.serving.opening import open_predictor
from manyhands.workloads.gbdt import bin_kernels
from manyhands.workloads.gbdt import model as model_module
from manyhands.workloads.gbdt.model import GbdtModel
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.row_sources import ArraySource, RowBlock
from manyhands.workloads.gbdt.text_format import (
    MODEL_TEXT,
    parse_model,
    read_model,
    render_model,
    write_model,
)
from manyhands.workloads.gbdt.training import TableChoice, train_gbdt


def table(rows: int = 800) -> tuple[np.ndarray, np.ndarray]:
    """Numbers, missing values (also where training has none: column 3), and categories (column 4)."""
    drawn = np.random.default_rng(5)
    values = drawn.normal(size=(rows, 5))
    values[:, 4] = drawn.integers(0, 70, rows)
    target = values[:, 0] + np.abs(values[:, 1]) + (values[:, 4] % 7 < 3) * 2
    values[drawn.random(rows) < 0.2, 1] = np.nan
    values[drawn.random(rows) < 0.2, 2] = np.nan
    return values, target + drawn.normal(size=rows) * 0.1


def model(objective: str = "regression", **options: Any) -> GbdtModel:
    values, target = table()
    labels = target if objective == "regression" else (target > target.mean()).astype(float)
    if objective == "multiclass":
        labels = np.digitize(target, [0.5, 1.5]).astype(float) * 3 - 3
    choice = TableChoice(train=ArraySource(values, labels), categorical=("4",))
    settings = {"trees": 12, "min_data_per_group": 10, "cat_smooth": 1.0} | options
    return train_gbdt(choice, GbdtOptions(objective=objective, **settings)).model


def odd_rows() -> np.ndarray:
    """Rows that training never saw: new categories, missing where nothing was, infinities."""
    values, _ = table()
    rows = np.concatenate([values, values[:6]])
    rows[-6:, 4] = [200, -3, np.nan, 69.7, 1e9, 0]
    rows[-6:, 3] = [np.nan, np.inf, -np.inf, 0, 1e308, np.nan]
    rows[-6:, 0] = [np.nan, np.inf, -np.inf, 0, 1e308, np.nan]
    return rows


def predicted(found: GbdtModel, rows: np.ndarray) -> np.ndarray:
    return found.predict(RowBlock(labels=None, dense=rows))


@pytest.mark.parametrize("objective", ["regression", "binary", "multiclass"])
def test_what_is_written_is_read_back_to_the_bit(objective: str, tmp_path: Path) -> None:
    made = model(objective)
    assert any(len(tree.categories) for tree in made.trees), "there are categorical splits"
    write_model(made, tmp_path / MODEL_TEXT)
    read = read_model(tmp_path)
    assert render_model(read) == render_model(made)
    assert np.array_equal(predicted(read, odd_rows()), predicted(made, odd_rows()))
    predictor = open_predictor(tmp_path / MODEL_TEXT)
    asked = [[None if math.isnan(value) else value for value in row] for row in odd_rows().tolist()]
    answers, expected = predictor.answers(predictor.inputs(asked)), predicted(made, odd_rows()).tolist()
    if objective == "multiclass":
        assert list(read.labels) == [-3, 0, 3]
        assert answers[0]["label"] == read.labels[int(np.argmax(expected[0]))]
        assert list(answers[0]["probabilities"]) == ["-3", "0", "3"]
        assert next(predictor.lines(predictor.inputs(asked))).split("\t") == [
            f"{answers[0]['label']:g}",
            *(f"{x:.17g}" for x in expected[0]),
        ]
        answers = [list(answer["probabilities"].values()) for answer in answers]
    assert answers == expected
    with pytest.raises(
        UserError, match="input 1 has 4 numbers; it must be an array of numbers, one for each column"
    ):
        predictor.inputs([asked[0], asked[0][:-1]])
    assert read.names == tuple(f"Column_{at}" for at in range(5))


@pytest.mark.parametrize("objective", ["regression", "binary", "multiclass"])
def test_lightgbm_reads_it_and_predicts_the_same(objective: str, tmp_path: Path) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    made, rows = model(objective), odd_rows()
    write_model(made, tmp_path / MODEL_TEXT)
    booster = lightgbm.Booster(model_file=str(tmp_path / MODEL_TEXT))
    assert np.allclose(booster.predict(rows), predicted(made, rows), rtol=1e-14, atol=1e-14)
    assert booster.feature_importance("split").tolist() == made.importance("split").tolist()
    assert np.allclose(booster.feature_importance("gain"), made.importance("gain"))
    assert booster.num_trees() == 12 * made.classes


@pytest.mark.parametrize(
    "parameters",
    [
        {"objective": "regression"},
        {"objective": "binary"},
        {"objective": "regression", "zero_as_missing": True},
        {"objective": "poisson"},
        {"objective": "regression_l1", "num_leaves": 4},
        {"objective": "binary", "sigmoid": 2.0},
        {"objective": "multiclass", "num_class": 3},
    ],
)
def test_models_of_lightgbm_are_read_and_predict_the_same(parameters: dict[str, Any], tmp_path: Path) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    values, target = table()
    labels = {
        "binary": (target > 1).astype(float),
        "poisson": np.exp(target / 3),
        "multiclass": np.digitize(target, [0.5, 1.5]),
    }.get(parameters["objective"], target)
    settings = {"verbose": -1, "num_threads": 1, "min_data_per_group": 10, **parameters}
    dataset = lightgbm.Dataset(values, labels, categorical_feature=[4], params={"verbose": -1})
    booster = lightgbm.train(settings, dataset, 10)
    booster.save_model(tmp_path / "lightgbm.txt")
    read = read_model(tmp_path / "lightgbm.txt")
    rows = odd_rows()
    assert np.allclose(predicted(read, rows), booster.predict(rows), rtol=1e-13, atol=1e-13)
    assert (
        parse_model(render_model(read).encode(), "again").trees[3].gain.tolist()
        == read.trees[3].gain.tolist()
    )


def test_a_random_forest_of_lightgbm_is_refused(tmp_path: Path) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    values, target = table()
    settings = {"verbose": -1, "num_threads": 1, "boosting": "rf", "bagging_fraction": 0.5, "bagging_freq": 1}
    booster = lightgbm.train(settings, lightgbm.Dataset(values, target, params={"verbose": -1}), 3)
    booster.save_model(tmp_path / "forest.txt")
    with pytest.raises(DataError, match="it is a random forest, which is not supported"):
        read_model(tmp_path / "forest.txt")


def test_sparse_rows_of_many_columns_are_predicted_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found, (values, _) = model(trees=3), table(50)
    values = np.nan_to_num(values).astype(np.float32).astype(np.float64)
    rows = Rows(
        starts=np.arange(51, dtype=np.int64) * 5,
        indices=np.tile(np.arange(5, dtype=np.int32), 50),
        values=values.astype(np.float32).reshape(-1),
        labels=np.zeros(50, np.float32),
        weights=np.ones(50, np.float32),
        size=5,
    )
    monkeypatch.setattr(model_module, "_CHUNK_NUMBERS", 35)
    made: list[int] = []
    add_trees = bin_kernels.add_trees

    def counted(dense: np.ndarray, *more: Any) -> None:
        made.append(dense.size)
        add_trees(dense, *more)

    monkeypatch.setattr(bin_kernels, "add_trees", counted)
    given = found.predict(RowBlock(labels=None, sparse=rows))
    assert made == [35] * 7 + [5]
    monkeypatch.undo()
    assert np.array_equal(given, predicted(found, values))


def text() -> str:
    return render_model(model(trees=2, num_leaves=4))


DAMAGED = {
    "nothing": (lambda _: "", "does not begin with the word tree"),
    "another file": (lambda _: "hello\n", "does not begin with the word tree"),
    "cut short": (lambda one: one[: one.index("end of trees")], "it was cut short"),
    "many classes": (
        lambda one: one.replace("num_class=1", "num_class=3"),
        "num_class is '3', which its objective 'regression' does not have",
    ),
    "classes without trees": (
        lambda one: _of_classes(one, 3),
        "it has 2 trees, which 3 classes cannot share",
    ),
    "a million classes": (lambda one: _of_classes(one, 10**6), "it must be from 2 to 1000"),
    "one class": (lambda one: _of_classes(one, 1), "it must be from 2 to 1000"),
    "labels of nothing": (lambda one: _labelled(one, '["a", "b"]'), "names 2 labels, but its objective is"),
    "too few labels": (lambda one: _labelled(_of_classes(one, 2), '["a"]'), "its labels are"),
    "labels twice": (lambda one: _labelled(_of_classes(one, 2), "[1, 1]"), "its labels are"),
    "a list of labels": (lambda one: _labelled(_of_classes(one, 2), "[[1], 2]"), "its labels are"),
    "a huge label": (lambda one: _labelled(_of_classes(one, 2), f"[1, 1{'0' * 400}]"), "its labels are"),
    "no number": (lambda one: _labelled(_of_classes(one, 2), "[1, NaN]"), "its labels are"),
    "deep labels": (lambda one: _labelled(_of_classes(one, 2), "[" * 100_000), "its labels are"),
    "one against all": (
        lambda one: one.replace("objective=regression", "objective=multiclassova num_class:3"),
        "its objective is 'multiclassova num_class:3'; supported: regression, ",
    ),
    "ranking": (lambda one: one.replace("objective=regression", "objective=lambdarank"), "its objective is"),
    "names": (lambda one: one.replace("max_feature_idx=4", "max_feature_idx=9"), "max_feature_idx is '9'"),
    "label": (lambda one: one.replace("label_index=0", "label_index=6"), "label_index is '6'"),
    "no label": (lambda one: one.replace("label_index=0", "label_index=-1"), "label_index is '-1'"),
    "feature": (lambda one: one.replace("split_feature=", "split_feature=77 ", 1), "has 4 numbers, not 3"),
    "no feature": (lambda one: _changed(one, "split_feature", "99"), "a feature outside the 5 of the model"),
    "a loop": (lambda one: _changed(one, "left_child", "0"), "must be a child exactly once"),
    "letters": (lambda one: _changed(one, "leaf_value", "x"), "must hold numbers only"),
    "nan": (lambda one: _changed(one, "leaf_value", "nan"), "holds nan"),
    "huge": (lambda one: _changed(one, "split_feature", "9" * 30), "must hold numbers only"),
    "leaves": (lambda one: one.replace("num_leaves=4", "num_leaves=-4", 1), "num_leaves is '-4'"),
    "linear": (lambda one: one.replace("is_linear=0", "is_linear=1", 1), "linear"),
    "order": (lambda one: one.replace("Tree=1", "Tree=7"), "tree 1 is called '7'"),
    "decision": (lambda one: _changed(one, "decision_type", "64"), "unknown decision_type"),
    "sets": (lambda one: _changed(one, "threshold", "99"), "categorical split without its categories"),
    "no objective": (
        lambda one: one.replace("objective=regression", "objective= "),
        "objective is 'not named'",
    ),
    "a forest": (lambda one: one.replace("objective=", "average_output\nobjective=", 1), "a random forest"),
    "sets of wrapped size": (
        lambda one: re.sub(r"num_cat=\d+", "num_cat=4", one, count=1).replace(
            "is_linear=0",
            "cat_boundaries=0 4611686018427387999 9223372036854775807 -9223372036854775803 3\n"
            "cat_threshold=1 1 1\nis_linear=0",
            1,
        ),
        "cat_boundaries do not ascend from 0",
    ),
    "infinite": (lambda one: _changed(one, "leaf_value", "inf"), "leaf_value holds inf"),
    "underlines": (lambda one: _changed(one, "threshold", "1_0"), "must hold numbers only"),
    "other digits": (lambda one: _changed(one, "threshold", "\u0663"), "must hold numbers only"),
}


def _of_classes(one: str, count: int) -> str:
    one = one.replace("num_class=1", f"num_class={count}").replace("iteration=1", f"iteration={count}")
    return one.replace("objective=regression", f"objective=multiclass num_class:{count}")


def _labelled(one: str, labels: str) -> str:
    return one.replace("pandas_categorical", f"class_labels:{labels}\npandas_categorical")


def _changed(one: str, name: str, value: str) -> str:
    """The first number of an array is another."""
    begin = one.index(f"\n{name}=") + len(name) + 2
    end = min(one.index(" ", begin), one.index("\n", begin))
    return one[:begin] + value + one[end:]


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_with_a_sentence(name: str) -> None:
    damage, message = DAMAGED[name]
    with pytest.raises(DataError, match=message) as caught:
        parse_model(damage(text()).encode(), "m.txt")
    assert str(caught.value).startswith("model m.txt is not a gradient boosting model")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_model(tmp_path / "none.txt")
    with pytest.raises(DataError, match="is not text"):
        parse_model(b"tree\n\xff\xfe", "m.txt")


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(UserError, match="rows have 3 columns; the model was trained on 5"):
        predicted(model(trees=1), np.zeros((2, 3)))
