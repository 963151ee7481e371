"""Readers of sparse text: LIBSVM against scikit-learn's, Vowpal Wabbit's against the LIBSVM form of the same data."""

from __future__ import annotations

import gzip
import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_svmlight_file

from manyhands.data.row_files import Reading, RowFile, Rows
from manyhands.errors import DataError, UserError

DATA = Path(__file__).parents[2].parent / "shared" / "data"


def read(path: Path | str, **options: object) -> Rows:
    return Rows.join(list(RowFile(path, Reading(**options)).blocks()))  # type: ignore[arg-type]


def text_file(folder: Path, text: str, name: str = "examples") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def assert_same(one: Rows, other: Rows) -> None:
    for name in ("starts", "indices", "values", "labels", "weights"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert one.size == other.size


def random_file(folder: Path, rows: int = 300) -> Path:
    """Lines of every form that numbers and blanks have."""
    draw = np.random.default_rng(5)
    lines = []
    for _ in range(rows):
        indices = np.sort(draw.choice(5000, draw.integers(0, 30), replace=False))
        forms = ("{:.0f}", "{:.3f}", "{:e}", "{:.17g}", "{:+.5g}", "{:.20f}", "{:.3E}")
        pairs = [
            f"{i}:" + forms[draw.integers(7)].format(draw.normal() * 10.0 ** draw.integers(-12, 12))
            for i in indices
        ]
        lines.append(
            " ".join([str(draw.choice(["+1", "-1"])), *pairs]) + str(draw.choice(["", " ", "\t", " # why"]))
        )
    return text_file(folder, "\n".join(lines) + "\n")


@pytest.mark.parametrize("block_bytes", [1 << 22, 1000])
def test_libsvm_is_read_as_scikit_learn_reads_it(tmp_path: Path, block_bytes: int) -> None:
    path = random_file(tmp_path)
    ours = read(path, block_bytes=block_bytes, threads=3)
    theirs, labels = load_svmlight_file(str(path), zero_based=True)
    np.testing.assert_array_equal(ours.starts, theirs.indptr)
    np.testing.assert_array_equal(ours.indices, theirs.indices)
    np.testing.assert_array_equal(ours.labels, labels)
    np.testing.assert_allclose(ours.values, theirs.data.astype(np.float32), rtol=1.2e-7)
    assert ours.size == theirs.shape[1]
    assert (ours.weights == 1).all()


@pytest.mark.skipif(not DATA.exists(), reason="needs a9a.gz of ../shared/data")
def test_a9a_is_read_exactly() -> None:
    ours = read(DATA / "a9a.gz", block_bytes=100_000)
    theirs, labels = load_svmlight_file(str(DATA / "a9a.gz"))
    assert (len(ours), ours.size) == (32561, 124)
    np.testing.assert_array_equal(ours.indices, theirs.indices + 1)
    np.testing.assert_array_equal(ours.values, theirs.data)
    np.testing.assert_array_equal(ours.labels, labels)


@pytest.mark.skipif(not DATA.exists(), reason="needs rcv1_small.vw.gz of ../shared/data")
@pytest.mark.parametrize("bits", [None, 18])
def test_rcv1_is_the_same_in_both_forms(tmp_path: Path, bits: int | None) -> None:
    vowpal = gzip.decompress((DATA / "rcv1_small.vw.gz").read_bytes()).decode()
    path = text_file(tmp_path, re.sub(r" *\|f ", " ", vowpal))
    from_vowpal, from_libsvm = read(DATA / "rcv1_small.vw.gz", bits=bits), read(path, bits=bits)
    assert len(from_vowpal) == 1000
    assert_same(from_vowpal, from_libsvm)
    if bits is None:
        theirs, _ = load_svmlight_file(str(path), zero_based=True)
        np.testing.assert_array_equal(from_vowpal.indices, theirs.indices)
        np.testing.assert_array_equal(from_vowpal.values, theirs.data.astype(np.float32))


def test_gzip_stdin_no_last_line_feed_and_return_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = random_file(tmp_path)
    plain, content = read(path), path.read_bytes()
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    assert_same(plain, read(tmp_path / "x.gz"))
    assert_same(plain, read(text_file(tmp_path, content.decode().rstrip("\n").replace("\n", "\r\n"), "y")))
    for piped in (content, gzip.compress(content)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
        file = RowFile("-")
        assert_same(plain, Rows.join(list(file.blocks())))
        assert not file.rereadable
        with pytest.raises(UserError, match="stdin can be read only once"):
            list(file.blocks())


@pytest.mark.parametrize(
    ("line", "column", "sentence"),
    [
        ("one 3:1", 1, "label 'one' is not a number"),
        ("nan 3:1", 1, "label 'nan' is not a number"),
        ("1 3:1 -4:1", 7, "feature '-4:1' has a negative index"),
        ("1 3:1 x:1", 7, "'x:1' is not an index:value pair"),
        ("1 3:1 5", 7, "'5' is not an index:value pair"),
        ("1 3:1 qid:2", 7, "'qid:2' is not an index:value pair"),
        ("1 3:1 99999999999999999999:1", 7, "an index too large"),
        ("1 3:1 4000000000:1", 7, "an index too large"),
        ("1 3:1 5:", 7, "feature '5:' has a value that is not a finite number"),
        ("1 3:1 5:1x", 7, "feature '5:1x' has a value that is not a finite number"),
        ("1 3:1 5:1e999", 7, "feature '5:1e999' has a value that is not a finite number"),
        ("1 3:1 5:nan", 7, "feature '5:nan' has a value that is not a finite number"),
        ("1 3:1 4:1  3:2", 12, "feature '3:2' appears twice in this line"),
        ("1 9:1 3:1 9:1 3:2", 11, "feature '9:1' appears twice in this line"),
    ],
)
def test_a_wrong_libsvm_line_is_named_or_skipped(
    tmp_path: Path, line: str, column: int, sentence: str
) -> None:
    path = text_file(tmp_path, f"1 3:1 5:2\n\n-1 5:2 3:1\n{line}\n1 2:1\n")
    with pytest.raises(DataError) as raised:
        read(path, block_bytes=12)
    assert str(raised.value).startswith(f"{path}, line 4, column {column}: ")
    assert sentence in str(raised.value)
    file = RowFile(path, Reading(skip_bad=True))
    rows = Rows.join(list(file.blocks()))
    assert (file.bad_lines, file.lines) == (1, 5)
    assert rows.indices.tolist() == [3, 5, 5, 3, 2]
    assert rows.starts.tolist() == [0, 2, 4, 5]


def test_hashed_features_stay_apart_and_duplicates_are_found_before_hashing(tmp_path: Path) -> None:
    path = text_file(tmp_path, "1 " + " ".join(f"{index}:1" for index in range(1000)) + " 4000000000000:1\n")
    rows = read(path, bits=20)
    assert rows.size == 1 << 20
    assert len(set(rows.indices.tolist())) > 995
    with pytest.raises(DataError, match="appears twice"):
        read(text_file(tmp_path, "1 9:1 3:1 9:1\n"), bits=20)
    assert len(set(read(text_file(tmp_path, "1 0:1 1:1 2:1 3:1\n"), bits=1).indices.tolist())) <= 2


def test_labels_weights_tags_scales_and_names_of_vowpal_wabbit(tmp_path: Path) -> None:
    text = "1 2.5 'first|a:2 x:3 y |b x:3\n-1 tag|a x:3 y y\n|a x\n\n1 | x:1e-1\n"
    rows = read(text_file(tmp_path, text), bits=24)
    np.testing.assert_array_equal(rows.labels, np.array([1, -1, np.nan, 1], np.float32))
    assert rows.weights.tolist() == [2.5, 1, 1, 1]
    assert rows.starts.tolist() == [0, 3, 6, 7, 8]
    assert rows.values.tolist() == [6, 2, 3, 3, 1, 1, 1, np.float32(0.1)]
    ax, ay, bx, ax2, ay2, ay3, ax3, x = rows.indices.tolist()
    assert ax == ax2 == ax3
    assert ay == ay2 == ay3
    assert len({ax, ay, bx, x}) == 4


def test_numbers_of_two_namespaces_are_kept_apart_by_hashing_all(tmp_path: Path) -> None:
    apart = text_file(tmp_path, "1 |a 5:1\n1 |a 5:1 |b 5:1\n")
    with pytest.raises(DataError, match=r"line 2, column 13: feature '5:1' is a number, and so .* hash=all"):
        read(apart, skip_bad=True)
    with pytest.raises(DataError, match="features of two namespaces are numbers"):
        read(text_file(tmp_path, "1 |a 5:1\n" * 8 + "1 |b 5:1\n" * 8, "later"), block_bytes=18)
    a, also_a, b = read(apart, bits=20, hash="all").indices.tolist()
    assert a == also_a != b


@pytest.mark.parametrize(
    ("line", "column", "sentence"),
    [
        ("1 3:1", 1, "'1' begins a line without a |"),
        ("one |f 3:1", 1, "label 'one' is not a number"),
        ("1 -2 |f 3:1", 3, "importance '-2' is not a number of at least 0"),
        ("1 1 0.5 |f 3:1", 5, "'0.5' is a third number"),
        ("1 |f 3:1 :2", 10, "feature ':2' has no name"),
        ("1 |f 3:1 4:x", 10, "feature '4:x' has a value that is not a finite number"),
        ("1 |f:x 3:1", 3, "namespace '|f:x' has a scale that is not a finite number"),
        ("1 |f 3000000000", 6, "an index too large"),
    ],
)
def test_a_wrong_vowpal_line_is_named_or_skipped(
    tmp_path: Path, line: str, column: int, sentence: str
) -> None:
    path = text_file(tmp_path, f"1 |f 3:1\n{line}\n-1 |f 4\n")
    with pytest.raises(DataError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}, line 2, column {column}: ")
    assert sentence in str(raised.value)
    assert read(path, skip_bad=True).indices.tolist() == [3, 4]


def test_a_file_without_line_ends_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.data.row_files.MOST_LINE_BYTES", 1000)
    line = "1 " + " ".join(f"{i}:1" for i in range(200))
    assert read(text_file(tmp_path, f"{line[:900]}\n" * 5), block_bytes=100).labels.tolist() == [1.0] * 5
    with pytest.raises(DataError, match="without a line end"):
        read(text_file(tmp_path, line), block_bytes=100)


def test_files_that_hold_nothing_or_are_damaged(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no example"):
        read(text_file(tmp_path, "\n# nothing\n"))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read(tmp_path / "absent")
    whole = gzip.compress(random_file(tmp_path).read_bytes())
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="truncated: gzip ends early"):
        read(tmp_path / "cut.gz")
    with pytest.raises(DataError, match=r"line 1, column 6: feature 'cat' has a name, which must be hashed"):
        read(text_file(tmp_path, "1 |w cat\n"), skip_bad=True)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"bits": 0}, "bits=0 must be from 1 to 30"),
        ({"bits": 31}, "bits=31 must be from 1 to 30"),
        ({"format": "csv"}, "unknown format 'csv'"),
        ({"hash": "none"}, "unknown hash 'none'"),
        ({"hash": "all"}, "hash=all needs a number of bits"),
        ({"threads": 0}, "threads=0 must be an integer of at least 1"),
    ],
)
def test_a_reading_is_checked(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        Reading(**wrong)  # type: ignore[arg-type]
