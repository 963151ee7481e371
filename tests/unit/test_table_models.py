"""Models of tables with texts: what they learn, what they keep in their files, and what they say of other rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boosted import trained
from manyhands.data.row_files import Reading
from manyhands.data.table_files import TableReading
from manyhands.errors import DataError, UserError
from manyhands.serving.opening import open_predictor
from manyhands.workloads.gbdt.model import measure_model
from manyhands.workloads.gbdt.row_sources import open_source
from manyhands.workloads.gbdt.text_format import parse_model, read_model, render_model, write_model
from manyhands.workloads.gbdt.training import TableChoice
from manyhands.workloads.logreg.example_tables import open_examples
from manyhands.workloads.logreg.model import LogregModel, TableRowPredictor
from manyhands.workloads.logreg.options import LogregOptions
from manyhands.workloads.logreg.training import train_logreg
from manyhands.workloads.predictor import ReadAs
from manyhands.workloads.svd.model import SvdModel, SvdPredictor, opened_rows
from manyhands.workloads.svd.options import SvdOptions
from manyhands.workloads.svd.training import train_svd

pandas = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")
pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'manyhands[tables]'")

CITIES = np.array(["Oslo", "Rome", "Bonn", "Lima", "Pisa", "Kiel"])


def people(rows: int = 600, seed: int = 0) -> Any:
    """Whether somebody is happy: by the city, by the age, which is missing at times, and by nothing else."""
    draw = np.random.default_rng(seed)
    city, age = draw.integers(0, 6, rows), draw.normal(40, 12, rows).round(1)
    score = np.where(city % 2, 1.5, -1.5) + (age - 40) / 12
    happy = draw.random(rows) < 1 / (1 + np.exp(-score))
    return pandas.DataFrame(
        {
            "id": [f"p{at}" for at in range(rows)],
            "age": np.where(draw.random(rows) < 0.1, np.nan, age),
            "home town": CITIES[city],
            "happy": np.where(happy, "yes", "no"),
        }
    )


def written(folder: Path, table: Any, name: str = "people.csv") -> Path:
    table.to_csv(folder / name, index=False)
    return folder / name


READING = TableReading(drop=("id",))


def grown(data: Any, **options: Any) -> Any:
    source = open_source(data, label="happy", table=READING)
    return trained(TableChoice(train=source), trees=8, min_data_in_leaf=5, **options).model


def predicted(predictor: Any, data: Any, **read_as: Any) -> Any:
    blocks = predictor.blocks(data, ReadAs(**read_as))
    return np.array([float(line.split()[-1]) for block in blocks for line in predictor.lines(block)])


def test_trees_of_every_form_are_the_same_and_those_of_lightgbm_predict_the_same(tmp_path: Path) -> None:
    table = people()
    table.to_parquet(tmp_path / "people.parquet")
    model = grown(written(tmp_path, table))
    for data in (table, polars.from_pandas(table), tmp_path / "people.parquet"):
        assert render_model(grown(data)) == render_model(model)
    write_model(model, tmp_path / "model.txt")
    found = predicted(
        open_predictor(tmp_path / "model.txt"), written(tmp_path, people(50, seed=1), "new.csv")
    )
    assert len(np.unique(found)) > 10
    lightgbm = pytest.importorskip("lightgbm")
    booster, rows = lightgbm.Booster(model_file=str(tmp_path / "model.txt")), people(50, seed=1)
    features = rows[["age", "home town"]].astype({"home town": "category"})
    np.testing.assert_allclose(found, booster.predict(features), rtol=1e-12)


def test_rows_to_predict_are_found_by_name_and_new_categories_count_as_missing(tmp_path: Path) -> None:
    model = parse_model(render_model(grown(people())).encode(), "the model")
    write_model(model, tmp_path / "model.txt")
    predictor = open_predictor(tmp_path / "model.txt")
    rows = people(40, seed=2)
    expected = predicted(predictor, rows)
    assert predictor.new_texts == 0
    mixed = rows[["happy", "home town", "id", "age"]].assign(more=1)
    np.testing.assert_array_equal(predicted(predictor, written(tmp_path, mixed)), expected)
    unknown = rows.assign(**{"home town": "Atlantis"})
    missing = rows.assign(**{"home town": None})
    np.testing.assert_array_equal(predicted(predictor, unknown), predicted(predictor, missing))
    predicted(predictor, unknown)
    assert predictor.new_texts == 40
    with pytest.raises(DataError, match=r"lacks the model's column 'home town'"):
        predicted(predictor, rows.drop(columns="home town"))
    answers = predictor.answers(predictor.inputs([[30.5, "Rome"], [None, "Atlantis"]]))
    assert [one["probabilities"]["yes"] for one in answers] == pytest.approx(
        predicted(predictor, pandas.DataFrame({"age": [30.5, None], "home town": ["Rome", None]}))
    )
    with pytest.raises(DataError, match="input 1 has '7' in column 'home town'; it must be a text or null"):
        predictor.inputs([[1, "Rome"], [1, 7]])


def test_rows_to_measure_on_have_the_categories_of_training(tmp_path: Path) -> None:
    few = people(40, seed=3).query("`home town` in ('Rome', 'Pisa')")  # other numbers for the same cities
    train = open_source(people(), label="happy", table=READING)
    valid = open_source(few, label="happy", table=READING)
    result = trained(TableChoice(train=train, valid=valid), trees=8, min_data_in_leaf=5)
    measured = measure_model(result.model, valid)
    assert measured["log_loss"] == pytest.approx(result.valid_losses[-1])
    assert measured["accuracy"] > 0.6


def test_models_of_texts_that_make_no_sense_are_refused() -> None:
    text = render_model(grown(people()))
    for old, new, sentence in (
        ('"names": ["age", ', '"names": ["age", "b", ', "describes 3 columns, but has 2 features"),
        ('{"home town"', '{"town"', "its categories belong to columns that it does not have"),
        ("table_columns:{", "table_columns:[", "is not a gradient boosting model"),
    ):
        assert old in text
        with pytest.raises(DataError, match=sentence):
            parse_model(text.replace(old, new).encode(), "the model")


def one_hot(table: Any) -> Any:
    cities = [(table["home town"] == city).to_numpy(float) for city in sorted(CITIES)]
    return np.column_stack([table["age"].fillna(0), *cities]).astype(np.float32)


def test_a_regression_of_a_table_is_that_of_its_features(tmp_path: Path) -> None:
    table, options = people(), LogregOptions(passes=3, learner="sgd")
    found = train_logreg(open_examples(table, table=TableReading(label="happy", drop=("id",))), options)
    lines = [
        f"{int(label == 'yes')} " + " ".join(f"{at}:{float(x)!r}" for at, x in enumerate(row) if x)
        for label, row in zip(table["happy"], one_hot(table), strict=True)
    ]
    (tmp_path / "rows").write_text("\n".join(lines) + "\n")
    expected = train_logreg(tmp_path / "rows", options)
    np.testing.assert_array_equal(found.model.table, expected.model.table)
    found.model.save(tmp_path / "model.safetensors")
    model, path = LogregModel.load(tmp_path), written(tmp_path, people(50, seed=1))
    assert model.evaluate(model.file(path)) == found.model.evaluate(found.model.file(people(50, seed=1)))
    predictor = open_predictor(tmp_path / "model.safetensors")
    assert isinstance(predictor, TableRowPredictor)
    margins = one_hot(people(50, seed=1)).astype(float) @ model.weight + model.bias
    np.testing.assert_allclose(predicted(predictor, path), 1 / (1 + np.exp(-margins)), rtol=1e-4)
    answers = predictor.answers(predictor.inputs([[50.0, "Rome"], [None, "Atlantis"]]))
    weight = model.weight[0] * 50 + model.weight[1 + sorted(CITIES).index("Rome")] + model.bias
    chances = [one["probabilities"]["yes"] for one in answers]
    assert chances == pytest.approx([1 / (1 + np.exp(-weight)), 1 / (1 + np.exp(-model.bias))], rel=1e-5)
    assert [one["label"] for one in answers] == ["yes" if chance >= 0.5 else "no" for chance in chances]
    assert all(sum(one["probabilities"].values()) == pytest.approx(1) for one in answers)


def test_a_regression_of_npy_leaves_the_label_out_of_rows_to_predict(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    values = draw.normal(size=(200, 3))
    labels = (values[:, 1] > 0).astype(float)
    np.save(tmp_path / "t.npy", np.insert(values, 2, labels, axis=1))
    np.save(tmp_path / "features.npy", values)
    np.save(tmp_path / "few.npy", values[:, :2])
    model = train_logreg(open_examples(tmp_path / "t.npy", table=TableReading(label="2"))).model
    assert model.evaluate(model.file(tmp_path / "t.npy")).accuracy > 0.9
    predictor = TableRowPredictor(model)
    both = [predicted(predictor, tmp_path / name) for name in ("t.npy", "features.npy")]
    np.testing.assert_array_equal(*both)
    with pytest.raises(DataError, match="has 2 columns; the model was trained on 3"):
        predicted(predictor, tmp_path / "few.npy")


def test_what_a_regression_cannot_take_of_a_table_is_said(tmp_path: Path) -> None:
    table = people(20)
    with pytest.raises(UserError, match="bits=4: the columns of a table are not hashed; leave it out"):
        train_logreg(table, reading=Reading(bits=4))
    table.loc[3, "age"] = 1e39
    with pytest.raises(DataError, match=r"row 4, column 'age': 1e\+39 is beyond single precision"):
        train_logreg(open_examples(table, table=TableReading(label="happy")))
    table.loc[3, "age"] = np.inf
    with pytest.raises(DataError, match="row 4, column 'age': 'inf' is not a finite number"):
        train_logreg(open_examples(table, table=TableReading(label="happy")))


def test_a_decomposition_of_a_table_is_that_of_its_features(tmp_path: Path) -> None:
    table = people()
    table["age"] = table["age"].fillna(40)
    reading = TableReading(drop=("id", "happy"))
    result = train_svd(opened_rows(written(tmp_path, table), reading), SvdOptions(rank=3))
    expected = np.linalg.svd(one_hot(table).astype(float), compute_uv=False)[:3]
    np.testing.assert_allclose(result.model.singular_values, expected, rtol=1e-6)
    result.model.save(tmp_path / "svd.safetensors")
    model = SvdModel.load(tmp_path)
    predictor, rows = SvdPredictor(model), people(30, seed=1)
    rows["age"] = rows["age"].fillna(40)
    np.testing.assert_allclose(
        np.concatenate(list(predictor.blocks(rows, ReadAs()))),
        one_hot(rows).astype(float) @ model.components.T,
        atol=1e-9,
    )
    answers = predictor.answers(predictor.inputs([[float(rows["age"][0]), rows["home town"][0]]]))
    np.testing.assert_allclose(answers[0], (one_hot(rows)[0] @ model.components.T).tolist(), rtol=1e-6)
    holes = rows.assign(age=np.where(np.arange(30) == 4, np.nan, rows["age"]))
    with pytest.raises(DataError, match="row 5, column 'age': the value is missing"):
        list(predictor.blocks(holes, ReadAs()))
    assert sum(map(len, predictor.blocks(holes, ReadAs(skip_bad=True)))) == 29
    assert predictor.left_out == 1
    with pytest.raises(DataError, match="row 1, column 'home town': the value 'Atlantis' is new"):
        list(predictor.blocks(rows.assign(**{"home town": "Atlantis"}), ReadAs()))


def test_numbers_of_a_table_are_decomposed_in_double_precision(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(300, 5)) * [1, 2, 3, 4, 5] + 1e5
    written(tmp_path, pandas.DataFrame(values, columns=list("abcde")), "t.csv")
    model = train_svd(tmp_path / "t.csv", SvdOptions(rank=2, center=True)).model
    expected = np.linalg.svd(values - values.mean(axis=0), compute_uv=False)[:2]
    np.testing.assert_allclose(model.singular_values, expected, rtol=1e-8)


def test_a_model_without_texts_says_which_value_is_no_number(tmp_path: Path) -> None:
    table = people()[["age", "happy"]]
    model = grown_on(table, tmp_path)
    table.loc[2, "age"] = 1
    rows = table.astype({"age": object})
    rows.loc[7, "age"] = "old"
    written(tmp_path, rows, "rows.csv")
    with pytest.raises(DataError, match=r"rows.csv, row 8, column 'age': 'old' is not a number"):
        predicted(model, tmp_path / "rows.csv")
    assert len(predicted(model, tmp_path / "rows.csv", skip_bad=True)) == 599
    assert model.left_out == 1


def grown_on(table: Any, folder: Path) -> Any:
    source = open_source(table, label="happy")
    write_model(trained(TableChoice(train=source), trees=3).model, folder / "model.txt")
    assert read_model(folder / "model.txt").encoding is None
    return open_predictor(folder / "model.txt")


def test_a_label_that_single_precision_does_not_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n1,20230002\n2,20230004\n3,20230003\n4,20230002\n")
    with pytest.raises(DataError, match=r"t.csv, row 3: label 20230003 is beyond single precision; number"):
        train_logreg(tmp_path / "t.csv")


def test_rows_to_measure_on_may_have_any_other_columns(tmp_path: Path) -> None:
    table = people().assign(when=pandas.Timestamp("2024-01-01"))
    table.to_parquet(tmp_path / "t.parquet")
    asked = TableReading(label="happy", drop=("id", "when"))
    model = train_logreg(open_examples(tmp_path / "t.parquet", table=asked)).model
    both = [model.evaluate(model.file(data)) for data in (tmp_path / "t.parquet", people())]
    assert both[0] == both[1]
