"""Matrices in files: every format gives the same rows, forward and in any order, and says what is wrong."""

from __future__ import annotations

import gzip
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

from manyhands.data.matrix_files import MatrixFile
from manyhands.data.stored_matrix import MatrixStore
from manyhands.data.table_files import open_matrix
from manyhands.errors import DataError, UserError

parquet = pytest.importorskip(
    "pyarrow.parquet", reason="pyarrow is not installed: pip install manyhands[tables]"
)


def table() -> NDArray[np.float64]:
    """Numbers that single precision holds, of which half are zero."""
    draw = np.random.default_rng(3)
    values = draw.integers(-8, 8, (57, 9)) / 4.0
    return np.where(draw.random(values.shape) < 0.5, values, 0.0)


LABELS = np.arange(57) % 2 * 2.0 - 1


def write_libsvm(path: Path) -> None:
    dump_svmlight_file(table(), LABELS, str(path), zero_based=True)


def write_gzip(path: Path) -> None:
    write_libsvm(path)
    path.write_bytes(gzip.compress(path.read_bytes()))


def write_npy(path: Path, dtype: Any = np.float64, order: Any = "C") -> None:
    with path.open("wb") as file:
        np.save(file, table().astype(dtype, order=order))


def write_parquet(path: Path, values: Any = None, **more: Any) -> None:
    import pyarrow

    values = table() if values is None else values
    columns = {f"c{place}": column for place, column in enumerate(values.T)}
    parquet.write_table(pyarrow.table({**columns, **more}), path, row_group_size=20)


WRITERS = {
    "libsvm": write_libsvm,
    "gzip": write_gzip,
    "npy": write_npy,
    "npy single": lambda path: write_npy(path, np.float32),
    "npy of columns": lambda path: write_npy(path, np.float64, "F"),
    "npy big-endian": lambda path: write_npy(path, ">f8"),
    "parquet": write_parquet,
}


def dense(file: MatrixFile, block_bytes: int) -> NDArray[Any]:
    return np.concatenate([block.dense(9) for block in file.blocks(block_bytes)])


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("block_bytes", [1, 500, 1 << 24])
def test_every_format_gives_the_same_rows(tmp_path: Path, kind: str, block_bytes: int) -> None:
    WRITERS[kind](tmp_path / "sample")
    file = open_matrix(tmp_path / "sample")
    np.testing.assert_array_equal(dense(file, block_bytes), table())
    begins = [block.begin for block in file.blocks(block_bytes)]
    assert begins[0] == 0
    assert sorted(begins) == begins
    assert (len(begins) > 1) == (block_bytes < 1000)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("kept_in_memory", [True, False])
def test_a_stored_matrix_gives_any_rows_to_any_process(
    tmp_path: Path, kind: str, kept_in_memory: bool
) -> None:
    WRITERS[kind](tmp_path / "sample")
    with MatrixStore() as store:
        stored = pickle.loads(pickle.dumps(store.keep(open_matrix(tmp_path / "sample"))))
        assert (stored.rows, stored.columns) == (57, 9)
        assert stored.is_sparse == (kind in ("libsvm", "gzip"))
        assert stored.entries == (np.count_nonzero(table()) if stored.is_sparse else 57 * 9)
        opened = stored.opened(kept_in_memory=kept_in_memory)
        for begin, end in ((0, 57), (13, 41), (40, 41)):
            for block_bytes in (1, 300, 1 << 20):
                found = [block.dense(9).copy() for block in opened.blocks(begin, end, block_bytes)]
                np.testing.assert_array_equal(np.concatenate(found), table()[begin:end])
        opened.close()
        written = [folder for folder in [Path(stored.path)] if folder != tmp_path / "sample"]
    assert not any(path.exists() for path in written), "the store takes its files along"


def test_pages_that_were_read_leave_memory_where_they_are_not_kept(tmp_path: Path) -> None:
    np.save(tmp_path / "large.npy", np.ones((4000, 500)))  # 16 MB

    def resident(kept_in_memory: bool) -> int:
        with MatrixStore() as store:
            opened = store.keep(open_matrix(tmp_path / "large.npy")).opened(kept_in_memory=kept_in_memory)
            before = mapped_kb()
            most = 0
            for block in opened.blocks(0, 4000, 1 << 20):
                block.dense(500).sum()
                most = max(most, mapped_kb() - before)
            del block
            opened.close()
            return most

    assert resident(kept_in_memory=True) > 14_000
    assert resident(kept_in_memory=False) < 7_000


def mapped_kb() -> int:
    """Of files, in this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssFile")))


def test_labels_come_from_the_line_the_column_or_its_name(tmp_path: Path) -> None:
    write_libsvm(tmp_path / "rows")
    np.save(tmp_path / "rows.npy", np.column_stack([table(), LABELS]))
    write_parquet(tmp_path / "rows.parquet", price=LABELS)
    for file in (
        open_matrix(tmp_path / "rows"),
        open_matrix(tmp_path / "rows.npy", "-1"),
        open_matrix(tmp_path / "rows.parquet", "price"),
    ):
        labels = [block.labels for block in file.blocks(500)]
        np.testing.assert_array_equal(np.concatenate(labels), LABELS)  # type: ignore[arg-type]
        np.testing.assert_array_equal(dense(file, 500), table())
        if file.columns is not None:
            assert (file.rows, file.columns) == (57, 9)
    assert open_matrix(tmp_path / "rows.parquet", "price").names == tuple(f"c{place}" for place in range(9))


def test_libsvm_has_the_columns_that_scikit_learn_finds(tmp_path: Path) -> None:
    write_libsvm(tmp_path / "rows")
    theirs, _ = load_svmlight_file(str(tmp_path / "rows"), zero_based=True)
    with MatrixStore() as store:
        stored = store.keep(open_matrix(tmp_path / "rows"))
        assert (stored.rows, stored.columns) == theirs.shape


def test_null_and_booleans_of_parquet_are_numbers(tmp_path: Path) -> None:
    import pyarrow

    columns = {"a": [1, None, 3], "b": [True, None, False], "c": [0.5, 1.5, None]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "nulls")
    (block,) = open_matrix(tmp_path / "nulls").blocks()
    expected = [[1, 1, 0.5], [np.nan, np.nan, 1.5], [3, 0, np.nan]]
    np.testing.assert_array_equal(block.rows, expected)  # type: ignore[arg-type]


def _npy(folder: Path, value: Any) -> Path:
    np.save(folder / "bad.npy", value)
    return folder / "bad.npy"


def _cut(folder: Path) -> Path:
    path = _npy(folder, table())
    path.write_bytes(path.read_bytes()[:-1])
    return path


def _text(folder: Path, text: bytes) -> Path:
    (folder / "bad").write_bytes(text)
    return folder / "bad"


def _parquet(folder: Path, **columns: Any) -> Path:
    import pyarrow

    parquet.write_table(pyarrow.table(columns), folder / "bad.parquet")
    return folder / "bad.parquet"


BAD: dict[str, tuple[Any, str]] = {
    "missing": (lambda folder: folder / "none", "none cannot be read: No such file"),
    "a folder": (lambda folder: folder, "cannot be read: Is a directory"),
    "empty": (
        lambda folder: _text(folder, b""),
        "is empty; give a table as CSV, LIBSVM text, npy or Parquet",
    ),
    "prose": (
        lambda folder: _text(folder, b"once upon a time\n"),
        "line 1, column 1: label 'once' is not a number",
    ),
    "no numbers in npy": (lambda folder: _npy(folder, np.array([["a"]])), "holds <U1, not numbers"),
    "objects in npy": (
        lambda folder: _npy(folder, np.array([[None]], object)),
        "holds object, not numbers; save it as float64",
    ),
    "a vector": (
        lambda folder: _npy(folder, np.ones(3)),
        r"has the shape \(3,\); a matrix has two dimensions",
    ),
    "no rows": (lambda folder: _npy(folder, np.ones((0, 3))), r"has the shape \(0, 3\)"),
    "truncated npy": (_cut, r"is truncated: \(57, 9\) of float64 needs 4104 bytes, but has 4103"),
    "npy without a head": (
        lambda folder: _text(folder, b"\x93NUMPY\x01\x00\xff"),
        "the header of this npy file is damaged",
    ),
    "npy in gzip": (
        lambda folder: _text(folder, gzip.compress(_npy(folder, table()).read_bytes())),
        "cannot be mapped; gunzip it first",
    ),
    "damaged gzip": (lambda folder: _text(folder, b"\x1f\x8b\x08"), "is truncated"),
    "damaged Parquet": (
        lambda folder: _text(folder, b"PAR1 and no more"),
        "is not a Parquet file that can be read",
    ),
    "times in Parquet": (
        lambda folder: _parquet(folder, a=[1.0], seen=np.array(["2026-01-01"], "datetime64[s]")),
        r"column 'seen' is timestamp\[ms\], neither numbers nor text; leave it out with --drop seen",
    ),
    "no rows in Parquet": (lambda folder: _parquet(folder, a=np.empty(0)), "has 0 rows and 1 columns"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said(tmp_path: Path, case: str) -> None:
    make, sentence = BAD[case]
    with pytest.raises(DataError, match=sentence):
        list(open_matrix(make(tmp_path)).blocks())


@pytest.mark.parametrize(
    ("writer", "label", "sentence"),
    [
        ("libsvm", "0", "is LIBSVM text, whose labels come first"),
        ("npy", "price", "columns of an npy file are numbers"),
        ("npy", "9", "has 9 columns"),
        ("parquet", "C1", "has no column 'C1'; allowed: c0, .* did you mean 'c1'"),
    ],
)
def test_a_label_that_is_not_there_is_said(tmp_path: Path, writer: str, label: str, sentence: str) -> None:
    WRITERS[writer](tmp_path / "sample")
    with pytest.raises(UserError, match=sentence):
        open_matrix(tmp_path / "sample", label)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "sample")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'manyhands\[tables\]'"):
        open_matrix(tmp_path / "sample")


def test_sparse_rows_that_are_all_zero_are_refused(tmp_path: Path) -> None:
    (tmp_path / "zeros").write_text("1\n-1\n")
    with MatrixStore() as store, pytest.raises(DataError, match="no row has any entry"):
        store.keep(open_matrix(tmp_path / "zeros"))
