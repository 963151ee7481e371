"""Vocabulary and co-occurrence records against a plain reading of the published algorithm, whatever the memory."""

import itertools
import os
import random
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from manyhands.data.store.atomic import WriteFailed
from manyhands.errors import UserError
from manyhands.observe.draw.bars import Bars
from manyhands.workloads.glove.cooccurrence_files import RECORD, RecordWriter, open_records
from manyhands.workloads.glove.corpus import Corpus
from manyhands.workloads.glove.counting import CountingRoom, count_cooccurrence, merge_runs, plan_memory
from manyhands.workloads.glove.vocabulary import Vocabulary, count_words

KIB = 1024


def random_text(seed: int, words: int, size: int, line: int) -> str:
    """Words of a Zipf-like distribution, in lines of about `line` words, with white space of every kind."""
    draw = random.Random(seed)
    names = [f"w{number}" if number % 3 else f"ŵ{number}é" for number in range(words)]
    weights = [1 / (1 + number) for number in range(words)]
    drawn = draw.choices(names, weights, k=size)
    ends = ["\n", "\n\n", " \r\n"]
    gaps = [" ", "  ", "\t", " \v", "\f"]
    return "".join(
        word + (draw.choice(ends) if draw.random() * line < 1 else draw.choice(gaps)) for word in drawn
    )


def plain_counts(
    text: str,
    vocabulary: Vocabulary,
    window: int,
    symmetric: bool,
    weight: Callable[[int], float] = lambda distance: 1 / distance,
) -> dict[tuple[int, int], float]:
    """What the published tool does, one pair after the other."""
    table: dict[tuple[int, int], float] = Counter()
    for line in text.encode().split(b"\n"):
        known = [vocabulary.index[w.decode()] + 1 for w in line.split() if w.decode() in vocabulary.index]
        for right, word in enumerate(known):
            for left in range(max(0, right - window), right):
                table[known[left], word] += weight(right - left)
                if symmetric:
                    table[word, known[left]] += weight(right - left)
    return table


def assert_same(path: Path, expected: dict[tuple[int, int], float]) -> None:
    records = open_records(path)
    pairs = list(zip(records["word"].tolist(), records["context"].tolist(), strict=True))
    assert pairs == sorted(expected), "each pair once, sorted"
    np.testing.assert_allclose(records["count"], [expected[pair] for pair in pairs], rtol=1e-12)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_vocabulary_is_that_of_a_dictionary(workers: int, tmp_path: Path) -> None:
    text = random_text(1, 30_000, 90_000, 20)
    corpus = Corpus.of_text(text)
    counted = Counter(word.decode() for word in text.encode().split())
    expected = sorted(((-n, word.encode()) for word, n in counted.items() if n >= 3))
    vocabulary = count_words(corpus, min_count=3, workers=workers)
    assert vocabulary.words == tuple(word.decode() for _, word in expected)
    assert vocabulary.counts.tolist() == [-n for n, _ in expected]
    assert vocabulary.tokens == 90_000
    shorter = count_words(corpus, min_count=3, max_size=50, workers=workers)
    assert shorter.words == vocabulary.words[:50]
    vocabulary.save(tmp_path / "vocab.txt")
    again = Vocabulary.load(tmp_path / "vocab.txt")
    assert again.words == vocabulary.words
    assert again.counts.tolist() == vocabulary.counts.tolist()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("window", "line"), [(1, 9), (5, 7), (15, 10_000)])
def test_records_are_those_of_the_plain_loop(window: int, line: int, symmetric: bool, tmp_path: Path) -> None:
    text = random_text(window, 200, 6_000, line)
    corpus = Corpus.of_text(text)
    vocabulary = count_words(corpus, min_count=4)
    assert len(vocabulary) < 200, "some words are out of the vocabulary"
    expected = plain_counts(text, vocabulary, window, symmetric)
    out = tmp_path / "records.bin"
    for memory, workers in itertools.product((300 * KIB, 450 * KIB, 64 * KIB * KIB), (1, 2)):
        found = count_cooccurrence(
            corpus, vocabulary, out, window=window, symmetric=symmetric, memory_bytes=memory, workers=workers
        )
        assert found == len(expected)
        assert_same(out, expected)
        assert os.listdir(tmp_path) == ["records.bin"], "temporary files are removed"


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("diagonal", [True, False])
def test_plain_counts_are_how_often_words_stand_together(
    symmetric: bool, diagonal: bool, tmp_path: Path
) -> None:
    text = random_text(3, 100, 4_000, 12)
    corpus = Corpus.of_text(text)
    vocabulary = count_words(corpus, min_count=4)
    expected = plain_counts(text, vocabulary, 5, symmetric, lambda _: 1.0)
    assert any(word == context for word, context in expected), "some words stand beside themselves"
    if not diagonal:
        expected = {pair: count for pair, count in expected.items() if pair[0] != pair[1]}
    out = tmp_path / "records.bin"
    for memory in (300 * KIB, 64 * KIB * KIB):
        count_cooccurrence(
            corpus,
            vocabulary,
            out,
            window=5,
            symmetric=symmetric,
            weighting="count",
            diagonal=diagonal,
            memory_bytes=memory,
        )
        assert_same(out, expected)
    assert np.array_equal(open_records(out)["count"] % 1, np.zeros(len(expected))), "integers"


def test_spilling_happens_and_workers_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_text(7, 150, 40_000, 40)
    corpus = Corpus.of_text(text)
    vocabulary = count_words(corpus, min_count=1)
    merges: list[int] = []

    def counted_merge(runs: list[Path], *rest: object) -> int:
        merges.append(len(runs))
        return merge_runs(runs, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("manyhands.workloads.glove.counting.merge_runs", counted_merge)
    content = set()
    for workers in (1, 2):
        room = plan_memory(400 * KIB, len(vocabulary), 20 * KIB, workers, 15)
        assert room.part_words < 40_000
        count_cooccurrence(corpus, vocabulary, tmp_path / "a", memory_bytes=400 * KIB, workers=workers)
        assert_same(tmp_path / "a", plain_counts(text, vocabulary, 15, True))
    assert len(merges) == 2
    assert min(merges) > 1
    for workers in (1, 2, 3):
        count_cooccurrence(corpus, vocabulary, tmp_path / "b", workers=workers)
        content.add((tmp_path / "b").read_bytes())
    assert len(content) == 1


@pytest.mark.parametrize("fan_in", [2, 3, 64])
def test_runs_are_merged_in_rounds(fan_in: int, tmp_path: Path) -> None:
    words, draw = 5_000, np.random.default_rng(fan_in)
    total = np.zeros((words, words))
    runs = []
    for number in range(11):
        cells = np.unique(draw.integers(0, 400 * words, 300 if number else 0))
        run = np.zeros(len(cells), RECORD)
        run["word"], run["context"] = cells // words + 1, cells % words + 1
        run["count"] = draw.integers(1, 9, len(cells))
        total[run["word"] - 1, run["context"] - 1] += run["count"]
        runs.append(tmp_path / f"run-{number}")
        with RecordWriter(runs[-1]) as writer:
            writer.write(run)
    out = tmp_path / "out"
    room = CountingRoom(fan_in=fan_in, run_records=7, out_records=5_100)
    with Bars().phase("merging", None, "records") as phase:
        found = merge_runs(runs, out, words, room, phase)
    records = open_records(out)
    assert found == len(records) == np.count_nonzero(total)
    rows, columns = np.nonzero(total)
    assert records["word"].tolist() == (rows + 1).tolist()
    assert records["context"].tolist() == (columns + 1).tolist()
    assert records["count"].tolist() == total[rows, columns].tolist()
    assert os.listdir(tmp_path) == ["out"]


@contextmanager
def files_no_larger_than(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("memory", [400 * KIB, 64 * KIB * KIB])
def test_a_disk_that_takes_no_more_is_one_sentence_and_leaves_nothing(memory: int, tmp_path: Path) -> None:
    text = random_text(3, 300, 20_000, 40)
    corpus = Corpus.of_text(text)
    vocabulary = count_words(corpus, min_count=1)
    with files_no_larger_than(100_000), pytest.raises(WriteFailed, match="temporary files are removed"):
        count_cooccurrence(corpus, vocabulary, tmp_path / "out", memory_bytes=memory)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"window": 0}, ["window=0"]),
        ({"memory_bytes": 1000}, ["memory=1000 B", "at least"]),
        ({"workers": 0}, ["workers=0"]),
        ({"weighting": "counts"}, ["unknown weighting 'counts'", "did you mean 'count'?"]),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, int], parts: list[str], tmp_path: Path) -> None:
    corpus = Corpus.of_text("a b c a b c")
    vocabulary = count_words(corpus, min_count=1)
    with pytest.raises(UserError) as caught:
        count_cooccurrence(corpus, vocabulary, tmp_path / "out", **change)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [("a a a a a", ["1 of 1 word", "min_count=5"]), ("a b", ["0 of 2 words", "min_count=5"])],
)
def test_a_vocabulary_of_one_word_is_refused(text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        count_words(Corpus.of_text(text))
    for part in parts:
        assert part in str(caught.value)


def test_a_memory_limit_is_kept_for_any_vocabulary() -> None:
    for words, workers, memory in itertools.product(
        (10, 50_000, 2_000_000), (1, 2, 16), (1 << 22, 1 << 28, 1 << 31)
    ):
        try:
            room = plan_memory(memory, words, 40 * words, workers, 15)
        except UserError:
            assert 40 * words + 50 * words * workers + 30_000 * workers > memory / 4, (
                "refused only where it is little"
            )
            continue
        out = 16 * room.out_records * 2 * workers
        dense = 8.2 * words * workers
        assert out + dense + 8 * room.part_words + 5 * room.block_bytes * (workers + 1) + 40 * words <= memory
        assert room.out_records >= words
        merge = 16 * (room.out_records + room.fan_in * room.run_records) + 8.2 * words
        assert merge <= memory
        assert room.fan_in >= 2


def test_the_wikipedia_sample_gives_the_published_tools_numbers(shared_data: Path, tmp_path: Path) -> None:
    """In 64 MiB, which is an eighth of what the records take."""
    corpus = Corpus(shared_data / "wiki-50mb.txt.gz")
    vocabulary = count_words(corpus)
    assert len(vocabulary) == 52_421
    found = count_cooccurrence(corpus, vocabulary, tmp_path / "out", memory_bytes=1 << 26)
    assert found == len(open_records(tmp_path / "out")) == 33_881_471
