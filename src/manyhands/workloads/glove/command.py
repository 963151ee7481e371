"""`manyhands train glove` and `compare glove`: word vectors, and what they know."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.errors import num_of
from manyhands.workloads.compiled_workload import ComparedTask, CompiledWorkload, TableRows, TrainEnd
from manyhands.workloads.glove.options import CountingOptions, GloveOptions, usual_batch
from manyhands.workloads.task_options import narrowed, option

if TYPE_CHECKING:
    from torch import nn

    from manyhands.engine.training import Keeping
    from manyhands.observe.draw.bars import Bars
    from manyhands.workloads.glove.learning import Learning

_COMPARED_BYTES = 300_000  # of each part of the demo corpus: parameter servers take their time
_DEMO_WORDS = ("tensor", "list", "thread", "file")


@dataclass(frozen=True, kw_only=True)
class _Vectors(CountingOptions, GloveOptions):
    corpus: tuple[Path, ...] | None = option(
        None,
        "text file with words separated by white space, plain or .gz; repeatable",
        metavar="FILE",
        shown="the docstrings and comments of this Python installation",
    )

    @property
    def learning(self) -> Learning:
        from manyhands.workloads.glove.learning import Learning

        counting = {one.name: getattr(self, one.name) for one in fields(CountingOptions)}
        return Learning(**counting, glove=narrowed(GloveOptions, self))


@dataclass(frozen=True, kw_only=True)
class _TrainGlove(_Vectors):
    batch: int = option(0, "records per update", at_least=0, shown="1, or 1024 for batch strategies")
    workers: int = option(0, "counting threads and training workers", at_least=0, shown="one per core")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "workers", self.workers or len(os.sched_getaffinity(0)))
        object.__setattr__(self, "batch", self.batch or usual_batch(self.strategy))
        self.learning  # noqa: B018 - which checks that all goes together


@dataclass(frozen=True, kw_only=True)
class _CompareGlove(_Vectors):
    """Less than `train glove` does, for every strategy trains, and parameter servers do so slowly."""

    window: int = option(5, "context words on each side; 15 in `train`", at_least=1)
    passes: int = option(2, "passes over all records; 15 in `train`", at_least=1)
    batch: int = option(1, "records per update", hidden=True)
    strategy: str = option("single", "not used in a comparison", hidden=True)
    keep_counts: bool = option(False, "not used in a comparison", hidden=True)
    repeats: int = option(1, "runs of each strategy, interleaved; 2 or more show the spread")
    strategies: str = option("single; hogwild; allreduce; tensor; ps consistency=async", "what to compare")
    analogies: Path | None = option(None, "analogies, four words a line", metavar="FILE", shown="the demo's")
    similarity: Path | None = option(None, "word, word, score; with tabs", metavar="FILE", shown="likewise")


@contextmanager
def _compared(asked: _CompareGlove, out: Path) -> Iterator[ComparedTask]:
    # Imported here, as below, so that help texts do not wait for torch and compiled code.
    from manyhands.observe.draw.bars import Bars
    from manyhands.workloads.glove.analogies import (
        ask_analogies,
        compare_similarity,
        read_pairs,
        read_questions,
    )
    from manyhands.workloads.glove.cooccurrence_files import temporary_folder
    from manyhands.workloads.glove.corpus import Corpus
    from manyhands.workloads.glove.demo import demo_corpus, demo_pairs, demo_questions
    from manyhands.workloads.glove.glove_task import GloveTask
    from manyhands.workloads.glove.learning import shuffled_records, snapshot_of
    from manyhands.workloads.glove.vector_files import Vectors

    questions = read_questions(asked.analogies) if asked.analogies is not None else demo_questions()
    pairs = read_pairs(asked.similarity) if asked.similarity is not None else demo_pairs()
    learning = asked.learning
    corpus = Corpus(*asked.corpus) if asked.corpus else demo_corpus(_COMPARED_BYTES)
    with temporary_folder(out) as folder:
        with Bars() as bars:
            vocabulary, records = shuffled_records(corpus, folder, learning, bars)

        def score(model: nn.Module) -> Mapping[str, float]:
            vectors = Vectors(list(vocabulary.words), snapshot_of(model).vectors())
            answered, ordered = ask_analogies(vectors, questions).total, compare_similarity(vectors, pairs)
            found = {"analogies": answered.accuracy} if answered.known else {}
            return found | ({"similarity": ordered.correlation} if math.isfinite(ordered.correlation) else {})

        task = GloveTask.of(records, len(vocabulary), learning.glove, any_batch=True)
        yield ComparedTask(task=task, score=score, scores=("analogies", "similarity"))


def _train(asked: _TrainGlove, keep: Keeping, bars: Bars) -> TrainEnd:
    from manyhands.workloads.glove.corpus import Corpus
    from manyhands.workloads.glove.demo import demo_corpus
    from manyhands.workloads.glove.learning import learn_vectors

    corpus, out = Corpus(*asked.corpus) if asked.corpus else demo_corpus(), keep.out
    learnt = learn_vectors(corpus, out, asked.learning, bars=bars, resume=keep.resume, options=keep.options)
    summary, file = learnt.summary, out / "vectors.txt"
    shown: list[str | TableRows] = [*_lines(summary), f"vectors  {file}"]
    if not asked.corpus and not learnt.interrupted:
        words = [word for word in _DEMO_WORDS if word in learnt.vectors.index]
        shown.append(neighbours_table({word: learnt.vectors.neighbours(word) for word in words}))
    done = f"{len(summary['costs'])} of {asked.passes} passes"
    return TrainEnd(
        summary=summary,
        is_summary_of_run=False,
        shown=shown,
        interrupted=f"{file} holds the vectors after {done}" * learnt.interrupted,
        next={
            "the nearest words": ("predict", out, learnt.vectors.words[0]),
            "evaluate the vectors": ("glove", "eval", file, "--analogies", "FILE"),
            "the same over HTTP": ("serve", out),
        },
    )


def _lines(summary: Mapping[str, Any]) -> list[str]:
    seconds, costs = summary["seconds"], summary["costs"]
    phases = ("vocabulary", "counting", "shuffling", "training")
    lines = [
        f"glove · {summary['strategy']} · {num_of(summary['workers'], 'worker')} · {summary['tokens']:,} tokens · "
        f"{summary['vocabulary']:,} words · {summary['records']:,} records in {seconds['total']:.1f} s",
        "  ".join(f"{name} {seconds[name]:.1f} s" for name in phases),
    ]
    if costs:
        lines.append(
            f"cost {costs[0]:.4f} after pass 1, {costs[-1]:.4f} after pass {len(costs)} · "
            f"{summary['records_per_s']:,.0f} records/s"
        )
    return lines


def neighbours_table(found: Mapping[str, list[tuple[str, float]]]) -> TableRows:
    most = max((len(near) for near in found.values()), default=0)
    rows = [
        [f"{near[at][0]}  {near[at][1]:.3f}" if at < len(near) else "" for near in found.values()]
        for at in range(most)
    ]
    return TableRows(head=list(found), rows=rows, numbers=False)


GLOVE = CompiledWorkload(
    name="glove",
    help="Learn word vectors from text: GloVe, from counting words to nearest neighbours.",
    options_type=_TrainGlove,
    train=_train,
    files=("vectors.txt", "vocab.txt", "cooccurrence.bin", "shuffled.bin"),
    compare_help="Compare strategies on word vectors: GloVe.",
    compared_type=_CompareGlove,
    compared=_compared,
)
