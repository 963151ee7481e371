"""Text comes in whole, as bytes, and in windows that predict each of them once."""

from __future__ import annotations

import gzip
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.file_reader import (
    VOCABULARY,
    decode,
    encode,
    python_source_text,
    read_text,
    standard_library_text,
    windows,
)
from manyhands.errors import DataError, UserError

MIXED = "plain, naïve, Привет, 日本語, 🙂\n"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_reads_utf8(tmp_path: Path, pack: type[bytes]) -> None:
    path = tmp_path / "text"
    path.write_bytes(pack(MIXED.encode()))
    assert read_text(path) == MIXED


def test_a_byte_that_is_not_utf8_is_named_with_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("fine so far: café".encode("latin-1") + b" and on")
    with pytest.raises(DataError, match=r"latin\.txt, byte 16: not UTF-8 text: .* \(0xe9\)"):
        read_text(path)


def test_a_character_cut_in_two_at_the_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.txt"
    path.write_bytes("日本".encode()[:-1])
    with pytest.raises(DataError, match=r"cut\.txt, byte 3: not UTF-8 text: unexpected end of data"):
        read_text(path)


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(MIXED.encode() * 50)[:-5])
    with pytest.raises(DataError, match=r"cut\.gz, uncompressed byte \d+: the file is truncated"):
        read_text(path)


def test_a_file_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("abcd")
    assert read_text(path, limit_bytes=4) == "abcd"
    with pytest.raises(DataError, match=r"long\.txt holds more than 3 B"):
        read_text(path, limit_bytes=3)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.txt cannot be read: No such file"):
        read_text(tmp_path / "absent.txt")


@given(st.text(st.characters(exclude_categories=["Cs"])))  # what UTF-8 has: without a word each is tried
def test_encoding_is_utf8_and_decoding_undoes_it(text: str) -> None:
    tokens = encode(text)
    assert tokens.tobytes() == text.encode()
    assert tokens.dtype == np.uint8
    assert decode(tokens) == text


def test_any_bytes_decode() -> None:
    assert decode(np.array([104, 105, 255], np.uint8)) == "hi\ufffd"
    assert np.iinfo(np.uint8).max + 1 == VOCABULARY


@settings(deadline=None)
@given(length=st.integers(2, 200), context=st.integers(1, 50))
def test_windows_predict_each_byte_once(length: int, context: int) -> None:
    tokens = np.arange(length).astype(np.uint8)
    if length <= context:
        with pytest.raises(UserError, match=f"needs at least {context + 1}"):
            windows(tokens, context)
        return
    rows = windows(tokens, context)
    assert rows.shape[1] == context + 1
    np.testing.assert_array_equal(rows[:, 1:].ravel(), tokens[1 : 1 + len(rows) * context])
    np.testing.assert_array_equal(rows[:, :-1].ravel(), tokens[: len(rows) * context])
    assert length - 1 - len(rows) * context < context, "the tail left out would have filled a window"
    assert np.shares_memory(rows, tokens)


def test_a_context_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="context=0 must be an integer of at least 1"):
        windows(encode("text"), 0)


def test_the_standard_library_is_bounded_and_starts_at_its_first_module() -> None:
    text = standard_library_text(max_bytes=300_000)
    assert 299_990 <= len(text.encode()) <= 300_000
    first = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[0]
    assert text.startswith(first.read_text(encoding="utf-8"))


def test_the_standard_library_is_the_same_text_every_time() -> None:
    """Another process, with another hash seed, sees the same bytes: workers must not disagree on the data."""
    script = (
        "import zlib; from manyhands.data.file_reader import standard_library_text;"
        "print(zlib.crc32(standard_library_text(200_000).encode()))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_tests_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    for name, content in {
        "b.py": b"second\n",
        "a.py": b"first\n",
        "latin.py": b"caf\xe9\n",
        "notes.txt": b"no\n",
        "pkg/z.py": "third é\n".encode(),
        "test/x.py": b"no\n",
        "pkg/tests/x.py": b"no\n",
        "site-packages/x.py": b"no\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert python_source_text(tmp_path, 1000) == "first\nsecond\nthird é\n"
    cut_through_a_character = len(b"first\nsecond\nthird ") + 1
    assert python_source_text(tmp_path, cut_through_a_character) == "first\nsecond\nthird "


def test_a_python_without_its_source_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no Python source to learn from; give a text file instead"):
        python_source_text(tmp_path, 1000)


def test_a_bound_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="max_bytes=0 must be"):
        standard_library_text(0)
