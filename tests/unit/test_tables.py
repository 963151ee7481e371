"""One reader of tables for all: CSV, Parquet, Arrow and DataFrames give the same rows, and say what is wrong."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.data.table_encoding import TableEncoding
from manyhands.data.table_files import SparseTable, TableMatrix, TableReading, open_matrix, open_table
from manyhands.errors import DataError, UserError
from manyhands.workloads.gbdt.row_sources import open_source
from manyhands.workloads.logreg.example_tables import open_examples

pandas = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")
pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'manyhands[tables]'")

TEXT = """age,city,note,label
31,Oslo,"a, quoted",yes
,Rome,"two
lines",no
44.5,,NA,yes
-1e2,Oslo,"say ""hi""\",no
"""
AGES = [31.0, np.nan, 44.5, -100.0]
CODES = [0.0, 1.0, np.nan, 0.0]  # Oslo before Rome
NOTES = [0.0, 2.0, np.nan, 1.0]


def frame() -> Any:
    return pandas.read_csv(io.StringIO(TEXT))


def as_csv(folder: Path, text: str | bytes = TEXT, name: str = "t.csv") -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


def as_parquet(folder: Path) -> Path:
    frame().to_parquet(folder / "t.parquet", row_group_size=2)
    return folder / "t.parquet"


FORMS: dict[str, Any] = {
    "csv": as_csv,
    "gzip": lambda folder: as_csv(folder, gzip.compress(TEXT.encode()), "t.csv.gz"),
    "by its first line": lambda folder: as_csv(folder, TEXT, "table"),
    "semicolons": lambda folder: as_csv(
        folder, TEXT.replace("a, quoted", "a. quoted").replace(",", ";").replace("a. quoted", "a, quoted")
    ),
    "byte order mark": lambda folder: as_csv(folder, "\ufeff" + TEXT),
    "carriage returns": lambda folder: as_csv(folder, TEXT.replace("\n", "\r\n").replace("two\r\n", "two\n")),
    "parquet": as_parquet,
    "pandas": lambda folder: frame(),
    "categories of pandas": lambda folder: frame().astype({"city": "category", "label": "category"}),
    "objects of pandas": lambda folder: frame().astype({"city": object, "age": object}),
    "polars": lambda folder: polars.from_pandas(frame()),
    "categories of polars": lambda folder: polars.from_pandas(frame()).with_columns(
        polars.col("city").cast(polars.Categorical)
    ),
    "arrow": lambda folder: pyarrow.Table.from_pandas(frame()),
}


def rows_of(table: TableMatrix, block_bytes: int = 1 << 20) -> tuple[Any, Any]:
    blocks = list(table.blocks(block_bytes))
    assert [block.begin for block in blocks] == np.cumsum([0, *map(len, blocks)])[:-1].tolist()
    labels = [block.labels for block in blocks if block.labels is not None]
    return np.concatenate([block.rows for block in blocks]), np.concatenate(labels) if labels else None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_every_form_of_a_table_gives_the_same_rows(form: str, block_bytes: int, tmp_path: Path) -> None:
    table = open_table(FORMS[form](tmp_path))
    values, labels = rows_of(table, block_bytes)
    np.testing.assert_array_equal(values, np.column_stack([AGES, CODES, NOTES]))
    assert labels.tolist() == [1, 0, 1, 0]
    found = table.encoding
    assert found.names == ("age", "city", "note")
    assert found.categories["city"] == ("Oslo", "Rome")
    assert found.classes == ("no", "yes")
    assert (found.label, found.label_index) == ("label", 3)


def test_an_encoding_is_stored_and_applied_to_other_rows(tmp_path: Path) -> None:
    found = TableEncoding.from_json(open_table(frame()).encoding.to_json())
    text = "extra,city,age,note\n9,Rome,1,\n9,Bergen,2,x\n9,Oslo,3,x\n"
    table = open_table(as_csv(tmp_path, text), TableReading(labelled=False), scanned=False).encoded(
        found, labelled=False
    )
    values, labels = rows_of(table)
    np.testing.assert_array_equal(values, [[1, 1, np.nan], [2, np.nan, np.nan], [3, 0, np.nan]])
    assert labels is None
    assert table.new_texts == 3  # Bergen, and x twice: as missing
    other = open_table(as_csv(tmp_path, "city,age\nRome,1\n"), TableReading(labelled=False), scanned=False)
    with pytest.raises(DataError, match=r"t\.csv lacks the model's column 'note'; .* age"):
        other.encoded(found, labelled=False)


@pytest.mark.parametrize(
    "wrong",
    [
        "[]",
        "{}",
        '{"names": ["a"]}',
        TableEncoding(names=("a", "a")).to_json(),
        TableEncoding(names=()).to_json(),
        TableEncoding(names=("a",), categories={"b": ("x",)}).to_json(),
        TableEncoding(names=("a",), label_index=2).to_json(),
        TableEncoding(names=("a",)).to_json().replace("true", "1"),
        TableEncoding(names=("a",)).to_json().replace('"a"', "3"),
    ],
)
def test_an_encoding_that_makes_no_sense_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"its|the column"):
        TableEncoding.from_json(wrong)


def test_a_linear_model_has_a_feature_for_every_category() -> None:
    (block,) = SparseTable(open_table(frame())).blocks()
    found = block.dense(6)
    expected = [[31, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 1], [44.5, 0, 0, 0, 0, 0], [-100, 1, 0, 0, 1, 0]]
    np.testing.assert_array_equal(found, expected)
    assert block.rows.labels.tolist() == [1, 0, 1, 0]
    assert not (block.rows.values == 0).any()


def test_a_table_without_names_is_read_by_places(tmp_path: Path) -> None:
    table = open_table(as_csv(tmp_path, "1,10,3\n0,20,b\n0,,3\n"), TableReading(label="0"))
    np.testing.assert_array_equal(rows_of(table)[0], [[10, 0], [20, 1], [np.nan, 0]])
    assert not table.encoding.is_named
    for text in ("7,5,3\n7,5,b\n", "5,3\n5,b\n"):  # with a label, and without
        other = open_table(as_csv(tmp_path, text), TableReading(labelled=False), scanned=False).encoded(
            table.encoding, labelled=False
        )
        assert rows_of(other)[0].tolist() == [[5, 0], [5, 1]], text
    with pytest.raises(DataError, match="has 4 columns; the model was trained on 2 and a label"):
        open_table(as_csv(tmp_path, "1,2,3,4\n"), TableReading(labelled=False), scanned=False).encoded(
            table.encoding, labelled=False
        )


def test_columns_are_dropped_and_made_categories_by_name(tmp_path: Path) -> None:
    path = as_csv(tmp_path, "id,zip,y\nq,0150,1\nr,9000,0\ns,0150,1\n")
    table = open_table(path, TableReading(categorical=("zip",), drop=("id",)))
    assert rows_of(table)[0].tolist() == [[0], [1], [0]]
    assert table.encoding.categories == {"zip": ("0150", "9000")}
    with pytest.raises(DataError, match=r"drop: .* has no column 'ID'; allowed: id, zip, y"):
        open_table(path, TableReading(drop=("ID",)))


ROWS = [f"{at},Oslo,yes" for at in range(1, 101)]


def changed(**rows: str) -> bytes:
    lines = list(ROWS)
    for place, text in rows.items():
        lines[int(place[1:]) - 1] = text
    return ("age,city,label\n" + "\n".join(lines) + "\n").encode("latin-1")


WRONG: dict[str, tuple[bytes, str]] = {
    "too few fields": (changed(r3="3,Oslo"), "t.csv, row 3 has 2 fields, but there are 3 columns"),
    "too many fields": (changed(r7="3,Oslo,yes,no"), "t.csv, row 7 has 4 fields, but there are 3 columns"),
    "another encoding": (
        changed(r5="5,Tromsø,yes"),
        "row 5, column 'city': 'Troms\ufffd' is not UTF-8 text",
    ),
    "no number": (changed(r9="nine,Oslo,yes"), "row 9, column 'age': 'nine' is not a number"),
    "underscores": (changed(r9="1_000,Oslo,yes"), "row 9, column 'age': '1_000' is not a number"),
    "no label": (changed(r2="2,Oslo,"), "row 2, column 'label': the label is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_row_and_column_or_left_out(name: str, tmp_path: Path) -> None:
    content, sentence = WRONG[name]
    for path in (as_csv(tmp_path, content), as_csv(tmp_path, gzip.compress(content), "t.csv.gz")):
        with pytest.raises(DataError, match=sentence.replace("t.csv", path.name)) as said:
            rows_of(open_table(path))
        assert "--skip-bad" in str(said.value)
        table = open_table(path, TableReading(skip_bad=True))
        for _ in range(2):  # the count is of one reading
            assert len(rows_of(table)[0]) == 99
            assert table.left_out == 1


def test_rows_are_counted_with_those_left_out_before_them(tmp_path: Path) -> None:
    content = changed(r3="3,Oslo", r4="4", r9="nine,Oslo,yes", r20="20,Oslo,")
    with pytest.raises(DataError, match="row 3 has 2 fields"):
        rows_of(open_table(as_csv(tmp_path, content)))
    table = open_table(as_csv(tmp_path, content), TableReading(skip_bad=True))
    assert len(rows_of(table)[0]) == 96
    assert table.left_out == 4


def test_a_label_that_is_new_is_said(tmp_path: Path) -> None:
    train = open_table(as_csv(tmp_path, "a,label\n1,cat\n2,dog\n"))
    test = open_table(as_csv(tmp_path, "a,label\n1,cat\n2,cow\n", "u.csv")).encoded(
        train.encoding, labelled=True
    )
    with pytest.raises(
        DataError, match="row 2, column 'label': the label 'cow' is new; those of training are cat, dog"
    ):
        rows_of(test)


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        ([1, {"a": 2}], "row 2, column 'x' holds an object of type dict"),
        ([None, [1]], "row 2, column 'x' holds an object of type list"),
        (["a", 2.5], "row 2, column 'x' holds a number after a text"),
        ([1, None, "a"], "row 3, column 'x' holds a text after a number"),
    ],
)
def test_a_dataframe_with_objects_is_refused(column: list[Any], sentence: str) -> None:
    table = pandas.DataFrame({"x": pandas.Series(column, dtype=object), "y": np.arange(len(column))})
    with pytest.raises(DataError, match=sentence):
        open_table(table)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "has no header and no rows"),
        (b"a,label\n", "has a header and no rows"),
        (b"a,a,label\n1,2,3\n", "has two columns called 'a'; give each a name of its own"),
        (
            b"a,b\n1,2\n",
            "has no column called label, target or y; name the column of labels with --target: 'a', 'b'",
        ),
        (b"\xff\xfea\0", "is UTF-16 text; save it as UTF-8"),
        (b"n\xf8,label\n1,2\n", r"row 0 \(the header\), byte 1: not UTF-8"),
        (gzip.compress(TEXT.encode() * 50)[:-30], "truncated|cannot be read"),
        (b'a,"two\nlines",label\n1,2,3\n', r"row 0 \(the header\): unexpected end of data; write each name"),
        (b"a,label\n1\n1,2,3\n", "row 1 has 1 fields, but there are 2 columns"),
        (b'a,label\n1,2\n"3,4\n5,6\n', "row 2: a quote is not closed, so the row goes on to the end"),
        (b'a,label\n1,"' + b"x\n" * (1 << 20), "has a row of more than 1.0 MiB, as one whose quote is not"),
    ],
)
def test_files_that_are_no_tables_are_refused(content: bytes, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        rows_of(open_table(as_csv(tmp_path, content)))


@pytest.mark.parametrize("labels", [("cat", "dog"), (1.0, 2.0)])
def test_a_label_of_no_class_is_a_bad_row(labels: tuple[Any, ...], tmp_path: Path) -> None:
    words = [*labels, "cow" if labels == ("cat", "dog") else 7, labels[0]]
    path = as_csv(tmp_path, "a,label\n" + "".join(f"{at},{word}\n" for at, word in enumerate(words)))
    test = open_table(path)
    known = ", ".join(f"{one:g}" if isinstance(one, float) else one for one in labels)
    with pytest.raises(DataError, match=f"row 3, column 'label': the label '.*' is new; .* {known}; correct"):
        rows_of(test.encoded(test.encoding, labelled=True, labels=labels))
    skipping = open_table(path, TableReading(skip_bad=True)).encoded(
        test.encoding, labelled=True, labels=labels
    )
    (block,) = skipping.blocks()
    assert block.labels is not None
    assert [labels[int(one)] if labels[0] == "cat" else one for one in block.labels] == [*labels, labels[0]]
    assert skipping.left_out == 1


def test_rows_after_an_open_quote_are_not_left_out_in_silence(tmp_path: Path) -> None:
    path = as_csv(tmp_path, 'a,b,label\n1,2,3\n4,"5,6\n7,8,9\n')
    with pytest.raises(DataError, match="row 2: a quote is not closed"):
        rows_of(open_table(path, TableReading(skip_bad=True)))


def test_texts_of_rows_that_are_left_out_are_not_counted_as_new(tmp_path: Path) -> None:
    train = open_table(as_csv(tmp_path, "a,b,label\n1,x,1\n2,y,2\n"))
    path = as_csv(tmp_path, b"a,b,label\n" + b"1,new,1\n2,K\xf8ln,2\nfour,new,1\n5,x,2\n" * 9, "u.csv")
    found = open_table(path, TableReading(skip_bad=True)).encoded(train.encoding, labelled=True)
    assert sum(map(len, found.blocks())) == 18
    assert (found.left_out, found.new_texts) == (18, 9)


def test_a_column_is_text_by_its_first_rows_and_later_texts_are_wrong(tmp_path: Path) -> None:
    lines = [f"{at},{at % 2}" for at in range(1, 500_001)] + ["many,1"]
    path = as_csv(tmp_path, "n,label\n" + "\n".join(lines) + "\n")
    assert path.stat().st_size > 1 << 22
    with pytest.raises(DataError, match="row 500001, column 'n': 'many' is not a number"):
        rows_of(open_table(path))


def test_rows_that_must_be_complete_or_finite_are_looked_at() -> None:
    table = pandas.DataFrame({"a": [1.0, np.inf, np.nan, 2.0], "b": ["x", "y", "x", None]})
    for needs, kept in (({}, 4), ({"finite": True}, 3), ({"complete": True}, 1)):
        reading = TableReading(labelled=False, skip_bad=True, **needs)
        opened = open_matrix(table, reading=reading)
        assert sum(map(len, opened.blocks())) == kept
        assert opened.left_out == 4 - kept
    with pytest.raises(DataError, match="row 2, column 'a': 'inf' is not a finite number"):
        list(open_matrix(table, reading=TableReading(labelled=False, finite=True)).blocks())
    with pytest.raises(DataError, match="row 2, column 'a': the value is missing"):
        list(
            open_matrix(
                table.drop(1).reset_index(), reading=TableReading(labelled=False, complete=True)
            ).blocks()
        )


@pytest.mark.parametrize("form", ["csv", "parquet", "pandas"])
@pytest.mark.parametrize("asked", ["zip", "0"])
def test_columns_that_are_asked_to_be_text_are_in_every_form(form: str, asked: str, tmp_path: Path) -> None:
    table = pandas.DataFrame({"y": [1, 0, 1], "zip": [150, 9000, 150], "x": [1.5, 2.5, 3.5]})
    table.to_csv(tmp_path / "t.csv", index=False)
    table.to_parquet(tmp_path / "t.parquet")
    data = table if form == "pandas" else tmp_path / f"t.{form}"
    found = open_table(data, TableReading(categorical=(asked,)))  # a number is that of a feature
    assert found.encoding.categories == {"zip": ("150", "9000")}
    assert rows_of(found)[0].tolist() == [[0, 1.5], [1, 2.5], [0, 3.5]]
    with pytest.raises(UserError, match="categorical='2': no such column; use names zip, x, … or numbers 0"):
        open_table(data, TableReading(categorical=("2",)))


@pytest.mark.parametrize("option", ["drop", "categorical"])
@pytest.mark.parametrize("name", ["m.npy", "m.svm"])
def test_columns_of_what_is_no_table_are_not_ignored(option: str, name: str, tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.eye(3))
    (tmp_path / "m.svm").write_text("1 0:1\n0 1:1\n")
    reading = TableReading(**{option: ("1",)}, labelled=False)
    for opened in (
        lambda: open_matrix(tmp_path / name, reading=reading),
        lambda: open_examples(tmp_path / name, table=reading),
        lambda: open_source(tmp_path / name, table=TableReading(drop=("1",))),
    ):
        with pytest.raises(UserError, match=f"='1': .*{name} is no table .CSV, Parquet, a DataFrame.; leave"):
            opened()
    with pytest.raises(UserError, match="label='1': in text files the label is the first word of a line"):
        open_examples(tmp_path / "m.svm", table=TableReading(label="1"))


def test_a_ragged_row_of_another_encoding_is_said_and_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = as_csv(tmp_path, changed(r5="5,Tromsø,yes,no"))
    with pytest.raises(DataError, match=r"t\.csv, row 5 has 4 fields, but there are 3 columns"):
        rows_of(open_table(path))
    table = open_table(path, TableReading(skip_bad=True))
    assert len(rows_of(table)[0]) == 99
    assert table.left_out == 1
    assert not capfd.readouterr().err


def test_characters_of_several_bytes_may_be_where_blocks_end(tmp_path: Path) -> None:
    names = ["Tromsø", "Łódź", "東京", "🙂🙂"]
    text = "city,label\n" + "".join(f"{names[at % 4]},{at % 2}\n" for at in range(120_000))
    path = as_csv(tmp_path, text)
    assert path.stat().st_size > 1 << 20
    table = open_table(path)
    assert table.encoding.categories == {"city": tuple(sorted(names))}
    assert len(rows_of(table)[0]) == 120_000


def test_gzip_that_is_damaged_inside_is_refused(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).integers(0, 10**9, (200_000, 2))
    packed = bytearray(gzip.compress("\n".join(["a,label", *(f"{a},{b}" for a, b in drawn)]).encode(), 1))
    for at in (len(packed) // 2, len(packed) * 3 // 4, len(packed) - 200):
        damaged = packed.copy()
        damaged[at : at + 64] = bytes(64 * [255])
        with pytest.raises(DataError, match=r"t\.csv\.gz cannot be read"):
            rows_of(open_table(as_csv(tmp_path, bytes(damaged), "t.csv.gz")))


@pytest.mark.parametrize(
    ("first", "names", "rows"),
    [
        ("5.1,,0", ("Column_0", "Column_1"), 2),  # one is missing
        ("0,1,2", ("0", "1"), 1),  # a DataFrame of an array
        (",0,1,2", ("Column_0", "0", "1"), 1),
        ("a,,0", ("a", "Column_1"), 1),
    ],
)
def test_a_first_line_of_numbers_is_a_row_unless_it_counts_columns(
    first: str, names: tuple[str, ...], rows: int, tmp_path: Path
) -> None:
    text = f"{first}\n{','.join(str(at) for at in range(4, 5 + first.count(',')))}\n"
    table = open_table(as_csv(tmp_path, text), TableReading(label="-1"))
    assert table.encoding.names == names
    assert len(rows_of(table)[0]) == rows


def test_lines_may_end_with_carriage_returns_alone(tmp_path: Path) -> None:
    table = open_table(as_csv(tmp_path, "a,label\r1,0\r2,1\r"))
    assert rows_of(table)[0].tolist() == [[1], [2]]


def test_numbers_with_commas_are_not_taken_for_categories(tmp_path: Path) -> None:
    for text, value in (
        ("a;y\n5,1;0\n2,5;1\n", "5,1"),
        ('a,y\n"1,234,567",0\n3,1\n"2,000",0\n', "1,234,567"),
    ):
        path = as_csv(tmp_path, text)
        with pytest.raises(
            DataError, match=f"column 'a' has numbers with commas, such as '{value}'; write a"
        ):
            open_table(path)
        assert len(open_table(path, TableReading(categorical=("a",))).encoding.categories["a"]) > 1


def test_a_column_of_text_that_is_mostly_numbers_is_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [f"{at if at % 5 else '?'},{at % 2}" for at in range(50)]
    path = as_csv(tmp_path, "age,y\n" + "\n".join(rows) + "\n")
    assert len(open_table(path).encoding.categories["age"]) == 41
    assert "column 'age' is text: more than one value in ten is not a number, such as '?'" in caplog.text
    caplog.clear()
    open_table(path, TableReading(categorical=("age",)))
    open_table(path, TableReading(labelled=False), scanned=False)
    assert not caplog.text


@pytest.mark.parametrize("kind", ["timestamp", "list"])
def test_a_column_of_another_type_is_said_when_it_is_read(kind: str) -> None:
    train = open_table(pandas.DataFrame({"x": [1.0, 2.0], "c": ["a", "b"], "y": [0, 1]}))
    column = [pandas.Timestamp("2024-01-01")] * 2 if kind == "timestamp" else [[1], [2]]
    for name in ("x", "c"):
        columns = {"x": [1.0, 2.0], "c": ["a", "b"], name: column}
        rows = open_table(pyarrow.table(columns), TableReading(labelled=False), scanned=False)
        with pytest.raises(DataError, match=f"column '{name}' is {kind}.*, neither numbers nor text; leave"):
            rows_of(rows.encoded(train.encoding, labelled=False))


def test_truth_values_and_numbers_in_one_column_are_said() -> None:
    table = pandas.DataFrame({"x": pandas.Series([True, None, 2.5], dtype=object), "y": [0, 1, 0]})
    with pytest.raises(DataError, match="row 3, column 'x' holds a number after a truth value"):
        open_table(table)
