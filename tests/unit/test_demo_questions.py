"""The questions for the demo corpus: made of words that it has, and answered by vectors that should answer them."""

from __future__ import annotations

import numpy as np

from manyhands.workloads.glove.analogies import ask_analogies, compare_similarity
from manyhands.workloads.glove.demo import demo_corpus, demo_pairs, demo_questions
from manyhands.workloads.glove.vector_files import Vectors
from manyhands.workloads.glove.vocabulary import count_words


def test_questions_are_all_pairs_of_pairs() -> None:
    for section in demo_questions():
        pairs = {question[:2] for question in section.questions}
        assert len(section.questions) == len(pairs) * (len(pairs) - 1)
        assert all(a != c or b != d for a, b, c, d in section.questions)
    assert [section.semantic for section in demo_questions()] == [True, False, False]


def test_vectors_made_to_answer_them_answer_them() -> None:
    """A word and its plural differ by one direction that all such pairs share."""
    (plurals,) = [section for section in demo_questions() if section.name == "gram1-plural"]
    words = list(dict.fromkeys(word for question in plurals.questions for word in question[:2]))
    draw = np.random.default_rng(0)
    base, step = draw.standard_normal((len(words) // 2, 50)), np.full(50, 0.3)
    rows = np.stack([base, base + step], axis=1).reshape(-1, 50).astype(np.float32)
    score = ask_analogies(Vectors(words, rows), [plurals])
    assert score.total.known == score.total.asked
    assert score.total.accuracy > 0.95


def test_pairs_have_three_degrees_of_equal_size() -> None:
    degrees = [pair.score for pair in demo_pairs()]
    assert [degrees.count(degree) for degree in (2.0, 1.0, 0.0)] == [16, 16, 16]


def test_the_demo_corpus_knows_nearly_all_of_the_words() -> None:
    vocabulary = count_words(demo_corpus(600_000), min_count=5)
    vectors = Vectors(
        vocabulary.words, np.random.default_rng(0).standard_normal((len(vocabulary), 4)).astype("f4")
    )
    asked = ask_analogies(vectors, demo_questions()).total
    pairs = compare_similarity(vectors, demo_pairs())
    assert asked.known > 0.9 * asked.asked
    assert pairs.known > 0.8 * pairs.asked
