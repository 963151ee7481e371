"""GloVe on a whole corpus, from text to analogies: `python benchmarks/glove_corpus.py CORPUS QUESTIONS`.

With the settings for which the published C tools' figures are known on the 50 MB of Wikipedia that the tests read: one
result per seed, with the time of each phase, the cost after each pass and the share of analogies that come out right.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from manyhands.workloads.glove.analogies import SectionScore, ask_analogies, read_questions
from manyhands.workloads.glove.corpus import Corpus
from manyhands.workloads.glove.learning import GloveOptions, Learning, learn_vectors

PUBLISHED = {
    "training_cpu_s": 12.4 * 60,
    "counting_s": 21.0,
    "shuffling_s": 17.0,
    "costs": {"1": 0.0695, "5": 0.0391, "10": 0.0344, "15": 0.0327},
    "analogies": 17.36,
    "semantic": 28.12,
    "syntactic": 10.07,
}
"""What the published C tools gave on wiki-50mb.txt.gz with these settings, on 2 cores; not measured here."""

RESULT = Path(__file__).parent / "results" / "glove-corpus.json"


def percent(score: SectionScore) -> float:
    return 100 * score.accuracy


def train_once(corpus: Path, questions: Path, seed: int, workers: int) -> dict[str, Any]:
    """One line of the result."""
    learning = Learning(workers=workers, glove=GloveOptions(dim=50, passes=15, x_max=10.0, seed=seed))
    with tempfile.TemporaryDirectory(prefix="manyhands-glove-") as folder:
        learnt = learn_vectors(Corpus(corpus), Path(folder) / "out", learning)
    score = ask_analogies(learnt.vectors, read_questions(questions))
    kept = ("tokens", "vocabulary", "records", "seconds", "records_per_s", "costs")
    return {
        "seed": seed,
        **{name: learnt.summary[name] for name in kept},
        "questions": score.total.known,
        "analogies": percent(score.total),
        "semantic": percent(score.semantic),
        "syntactic": percent(score.syntactic),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    rows = []
    for seed in asked.seeds:
        rows.append(train_once(asked.corpus, asked.questions, seed, asked.workers))
        print(json.dumps(rows[-1]))
    result = {
        "benchmark": "glove-corpus",
        "corpus": asked.corpus.name,
        "cores": len(os.sched_getaffinity(0)),
        "workers": asked.workers,
        "machine": platform.machine(),
        "load_before": os.getloadavg()[0],
        "rows": rows,
        "published": PUBLISHED,
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
