"""Corpora, record files, shuffling, vector files and bars: what is read, what is written, what is refused."""

import gzip
import io
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from manyhands.data.store.atomic import WriteFailed
from manyhands.errors import DataError, UserError
from manyhands.observe.draw.bars import Bars, show_rate
from manyhands.workloads.glove.cooccurrence_files import RECORD, RecordWriter, open_records, shuffle_records
from manyhands.workloads.glove.corpus import Corpus
from manyhands.workloads.glove.demo import demo_corpus, english
from manyhands.workloads.glove.vector_files import Vectors
from manyhands.workloads.glove.vocabulary import Vocabulary


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
def test_blocks_are_cut_at_white_space_and_lose_nothing(block_bytes: int, tmp_path: Path) -> None:
    text = "one two\nthree  vier fünf\tsechs\r\n" * 9 + "ένα δύο"
    (tmp_path / "a.txt").write_text(text, newline="")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    blocks = list(Corpus(tmp_path / "a.txt", tmp_path / "b.txt.gz").blocks(block_bytes))
    assert b"".join(block.data for block in blocks) == 2 * (text + "\n").encode(), "a newline ends each file"
    assert all(block.data[-1:].isspace() for block in blocks)
    shares = [block.share for block in blocks]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def bad_corpora(folder: Path) -> dict[str, Path]:
    contents = {
        "latin.txt": "gut\nschön ".encode("latin-1"),
        "latin.txt.gz": gzip.compress(b"a " * 5000 + b"\xff"),
        "empty.txt": b"",
        "blank.txt": b" \n\t\n",
        "cut.txt.gz": gzip.compress(os.urandom(5000))[:900],
        "none.txt.gz": b"not gzip at all",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {name: folder / name for name in contents}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("latin.txt", ["latin.txt", "not UTF-8", "0xf6", "byte 7"]),
        ("latin.txt.gz", ["not UTF-8", "uncompressed byte 10000"]),
        ("empty.txt", ["empty", "empty.txt"]),
        ("blank.txt", ["empty", "blank.txt"]),
        ("cut.txt.gz", ["cut.txt.gz", "truncated"]),
        ("none.txt.gz", ["none.txt.gz", "damaged"]),
        ("missing.txt", ["missing.txt", "No such file"]),
        (".", ["Is a directory"]),
    ],
)
def test_a_corpus_that_is_none_is_named(name: str, parts: list[str], tmp_path: Path) -> None:
    bad_corpora(tmp_path)
    with pytest.raises(UserError) as caught:
        list(Corpus(tmp_path / name).blocks(1000))
    for part in parts:
        assert part in str(caught.value)


def test_the_demo_corpus_is_english_and_the_same_every_time() -> None:
    source = (
        '"""Open a file for reading."""\nx = 1\n# The list of all\n# tensors there are.\n# one two\n\n# no\n'
    )
    assert list(english(source)) == ["open a file for reading", "the list of all tensors there are one two"]
    text = b"".join(block.data for block in demo_corpus(200_000).blocks())
    assert text == b"".join(block.data for block in demo_corpus(200_000).blocks())
    assert len(text) > 400_000
    assert set(text) <= set(b"abcdefghijklmnopqrstuvwxyz \n")
    assert Counter(text.split()).most_common(1)[0][0] == b"the"


def some_records(count: int) -> np.ndarray:
    records = np.zeros(count, RECORD)
    records["word"], records["context"] = np.arange(count) // 97, np.arange(count) % 97
    records["count"] = np.arange(count) / 3
    return records


@pytest.mark.parametrize("memory", [16 * 10_000, 70_000, 12_000])
def test_shuffling_loses_nothing_and_follows_the_seed(memory: int, tmp_path: Path) -> None:
    records = some_records(10_000)
    source = tmp_path / "source"
    records.tofile(source)
    outs = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        shuffle_records(source, tmp_path / name, seed=seed, memory_bytes=memory)
        outs.append(np.array(open_records(tmp_path / name)))
    assert np.array_equal(outs[0], outs[1])
    assert not np.array_equal(outs[0], outs[2])
    for out in outs:
        assert np.array_equal(np.sort(out, order="count"), records)
        # Of two independent orders the correlation has mean 0 and standard deviation 1/sqrt(n - 1).
        assert abs(np.corrcoef(out["count"], np.arange(10_000))[0, 1]) < 5 / np.sqrt(9_999)
        assert abs(np.corrcoef(out["count"][1:], out["count"][:-1])[0, 1]) < 5 / np.sqrt(9_998)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "source"]


def test_every_order_comes_equally_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "manyhands.workloads.glove.cooccurrence_files._buckets", lambda count, memory_bytes: 2
    )
    source, out = tmp_path / "source", tmp_path / "out"
    some_records(4).tofile(source)
    found: Counter[bytes] = Counter()
    rounds = 600
    for seed in range(rounds):
        shuffle_records(source, out, seed=seed)
        found[out.read_bytes()] += 1
    assert len(found) == 24
    expected = rounds / 24
    chi_square = sum((count - expected) ** 2 / expected for count in found.values())
    assert chi_square < 49.7, "23 degrees of freedom: passed once in a thousand, and the seeds are fixed"


def test_record_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(bytes(33))
    (tmp_path / "empty").write_bytes(b"")
    for name, part in (("odd", "33 bytes"), ("empty", "empty"), ("missing", "No such file")):
        with pytest.raises(DataError, match=part):
            open_records(tmp_path / name)
    with pytest.raises(WriteFailed, match="No such file"), RecordWriter(tmp_path / "no" / "folder"):
        pass
    some_records(100_000).tofile(tmp_path / "many")
    with pytest.raises(UserError, match="too little to shuffle 100,000 records"):
        shuffle_records(tmp_path / "many", tmp_path / "out", memory_bytes=1000)


WORDS = ["the", "naïve", "u.s.", "東京", "a\u2028b", "x-y"]


@pytest.fixture
def vectors() -> Vectors:
    matrix = np.random.default_rng(0).normal(size=(len(WORDS), 7)).astype(np.float32)
    matrix[0, 0], matrix[1, 1], matrix[2, 2] = 1e-30, 3.0, -12345.678
    return Vectors(WORDS, matrix)


def test_vectors_come_back_the_same_from_every_format(vectors: Vectors, tmp_path: Path) -> None:
    vectors.save_text(tmp_path / "text")
    vectors.save_word2vec(tmp_path / "w2v")
    vectors.save_word2vec(tmp_path / "bin", binary=True)
    for name in ("text", "w2v", "bin"):
        again = Vectors.load(tmp_path / name)
        assert again.words == WORDS
        assert np.array_equal(again.matrix, vectors.matrix)
    assert np.array_equal(Vectors.load(tmp_path / "text", is_text=True).matrix, vectors.matrix)
    assert (tmp_path / "w2v").read_bytes().startswith(b"6 7\nthe ")
    # Files without a newline after each vector, as some writers make them, and with words that have spaces.
    rows = b"".join(w.encode() + b" " + r.tobytes() for w, r in zip(WORDS, vectors.matrix, strict=True))
    (tmp_path / "bin").write_bytes(b"6 7\n" + rows)
    assert np.array_equal(Vectors.load(tmp_path / "bin").matrix, vectors.matrix)
    many = Vectors([f"w{row}" for row in range(10_000)], np.arange(20_000, dtype=np.float32).reshape(-1, 2))
    many.save_text(tmp_path / "text")
    again = Vectors.load(tmp_path / "text")
    assert again.words == many.words
    assert np.array_equal(again.matrix, many.matrix)
    (tmp_path / "text").write_text("a 1 2\n. . . 3 4\r\n")
    assert Vectors.load(tmp_path / "text").words == ["a", ". . ."]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"a 1 2\nb 3\nc 4 5\n", ["line 2", "1 numbers", "has 2"]),
        (b"a 1 2\nb 3 four\n", ["line 2", "'four'", "not a number"]),
        (b"a 1 2\n\nb 3 4\n", ["line 2"]),
        (b"a\n", ["line 1"]),
        (b"", ["no vectors"]),
        (b"a 1 2\n\xff 3 4\n", ["line 2", "not UTF-8"]),
        (b"3 2\na 1 2\nb 3 4\n", ["announces 3", "has 2"]),
        (b"2 2\na \x00\x00\x80?\x00\x00\x80?b \x00", ["truncated"]),
        (b"90000000 300\na \x00\x00\x80?\x00", ["announces 90000000", "truncated"]),
    ],
)
def test_a_vectors_file_that_is_wrong_is_named_with_its_line(
    content: bytes, parts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "vectors.txt").write_bytes(content)
    with pytest.raises(DataError) as caught:
        Vectors.load(tmp_path / "vectors.txt")
    for part in ["vectors.txt", *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"a 3\nb\n", "line 2"), (b"a 3\nb x\n", "line 2"), (b" 3\n", "line 1"), (b"a 1\na 1\n", "twice")],
)
def test_a_vocabulary_file_that_is_wrong_is_named(content: bytes, part: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(UserError, match=part):
        Vocabulary.load(tmp_path / "vocab.txt")


def test_bars_show_done_rate_and_rest_in_a_terminal_and_nothing_elsewhere() -> None:
    screen = io.StringIO()
    with Bars(Console(file=screen, force_terminal=True, width=120)) as bars:
        with bars.phase("counting", 1000, "tokens") as phase:
            phase.advance(250)
            phase.advance(250)
        with bars.phase("guessing", None, "records") as phase:
            phase.advance(5, total=9)
    drawn = screen.getvalue()
    for part in ("counting", "500 tokens", "tokens/s", "guessing", "5 records"):
        assert part in drawn
    quiet = io.StringIO()
    with Bars(Console(file=quiet)) as bars, bars.phase("counting", 10, "tokens") as phase:
        phase.advance(10)
    assert quiet.getvalue() == ""
    assert [show_rate(x) for x in (0.5, 12.0, 2_310_000, 4.2e9)] == ["0.5", "12", "2.31 M", "4.2 G"]
