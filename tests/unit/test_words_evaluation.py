"""Neighbours, analogies and similarity against vectors whose answers are known, numpy and scipy."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from manyhands.errors import UserError
from manyhands.workloads.glove.analogies import (
    ask_analogies,
    compare_similarity,
    read_pairs,
    read_questions,
    spearman,
)
from manyhands.workloads.glove.vector_files import Vectors


@pytest.fixture
def royal() -> Vectors:
    """king − man + woman is nearest to king itself, then to queen: the given words must be left out."""
    matrix = np.array([[5, 1, 0], [5, -1, 0], [1, 1, 0.1], [1, -1, 0.1], [0, 0, 9], [0, 0, 0]], np.float32)
    return Vectors(["king", "queen", "man", "woman", "apple", "null"], matrix)


def test_neighbours_are_sorted_by_cosine(royal: Vectors) -> None:
    unit = royal.matrix / np.maximum(np.linalg.norm(royal.matrix, axis=1, keepdims=True), 1e-9)
    cosines = unit @ unit[2]
    expected = [royal.words[row] for row in np.argsort(-cosines, kind="stable") if row != 2]
    found = royal.neighbours("man", 99)
    assert [word for word, _ in found] == expected
    assert dict(found)["king"] == pytest.approx(float(cosines[0]), abs=1e-6)
    assert royal.neighbours("Man", 1) == found[:1], "lower case where there is no other"


def test_expressions_leave_out_the_given_words(royal: Vectors) -> None:
    assert royal.combine("king - man + woman", 1)[0][0] == "queen"
    assert royal.combine("queen − woman + man", 1)[0][0] == "king"
    for wrong in ("king man", "king -", "", "king - nobody"):
        with pytest.raises(UserError, match=r"king|''|nobody"):
            royal.combine(wrong)
    with pytest.raises(UserError, match=r"quen.*queen"):
        royal.neighbours("quen")
    with pytest.raises(UserError, match="top=0"):
        royal.neighbours("king", 0)


def test_analogies_count_what_is_known_and_right(royal: Vectors, tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text(
        ": family\nMan King Woman Queen\nman king apple queen\nman king boy prince\n\n"
        ": gram1-plural\nking queen man woman\n: empty\n"
    )
    score = ask_analogies(royal, read_questions(tmp_path / "q.txt"))
    rows = [(one.name, one.semantic, one.asked, one.known, one.right) for one in score.sections]
    assert rows == [
        ("family", True, 3, 2, 1),
        ("gram1-plural", False, 1, 1, 1),
        ("empty", True, 0, 0, 0),
    ]
    assert (score.total.known, score.total.right) == (3, 2)
    assert score.semantic.accuracy == 0.5
    assert score.syntactic.accuracy == 1.0


def test_batched_answers_are_those_of_one_question_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(3)
    words = [f"w{number}" for number in range(60)]
    vectors = Vectors(words, draw.normal(size=(60, 4)).astype(np.float32))
    asked = draw.integers(0, 60, (500, 3))
    lines, right = [], 0
    for a, b, c in asked.tolist():
        cosines = (vectors.unit[b] - vectors.unit[a] + vectors.unit[c]) @ vectors.unit.T
        cosines[[a, b, c]] = -np.inf
        best = int(np.argmax(cosines)) if draw.random() < 0.5 else int(draw.integers(60))
        right += best == int(np.argmax(cosines))
        lines.append(" ".join(words[row] for row in (a, b, c, best)))
    (tmp_path / "q.txt").write_text("\n".join(lines))
    monkeypatch.setattr("manyhands.workloads.glove.analogies._PRODUCTS", 60 * 7)
    score = ask_analogies(vectors, read_questions(tmp_path / "q.txt"))
    assert (score.total.known, score.total.right) == (500, right)


def test_spearman_is_scipys() -> None:
    draw = np.random.default_rng(5)
    for worker_links in (3, 1000):
        one, other = (
            draw.integers(0, worker_links, 200),
            draw.integers(0, worker_links, 200) + draw.integers(0, 2, 200),
        )
        assert spearman(one, other) == pytest.approx(spearmanr(one, other).statistic, abs=1e-12)
    assert np.isnan(spearman([1, 1], [1, 2]))
    assert np.isnan(spearman([], []))


def test_similarity_reads_the_files_people_have(royal: Vectors, shared_data: Path, tmp_path: Path) -> None:
    assert len(read_pairs(shared_data / "wordsim353.tsv")) == 353
    assert len(read_pairs(shared_data / "simlex999.txt")) == 999
    sections = read_questions(shared_data / "questions-words.txt")
    assert (len(sections), sum(len(one.questions) for one in sections)) == (14, 19_544)
    assert sum(one.semantic for one in sections) == 5
    (tmp_path / "pairs.tsv").write_text(
        "# a comment\nking\tqueen\t9\nking\tman\t5\nKing\tapple\t1\nking\tboy\t7\n"
    )
    score = compare_similarity(royal, read_pairs(tmp_path / "pairs.tsv"))
    assert (score.asked, score.known) == (4, 3)
    assert score.correlation == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("read", "content", "part"),
    [
        (read_pairs, "a\tb\t1\na b 1\n", "line 2"),
        (read_pairs, "a\tb\tmuch\n", "line 1"),
        (read_pairs, "# nothing\n", "no pairs"),
        (read_questions, ": x\na b c\n", "line 2"),
        (read_questions, ": x\n", "no questions"),
    ],
)
def test_evaluation_files_that_are_wrong_are_named(read, content: str, part: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file.txt").write_text(content)
    with pytest.raises(UserError, match=part):
        read(tmp_path / "file.txt")
    with pytest.raises(UserError, match=r"missing\.txt"):
        read(tmp_path / "missing.txt")
