"""Word vectors from a text, with the vocabulary, the counting, the training and what the vectors know in one script.

python glove.py                                       # the English in your Python installation
python glove.py --corpus book.txt --corpus more.txt.gz --dim 100 --passes 25 --words king queen
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from manyhands.workloads.glove.corpus import Corpus
from manyhands.workloads.glove.demo import demo_corpus
from manyhands.workloads.glove.learning import GloveOptions, Learning, learn_vectors


def main() -> None:
    """Learn, then ask for neighbours."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, action="append", help="text, plain or .gz")
    parser.add_argument("--bytes", type=int, default=2_000_000, help="of each part of the built-in corpus")
    parser.add_argument("--dim", type=int, default=50)
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--strategy", default="hogwild", help="single, hogwild, allreduce, tensor or ps")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--words", nargs="*", default=["list", "file", "thread"], help="to ask for neighbours of"
    )
    asked = parser.parse_args()

    corpus = Corpus(*asked.corpus) if asked.corpus else demo_corpus(asked.bytes)
    learning = Learning(
        strategy=asked.strategy,
        workers=asked.workers,
        glove=GloveOptions(dim=asked.dim, passes=asked.passes, x_max=10.0),
    )
    with tempfile.TemporaryDirectory() as folder:
        learnt = learn_vectors(
            corpus,
            Path(folder) / "vectors",
            learning,
            after_pass=lambda number, cost: print(f"pass {number}: cost {cost:.4f}"),
        )
    found = learnt.summary
    print(
        f"{found['tokens']:,} tokens, {found['vocabulary']:,} words, {found['records_per_s']:,.0f} records/s"
    )
    for word in asked.words:
        if word in learnt.vectors.index:
            near = ", ".join(f"{other} {cosine:.2f}" for other, cosine in learnt.vectors.neighbours(word, 5))
            print(f"{word}: {near}")


if __name__ == "__main__":
    main()
