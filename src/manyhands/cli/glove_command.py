"""`manyhands train glove`, `compare glove` and `glove eval|neighbours|analogy`: word vectors, and what they know."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyhands.cli.command_options import (
    add_command,
    check_writable,
    fresh_directory,
    print_next,
    write_json,
)
from manyhands.cli.compare_command import Compared, run_comparison
from manyhands.cli.environment import start_own_workers
from manyhands.cli.kept_runs import KeptRun, Shown, interrupted, keeping_unchecked, watched
from manyhands.cli.runs import leave_report

if TYPE_CHECKING:
    from manyhands.lab.compare.run_comparison import Score
    from manyhands.workloads.glove.glove_task import GloveTask
    from manyhands.workloads.glove.learning import Learning

__all__ = ["add_glove", "glove_app"]

glove_app = typer.Typer(help="Ask trained word vectors.", no_args_is_help=True)

_COMPARED_BYTES = 300_000  # of each part of the demo corpus: parameter servers take their time
_DEMO_WORDS = ("tensor", "list", "thread", "file")
_VectorsFile = Annotated[
    Path, typer.Argument(metavar="VECTORS", help="Stanford's text, or word2vec's text or binary form.")
]
_JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file, too.")]


@dataclass(frozen=True, kw_only=True)
class _Vectors:
    """What is learned from what, one option each."""

    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Text, words between white space, plain or .gz; may be given several times.",
            show_default="the docstrings and comments of this Python installation",
        ),
    ] = None
    min_count: Annotated[int, typer.Option(help="Leave out words that come less often.")] = 5
    max_vocab: Annotated[int | None, typer.Option(help="Keep this many of the most frequent words.")] = None
    window: Annotated[int, typer.Option(help="Words on each side that count as context.")] = 15
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Left context only.")] = False
    weighting: Annotated[
        str, typer.Option(help="What two words count: distance (1/distance) or count (1).")
    ] = "distance"
    no_diagonal: Annotated[bool, typer.Option("--no-diagonal", help="Leave out words beside themselves.")] = (
        False
    )
    dim: Annotated[int, typer.Option(help="Numbers in a vector.")] = 50
    x_max: Annotated[float, typer.Option(help="Count from which on a record has full weight.")] = 100.0
    alpha: Annotated[float, typer.Option(help="Power of the weight of smaller counts.")] = 0.75
    rate: Annotated[float, typer.Option(help="Learning rate of AdaGrad.")] = 0.05
    memory: Annotated[str, typer.Option(help="Limit for counting and shuffling; more goes to disk.")] = "2GiB"


@dataclass(frozen=True, kw_only=True)
class _GloveRun(_Vectors):
    """And for how long, and by whom."""

    passes: Annotated[int, typer.Option(help="Passes over all records.")] = 15
    batch: Annotated[
        int | None,
        typer.Option(
            help="Records at a time.", show_default="1; 1024 under allreduce, mirrored, tensor and ps"
        ),
    ] = None
    strategy: Annotated[
        str,
        typer.Option(help="How to train: single, hogwild, allreduce, mirrored, tensor or ps, with settings."),
    ] = "hogwild"
    workers: Annotated[
        int | None, typer.Option(help="Threads that count and workers that train.", show_default="one a core")
    ] = None
    seed: Annotated[int, typer.Option(help="Fixes first values and the order of records.")] = 0
    keep_counts: Annotated[
        bool, typer.Option("--keep-counts", help="Keep the co-occurrence records as cooccurrence.bin.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class _TrainGlove(KeptRun, _GloveRun):
    """The options of `train glove`."""


@dataclass(frozen=True, kw_only=True)
class _CompareGlove(_Vectors, Compared):
    """The options of `compare glove`; less than `train glove` does, for every strategy trains, and servers slowly."""

    window: Annotated[int, typer.Option(help="Words on each side that count as context; 15 in `train`.")] = 5
    passes: Annotated[int, typer.Option(help="Passes over all records; 15 in `train`.")] = 2
    repeats: Annotated[
        int, typer.Option(help="Runs of each strategy, interleaved; 2 or more tell spread.")
    ] = 1
    strategies: Annotated[str, typer.Option(help="What to compare, separated by semicolons.")] = (
        "single; hogwild; allreduce; tensor; ps consistency=async"
    )
    analogies: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Questions of four words.", show_default="those of the demo corpus"
        ),
    ] = None
    similarity: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Two words and a score, tabs between.", show_default="likewise"),
    ] = None


def add_glove(train_app: typer.Typer, compare_app: typer.Typer) -> None:
    """Offer `train glove` and `compare glove`."""
    add_command(train_app, "glove", _TrainGlove, _train)
    add_command(compare_app, "glove", _CompareGlove, _compare)


def _compare(asked: _CompareGlove) -> None:
    """Compare strategies on word vectors: GloVe."""
    words: list[str] = []

    @contextmanager
    def build(out: Path) -> Iterator[GloveTask]:
        from manyhands.observe.draw.bars import Bars
        from manyhands.workloads.glove.cooccurrence_files import temporary_folder
        from manyhands.workloads.glove.corpus import Corpus
        from manyhands.workloads.glove.demo import demo_corpus
        from manyhands.workloads.glove.glove_task import GloveTask
        from manyhands.workloads.glove.learning import Learning, shuffled_records
        from manyhands.workloads.glove.train_glove import GloveOptions

        options = GloveOptions(
            dim=asked.dim,
            passes=asked.passes,
            x_max=asked.x_max,
            alpha=asked.alpha,
            rate=asked.rate,
            seed=asked.seed,
            allow_overload=asked.allow_overload,
        )
        learning = Learning(strategy="single", glove=options, **_counting(asked, asked.workers))
        corpus = Corpus(*asked.corpus) if asked.corpus else demo_corpus(_COMPARED_BYTES)
        with temporary_folder(out) as folder:
            with Bars() as bars:
                vocabulary, records = shuffled_records(corpus, folder, learning, bars)
            words.extend(vocabulary.words)
            yield GloveTask.of(records, len(vocabulary), options, any_batch=True)

    run_comparison("glove", build, asked, score=_score(asked, words))


def _score(asked: _CompareGlove, words: list[str]) -> Score:
    """How well vectors answer analogies, and order pairs of words as people do; the files are read at once."""
    from torch import nn

    from manyhands.lab.compare.run_comparison import Score
    from manyhands.workloads.glove.analogies import ask_analogies, read_questions
    from manyhands.workloads.glove.demo_questions import demo_pairs, demo_questions
    from manyhands.workloads.glove.similarity import compare_similarity, read_pairs
    from manyhands.workloads.glove.train_glove import summed_vectors
    from manyhands.workloads.glove.vector_files import Vectors

    questions = read_questions(asked.analogies) if asked.analogies is not None else demo_questions()
    pairs = read_pairs(asked.similarity) if asked.similarity is not None else demo_pairs()

    def score(model: nn.Module) -> dict[str, float]:
        vectors = Vectors(words, summed_vectors(model))
        asked, ordered = ask_analogies(vectors, questions).total, compare_similarity(vectors, pairs)
        found = {"analogies": asked.accuracy} if asked.known else {}
        return found | ({"similarity": ordered.correlation} if math.isfinite(ordered.correlation) else {})

    return Score(names=("analogies", "similarity"), of=score)


def _counting(asked: _Vectors, workers: int) -> dict[str, Any]:
    """The settings of counting."""
    from manyhands.strategy import parse_size

    return {
        "min_count": asked.min_count,
        "max_vocab": asked.max_vocab,
        "window": asked.window,
        "symmetric": not asked.asymmetric,
        "weighting": asked.weighting,
        "diagonal": not asked.no_diagonal,
        "memory_bytes": parse_size(asked.memory),
        "workers": workers,
    }


def _train(asked: _TrainGlove) -> None:
    """Learn word vectors from text: GloVe, from counting words to nearest neighbours."""
    start_own_workers()
    # Imported here so that help texts do not wait for torch and compiled code.
    from manyhands.workloads.glove.corpus import Corpus
    from manyhands.workloads.glove.demo import demo_corpus
    from manyhands.workloads.glove.learning import learn_vectors

    learning = _learning(asked)
    check_writable(asked.json_file)
    out = asked.out or fresh_directory("glove")
    keep = keeping_unchecked(asked, out)
    corpus = Corpus(*asked.corpus) if asked.corpus else demo_corpus()
    shown = Shown("glove", asked.strategy, learning.workers)
    with watched(asked, keep, shown, lambda: "there are no vectors yet") as (end, bars):
        learnt = learn_vectors(corpus, out, learning, bars=bars, resume=asked.resume, options=keep.options)
    write_json(asked.json_file, learnt.summary)
    _print_summary(learnt.summary, out)
    if learnt.interrupted:
        done = f"{len(learnt.summary['costs'])} of {asked.passes} passes"
        raise interrupted(keep, end, f"{out / 'vectors.txt'} holds the vectors after {done}")
    leave_report(out)
    if not asked.corpus:
        _print_neighbours(
            {word: learnt.vectors.neighbours(word) for word in _demo_words(learnt.vectors.index)}
        )
    print_next(
        the_nearest_words=("predict", out, learnt.vectors.words[0]),
        what_they_know=("glove", "eval", out / "vectors.txt", "--analogies", "FILE"),
        the_same_over_HTTP=("serve", out),
    )


def _learning(asked: _TrainGlove) -> Learning:
    from manyhands.workloads.glove.glove_task import usual_batch
    from manyhands.workloads.glove.learning import Learning
    from manyhands.workloads.glove.train_glove import GloveOptions

    workers = len(os.sched_getaffinity(0)) if asked.workers is None else asked.workers
    return Learning(
        **_counting(asked, workers),
        strategy=asked.strategy,
        keep_counts=asked.keep_counts,
        glove=GloveOptions(
            dim=asked.dim,
            passes=asked.passes,
            x_max=asked.x_max,
            alpha=asked.alpha,
            rate=asked.rate,
            batch=usual_batch(asked.strategy) if asked.batch is None else asked.batch,
            seed=asked.seed,
            allow_overload=asked.allow_overload,
        ),
    )


@glove_app.command("eval")
def evaluate_command(
    vectors: _VectorsFile,
    analogies: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Questions of four words, ': name' begins a section.")
    ] = None,
    similarity: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Two words and a score, with tabs between.")
    ] = None,
    json_file: _JsonFile = None,
) -> None:
    """How well the vectors answer analogies, and order pairs of words as people do."""
    from manyhands.errors import UserError
    from manyhands.observe.draw.bars import Bars
    from manyhands.workloads.glove.analogies import ask_analogies, read_questions
    from manyhands.workloads.glove.similarity import compare_similarity, read_pairs
    from manyhands.workloads.glove.vector_files import Vectors

    if analogies is None and similarity is None:
        raise UserError("glove eval needs --analogies FILE, --similarity FILE or both")
    check_writable(json_file)
    questions = read_questions(analogies) if analogies is not None else None
    pairs = read_pairs(similarity) if similarity is not None else None
    loaded = Vectors.load(vectors)
    found: dict[str, Any] = {"words": len(loaded), "dim": loaded.dim}
    if questions is not None:
        with Bars() as bars:
            score = ask_analogies(loaded, questions, bars)
        rows = [*score.sections, score.semantic, score.syntactic, score.total]
        found["analogies"] = {
            row.name: {"asked": row.asked, "known": row.known, "right": row.right, "accuracy": row.accuracy}
            for row in rows
        }
        _print_analogies(rows, len(score.sections))
    if pairs is not None:
        agreement = compare_similarity(loaded, pairs)
        found["similarity"] = {
            "spearman": agreement.correlation,
            "asked": agreement.asked,
            "known": agreement.known,
        }
        print(
            f"similarity  Spearman {agreement.correlation:.4f}  {agreement.known} of {agreement.asked} pairs known"
        )
    write_json(json_file, found)


@glove_app.command("neighbours")
def neighbours_command(
    vectors: _VectorsFile,
    words: Annotated[list[str], typer.Argument(metavar="WORD...")],
    top: Annotated[int, typer.Option(help="How many for each word.")] = 10,
) -> None:
    """The words nearest to each WORD, by cosine."""
    from manyhands.workloads.glove.vector_files import Vectors

    loaded = Vectors.load(vectors)
    _print_neighbours({word: loaded.neighbours(word, top) for word in words})


@glove_app.command("analogy")
def analogy_command(
    vectors: _VectorsFile,
    expression: Annotated[str, typer.Argument(help="As in 'king - man + woman'.")],
    top: Annotated[int, typer.Option(help="How many words.")] = 10,
) -> None:
    """The words nearest to a sum of words, those in it left out."""
    from manyhands.workloads.glove.vector_files import Vectors

    _print_neighbours({expression: Vectors.load(vectors).combine(expression, top)})


def _print_summary(summary: dict[str, Any], out: Path) -> None:
    console, seconds = Console(highlight=False, soft_wrap=True), summary["seconds"]
    console.print(
        f"glove · {summary['strategy']} · {summary['workers']} workers · {summary['tokens']:,} tokens · "
        f"{summary['vocabulary']:,} words · {summary['records']:,} records in {seconds['total']:.1f} s"
    )
    phases = ("vocabulary", "counting", "shuffling", "training")
    console.print("  ".join(f"{name} {seconds[name]:.1f} s" for name in phases))
    costs = summary["costs"]
    if costs:
        console.print(
            f"cost {costs[0]:.4f} after pass 1, {costs[-1]:.4f} after pass {len(costs)} · "
            f"{summary['records_per_s']:,.0f} records/s"
        )
    console.print(f"vectors  {out / 'vectors.txt'}")


def _print_neighbours(found: dict[str, list[tuple[str, float]]]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in found:
        table.add_column(Text(heading), overflow="fold")
    for row in range(max((len(near) for near in found.values()), default=0)):
        cells = (near[row] if row < len(near) else None for near in found.values())
        # As Text: a word may look like markup.
        table.add_row(*(Text() if cell is None else Text(f"{cell[0]}  {cell[1]:.3f}") for cell in cells))
    Console(highlight=False).print(table)


def _print_analogies(rows: list[Any], sections: int) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("analogies", "right", "known", "asked", "accuracy"):
        table.add_column(heading, justify="left" if heading == "analogies" else "right")
    for number, row in enumerate(rows):
        if number == sections:
            table.add_section()
        table.add_row(
            Text(row.name), str(row.right), str(row.known), str(row.asked), f"{100 * row.accuracy:.2f} %"
        )
    Console(highlight=False).print(table)


def _demo_words(known: dict[str, int]) -> list[str]:
    return [word for word in _DEMO_WORDS if word in known]
