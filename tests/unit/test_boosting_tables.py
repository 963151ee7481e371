"""What trees are grown from: files in their forms, columns, weights, rows that are held out; and what is refused."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes

from boosted import choice, drawn_table, predictions, trained
from manyhands.errors import UserError
from manyhands.workloads.gbdt import row_sources
from manyhands.workloads.gbdt.bin_table import Holdout
from manyhands.workloads.gbdt.model import GbdtModel, measure_model
from manyhands.workloads.gbdt.row_sources import ArraySource, open_source
from manyhands.workloads.gbdt.text_format import GbdtPredictor, parse_model, render_model
from manyhands.workloads.gbdt.training import TableChoice
from manyhands.workloads.predictor import ReadAs


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
    with pytest.raises(UserError, match=r"few.parquet lacks the model's column 'time_of_day'"):
        predicted_by(found.model, written("few.parquet", "age", "y", "label", "carrier", "delayed"))
    columns["time_of_day"] = labels
    twice = open_source(written("twice.parquet", "time of day", "time_of_day", "delayed"), label="delayed")
    with pytest.raises(
        UserError, match="columns 'time of day' and 'time_of_day' are both written as 'time_of_day'"
    ):
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
    from manyhands.workloads.gbdt import bin_table, row_sources

    values, labels = drawn_table(2_000)
    whole = trained(choice(values, labels), trees=3)
    monkeypatch.setattr(row_sources, "_BLOCK_ROWS", 300)
    in_blocks = trained(choice(values, labels), trees=3)
    assert render_model(in_blocks.model) == render_model(whole.model)
    monkeypatch.setattr(bin_table, "_SAMPLE_ROWS", 500)
    sampled = bin_table.sample_rows(ArraySource(values, labels), Holdout(), 0)
    assert 100 < sum(map(len, sampled.blocks)) <= 500
    assert sampled.rows == 2_000


def test_bins_beyond_the_memory_go_to_files_and_too_little_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from manyhands.workloads.gbdt import training

    values, labels = drawn_table(2_000)
    made: list[str] = []
    folder = training.tempfile.TemporaryDirectory
    monkeypatch.setattr(
        training.tempfile, "TemporaryDirectory", lambda prefix: made.append(prefix) or folder(prefix=prefix)
    )
    whole = trained(choice(values, labels), trees=3)
    assert not made
    in_files = trained(choice(values, labels), trees=3, memory_bytes=2_000 * 88 + 100)
    assert made
    assert render_model(in_files.model) == render_model(whole.model)
    with pytest.raises(
        UserError, match=r"memory=1\.0 KiB: 2,000 rows need 171\.9 KiB besides their bins; give more"
    ):
        trained(choice(values, labels), memory_bytes=1024)


def test_more_rows_than_can_be_numbered_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.workloads.gbdt import bin_table

    values, labels = drawn_table()
    monkeypatch.setattr(bin_table, "_MOST_ROWS", 700)
    trained(choice(values, labels), trees=1)
    monkeypatch.setattr(bin_table, "_MOST_ROWS", 699)
    with pytest.raises(UserError, match="the table has more than 699 rows"):
        trained(choice(values, labels), trees=1)


@pytest.mark.parametrize("last", [(1 << 31) - 2, 1 << 25])
def test_an_absurd_index_is_refused_before_it_fills_the_memory(last: int, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text(f"1 3:1 7:2\n2 {last}:1\n")
    with pytest.raises(UserError, match=f"rows has feature {last}, but a model has at most .* columns"):
        trained(TableChoice(train=open_source(tmp_path / "rows")))


def test_of_sparse_rows_only_columns_with_values_and_categories_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from manyhands.workloads.gbdt import bin_table

    asked, numbers = [], bin_table.bins_of_numbers
    monkeypatch.setattr(
        bin_table, "bins_of_numbers", lambda column, *more: asked.append(column) or numbers(column, *more)
    )
    lines = (f"{at % 3} {3 if at % 2 else 90_000}:{at % 5} 7:{at}" for at in range(100))
    (tmp_path / "rows").write_text("\n".join(lines) + "\n")
    source = open_source(tmp_path / "rows")
    sample = bin_table.sample_rows(source, Holdout(), 0)
    bins = sample.bins(255, frozenset({5}), "rows", threads=2)
    assert sorted(asked) == [3, 7, 90_000]
    assert [one.column for one in bins.features] == [3, 5, 7, 90_000]


BAD = {
    "labels that are no numbers": (lambda v, y: (v, np.where(y > 0, np.nan, y)), {}, "row .* has no label"),
    "nothing to split": (lambda v, y: (np.ones_like(v), y), {}, "no feature has two different values"),
    "three labels": (
        lambda v, y: (v, y + (np.arange(len(y)) % 3)),
        {"objective": "binary"},
        "labels 0, 1, 2",
    ),
    "one label": (lambda v, y: (v, np.ones_like(y)), {"objective": "binary"}, "all rows have label 1; a"),
    "lengths that differ": (lambda v, y: (v, y[:-1]), {}, "has 700 rows, but its labels have shape"),
    "no table": (lambda v, y: (v[:, 0], y), {}, r"has shape \(700,\)"),
    "text": (lambda v, y: (v.astype(str), y), {}, "a table must hold numbers"),
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
        ("cut.npy", None, "the header of this npy file is damaged"),
        ("zip.npy", None, "the header of this npy file is damaged"),
        ("deep.npy", None, "the header of this npy file is damaged"),
        ("none.npy", None, "the header of this npy file is damaged"),
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
        ("times", [one, one.astype("datetime64[s]")], ["label", "a"]),
    ):
        parquet.write_table(arrow.table(columns, names=names), tmp_path / f"{name}.parquet")
    for name, label, message in (
        ("cut", None, "is not a Parquet file that can be read"),
        ("text", None, "is not a Parquet file that can be read"),
        ("twice", None, "has two columns called 'a'"),
        ("label", None, "has 3 rows and 0 columns"),
        ("times", None, "column 'a' is timestamp.* neither numbers nor text"),
        (
            "t",
            None,
            "has no column called label, target or y; name the column of labels with --target: 'a', 'b'",
        ),
        ("t", "c", "has no column 'c'"),
        ("t", "2", "has no column '2'"),
        ("t", "--1", "has no column '--1'"),
        ("t", "²", "has no column '²'"),
    ):
        with pytest.raises(UserError, match=message):
            next(iter(open_source(tmp_path / f"{name}.parquet", label=label).blocks()))
    (block,) = open_source(tmp_path / "t.parquet", label="-1").blocks()
    assert block.columns == 1


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
    with pytest.raises(UserError, match="no held-out row has a positive weight; use a larger valid_fraction"):
        trained(table, trees=3, early_stopping=2)


def test_weights_that_leave_nothing_to_learn_are_refused() -> None:
    values, labels = drawn_table()
    one_sided = ArraySource(values, labels, weights=labels)
    with pytest.raises(UserError, match="the rows of one label have no weight"):
        trained(TableChoice(train=one_sided), objective="binary")
    for weights, message in (
        (np.zeros(700), "all rows have weight 0"),
        (labels - 0.5, "the weight of row .* must be"),
    ):
        source = ArraySource(values, labels)
        source._weights = weights  # as a text file would have them
        with pytest.raises(UserError, match=message):
            trained(TableChoice(train=source))


@pytest.mark.parametrize("kept_elsewhere", [False, True])
def test_embedded_tables_are_those_of_scikit_learn(
    kept_elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept_elsewhere:
        monkeypatch.setattr(row_sources, "bundled_file", lambda *_: None)
    cancer, diabetes = load_breast_cancer(), load_diabetes(scaled=False)
    wanted = {
        "breast-cancer": (
            cancer.data,
            cancer.target,
            [one.replace(" ", "_") for one in cancer.feature_names],
        ),
        "diabetes": (diabetes.data, diabetes.target, diabetes.feature_names),
    }
    for name, (values, labels, names) in wanted.items():
        source = open_source(name)
        (block,) = source.blocks()
        assert np.array_equal(block.values, values)
        assert np.array_equal(block.labels, labels)
        assert list(source.names) == names


def test_a_column_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"categorical='9': no such column; use numbers 0 to 5"):
        trained(choice(*drawn_table(), categorical=("9",)))
    with pytest.raises(UserError, match="categorical='²': no such column"):
        trained(choice(*drawn_table(), categorical=("²",)))
    with pytest.raises(UserError, match="both given"):
        choice(*drawn_table(), valid=open_source("diabetes"), valid_fraction=0.5)
    with pytest.raises(UserError, match="train: gbdt reads its rows more than once; give a file, not stdin"):
        TableChoice(train=open_source("-"))
    with pytest.raises(UserError, match="valid: gbdt reads its rows more than once; give a file, not stdin"):
        choice(*drawn_table(), valid=open_source("-"))
    with pytest.raises(UserError, match=r"valid_fraction=1\.5"):
        choice(*drawn_table(), valid_fraction=1.5)
