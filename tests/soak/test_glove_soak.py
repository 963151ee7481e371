"""GloVe on 50 MB of Wikipedia, against what the published C tools reach there with the same settings."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from manyhands.workloads.glove.analogies import ask_analogies, read_questions
from manyhands.workloads.glove.corpus import Corpus
from manyhands.workloads.glove.learning import GloveOptions, Learning, learn_vectors

PUBLISHED_COSTS = {1: 0.0695, 5: 0.0391, 10: 0.0344, 15: 0.0327}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_three_seeds_do_as_well_as_the_published_tools(shared_data: Path, tmp_path: Path) -> None:
    corpus, questions = (
        Corpus(shared_data / "wiki-50mb.txt.gz"),
        read_questions(shared_data / "questions-words.txt"),
    )
    accuracies = []
    for seed in (21, 22, 23):
        learning = Learning(workers=2, glove=GloveOptions(dim=50, passes=15, x_max=10.0, seed=seed))
        learnt = learn_vectors(corpus, tmp_path / str(seed), learning)
        assert (learnt.summary["vocabulary"], learnt.summary["records"]) == (52_421, 33_881_471)
        for number, cost in PUBLISHED_COSTS.items():
            assert learnt.summary["costs"][number - 1] < 1.03 * cost
        score = ask_analogies(learnt.vectors, questions).total
        assert score.known == 14_927
        accuracies.append(score.accuracy)
    assert min(accuracies) >= 0.165
    assert statistics.mean(accuracies) >= 0.17
