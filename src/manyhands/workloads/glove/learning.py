"""From a corpus to word vectors in one call: vocabulary, counts, shuffled records, training, files.

    DIR/vocab.txt          words and counts
    DIR/cooccurrence.bin   records sorted by (word, context), where they are to be kept
    DIR/vectors.txt        word + context vectors, Stanford's text
    DIR/shuffled.bin       the records in the order of training, until that is over: a resumed run continues with them

DIR is the directory of the training's run, too. Everything temporary lies in a folder DIR/.tmp-… that is removed
whatever happens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from manyhands.data.store.atomic import reason
from manyhands.data.store.rundir import IN_PYTHON, ON_COMMAND_LINE, RunDirectory, require_free
from manyhands.engine.options import Options
from manyhands.engine.training import Keeping
from manyhands.errors import UserError
from manyhands.native.warming import prepare
from manyhands.observe.draw.bars import Bars
from manyhands.places.local.host import Amount, MemoryCost, check_capacity, of_processes
from manyhands.strategy import Strategy
from manyhands.workloads.compiled_training import AfterPass, CompiledResult, train_compiled
from manyhands.workloads.glove.cooccurrence_files import record_count, shuffle_records, temporary_folder
from manyhands.workloads.glove.corpus import Corpus
from manyhands.workloads.glove.counting import count_cooccurrence
from manyhands.workloads.glove.glove_model import GloveModel, GloveSnapshot
from manyhands.workloads.glove.glove_server import GloveTables
from manyhands.workloads.glove.glove_task import GloveTask, check_together
from manyhands.workloads.glove.options import CountingOptions, GloveOptions
from manyhands.workloads.glove.vector_files import Vectors
from manyhands.workloads.glove.vocabulary import Vocabulary, count_words
from manyhands.workloads.task_options import check_options

__all__ = [
    "GloveOptions",
    "GloveResult",
    "Keeping",
    "Learning",
    "learn_vectors",
    "shuffled_records",
    "snapshot_of",
    "train_glove",
]


@dataclass(kw_only=True, slots=True)
class GloveResult(CompiledResult):
    """What came out: the parameters at the end, of words and of contexts, row by row."""

    model: GloveSnapshot
    costs: list[float]
    """After each finished pass, the mean of f d^2 / 2 over all records, each taken before its own update."""
    records_per_s: float


def train_glove(
    records: Path,
    vocabulary_size: int,
    options: GloveOptions,
    *,
    strategy: str | Strategy = "single",
    workers: int = 1,
    bars: Bars | None = None,
    after_pass: AfterPass | None = None,
    keep: Keeping | None = None,
) -> GloveResult:
    """Train on a file of shuffled records, in its order in every pass.

    With `keep`, the run has a directory, as `train_compiled` says. Raises UserError for what makes no sense, DataError
    for a bad file, NonFinite when training breaks, WorkerFailed naming the first worker that failed.
    """
    chosen = Strategy.parse(strategy)
    work = GloveTask.of(records, vocabulary_size, options)
    task = work.for_strategy(chosen, workers)
    per_step = work.batch_size if task.compiled else options.batch
    per_pass, trained_records = -(-work.num_records // per_step), 0

    def records_after(step: int) -> int:
        """How many records so many steps visit; the last of a pass may be short."""
        whole, more = divmod(step, per_pass)
        return whole * work.num_records + min(more * per_step, work.num_records)

    def count(step: int) -> None:
        nonlocal trained_records
        trained_records += records_after(step) - records_after(step - 1)

    bar = None if bars is None else bars.phase("training", work.num_records * options.passes, "records")
    prepare("glove")
    began = time.monotonic()
    trained = train_compiled(
        task,
        chosen,
        workers=workers,
        epochs=task.epochs,
        options=options,
        shown=None if bar is None else (bar, records_after),
        keep=keep,
        after_pass=after_pass,
        on_step=count,
    )
    seconds, model = time.monotonic() - began, trained.model
    if model is None:
        model = task.model()
        model.load_state_dict(trained.values)
    return GloveResult(
        model=snapshot_of(model),
        costs=trained.pass_losses,
        seconds=seconds,
        records_per_s=trained_records / seconds,
        interrupted=not trained.summary,
        summary=trained.summary,
    )


def snapshot_of(model: nn.Module) -> GloveSnapshot:
    assert isinstance(model, GloveModel | GloveTables), "what a task of word vectors builds"
    return model.snapshot()


_OWN_FILES = frozenset({"vocab.txt", "cooccurrence.bin", "vectors.txt", "shuffled.bin"})


@dataclass(frozen=True, kw_only=True)
class Learning(CountingOptions):
    """What to learn and how: the settings of counting, those of training, and who does it."""

    glove: GloveOptions = field(default_factory=GloveOptions)

    def __post_init__(self) -> None:
        """Raise the UserError that `train_glove` would, before hours of counting."""
        strategy = Strategy.parse(self.strategy)
        check_options(self)
        check_together(strategy, self.glove, self.training_workers)
        if strategy.most_workers == 1:
            return
        # Nothing is known of the corpus yet. Threads share one process, the others are many, with the template.
        cost = MemoryCost(per_worker=Amount(tasks=1))
        if not strategy.facts.in_threads:
            cost = of_processes(others=strategy.processes(0).get("server", 0) + 1)
        check_capacity(cost, self.training_workers, allow_overload=self.glove.allow_overload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    vectors: Vectors
    vocabulary: Vocabulary
    summary: dict[str, Any]  # as JSON
    interrupted: bool  # by Ctrl-C in training: the vectors are those of the last checkpoint


def learn_vectors(
    corpus: Corpus,
    out: Path,
    learning: Learning,
    *,
    bars: Bars | None = None,
    after_pass: AfterPass | None = None,
    resume: bool = False,
    options: Options | None = None,
) -> Learnt:
    """Learn word vectors from `corpus` and write them to the folder `out`, which is the run's directory.

    Ctrl-C while training keeps what is done, and `resume` continues it; earlier it is raised, and only whole files
    stay. `options` are those of `fit`.
    """
    corpus.check()
    _open_folder(out, options, resume=resume)
    prepare("glove")
    clock, shuffled = _Clock(), out / "shuffled.bin"
    options = replace(options or Options(resume_command="", progress="none"), own_files=_OWN_FILES)
    with clock.phase("total"):
        vocabulary, records = _prepare(corpus, out, learning, clock, bars, resume)
        try:
            with clock.phase("training"):
                result = train_glove(
                    shuffled,
                    len(vocabulary),
                    learning.glove,
                    strategy=learning.strategy,
                    workers=learning.training_workers,
                    bars=bars,
                    after_pass=after_pass,
                    keep=Keeping(out=out, resume=resume, options=options),
                )
        except BaseException:
            if not RunDirectory.is_one(out):
                shuffled.unlink(missing_ok=True)
            raise
        if not result.interrupted:  # an interrupted run may be resumed with the records
            shuffled.unlink(missing_ok=True)
        vectors = Vectors(vocabulary.words, result.model.vectors())
        vectors.save_text(out / "vectors.txt")
    summary = {
        "task": "glove",
        "corpus": str(corpus),
        "strategy": str(Strategy.parse(learning.strategy)),
        "workers": learning.training_workers,
        "tokens": vocabulary.tokens,
        "vocabulary": len(vocabulary),
        "records": records,
        "seconds": dict(clock),
        "tokens_per_s": vocabulary.tokens / max(clock["counting"], 1e-9),
        "records_per_s": result.records_per_s,
        "costs": list(result.costs),
        "interrupted": result.interrupted,
        "settings": asdict(learning),
        "run": dict(result.summary),
    }
    return Learnt(vectors=vectors, vocabulary=vocabulary, summary=summary, interrupted=result.interrupted)


def _open_folder(out: Path, options: Options | None, *, resume: bool) -> None:
    if resume:
        RunDirectory.open(out, lock=False)  # UserError where there is none
    else:
        commanded = options is not None and options.resume_command
        require_free(out, _OWN_FILES, ON_COMMAND_LINE if commanded else IN_PYTHON)
    _make_folder(out)


def shuffled_records(
    corpus: Corpus, out: Path, learning: Learning, bars: Bars | None = None
) -> tuple[Vocabulary, Path]:
    """Count and shuffle, for whoever trains by other means: the vocabulary, and the file of records in `out`."""
    corpus.check()
    _make_folder(out)
    prepare("glove")
    vocabulary, _ = _prepare(corpus, out, learning, _Clock(), bars, False)
    return vocabulary, out / "shuffled.bin"


def _prepare(
    corpus: Corpus, out: Path, learning: Learning, clock: _Clock, bars: Bars | None, resume: bool
) -> tuple[Vocabulary, int]:
    """The vocabulary and the number of shuffled records, which are in their file; what a run has is not made again."""
    shuffled = out / "shuffled.bin"
    if resume and shuffled.exists():
        with clock.phase("vocabulary"), clock.phase("counting"), clock.phase("shuffling"):
            return Vocabulary.load(out / "vocab.txt"), record_count(shuffled)
    memory = learning.memory_bytes
    with temporary_folder(out / "vectors.txt") as folder:
        with clock.phase("vocabulary"):
            least, most, workers = learning.min_count, learning.max_vocab, learning.workers
            vocabulary = count_words(corpus, min_count=least, max_size=most, workers=workers, bars=bars)
            vocabulary.save(out / "vocab.txt")
        counts = (out if learning.keep_counts else folder) / "cooccurrence.bin"
        with clock.phase("counting"):
            names = ("window", "symmetric", "weighting", "diagonal", "memory_bytes", "workers")
            given = {name: getattr(learning, name) for name in names}
            records = count_cooccurrence(corpus, vocabulary, counts, **given, bars=bars)
        if not records:
            raise UserError(
                f"no two words of the vocabulary occur in the same line of {corpus}; give longer lines, or a lower "
                "min_count"
            )
        with clock.phase("shuffling"):
            new, seed = folder / "shuffled.bin", learning.glove.seed
            shuffle_records(counts, new, seed=seed, memory_bytes=memory, bars=bars)
            new.replace(shuffled)
    return vocabulary, records


class _Clock(dict[str, float]):
    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self[name] = time.monotonic() - began


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={out} cannot be used as a folder: {reason(error)}; name another") from error
