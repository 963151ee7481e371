"""From a corpus to word vectors in one call: vocabulary, counts, shuffled records, training, files.

    DIR/vocab.txt          words and counts
    DIR/cooccurrence.bin   records sorted by (word, context), where they are to be kept
    DIR/vectors.txt        word + context vectors, Stanford's text
    DIR/shuffled.bin       the records in the order of training, until that is over: a resumed run goes on with them

DIR is the directory of the training's run, too. Everything temporary lies in a folder DIR/.tmp-… that is removed
whatever happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from manyhands.data.store.atomic import reason
from manyhands.data.store.rundir import IN_PYTHON, ON_COMMAND_LINE, RunDirectory, require_free
from manyhands.engine.fitting import fit_or_kept
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.options import Options
from manyhands.engine.run import PASS_LOSS, Run
from manyhands.engine.training import Keeping, Kept
from manyhands.errors import UserError
from manyhands.native.warming import prepare
from manyhands.observe.draw.bars import Bars, bar_view
from manyhands.places.local.capacity import Amount, MemoryCost, check_capacity, of_processes
from manyhands.strategy import Strategy
from manyhands.workloads.glove.cooccurrence_files import record_count, shuffle_records, temporary_folder
from manyhands.workloads.glove.corpus import Corpus
from manyhands.workloads.glove.counting import count_cooccurrence
from manyhands.workloads.glove.glove_model import GloveModel
from manyhands.workloads.glove.glove_server import GloveTables
from manyhands.workloads.glove.glove_task import GloveTask, check_together
from manyhands.workloads.glove.options import CountingOptions, GloveOptions
from manyhands.workloads.glove.vector_files import Vectors
from manyhands.workloads.glove.vocabulary import Vocabulary, count_words
from manyhands.workloads.task_options import check_options

__all__ = [
    "OWN_FILES",
    "AfterPass",
    "GloveOptions",
    "GloveResult",
    "Keeping",
    "Learning",
    "Learnt",
    "check_glove",
    "learn_vectors",
    "shuffled_records",
    "summed_vectors",
    "train_glove",
]

AfterPass = Callable[[int, float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class GloveResult:
    """What came out: the parameters at the end, of words and of contexts, row by row."""

    costs: list[float]
    """After each finished pass, the mean of f d^2 / 2 over all records, each taken before its own update."""

    word: NDArray[Any]
    context: NDArray[Any]
    word_bias: NDArray[Any]
    context_bias: NDArray[Any]
    seconds: float
    """Of training: reading records and starting workers included."""

    records_per_s: float
    interrupted: bool
    """Whether Ctrl-C ended it before the last pass was over; the parameters are those that were kept."""

    summary: Mapping[str, Any] = field(default_factory=dict)
    """That of `fit`; of an interrupted run there is none."""

    @property
    def biases(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Those of words and those of contexts."""
        return self.word_bias, self.context_bias

    def vectors(self) -> NDArray[np.float32]:
        """(V, dim): the sum of each word's two vectors, the usual result."""
        both: NDArray[np.float32] = (self.word + self.context).astype(np.float32)
        return both


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

    `after_pass(number, mean_cost)` is called in this thread after each pass. With `keep`, the run has a directory:
    Ctrl-C then keeps what is done (`interrupted`) and the run can be resumed; without one, or before anything is kept,
    it is raised. Raises UserError for what makes no sense, DataError for a bad file, NonFinite when training breaks,
    WorkerFailed naming the first worker that failed.
    """
    chosen = Strategy.parse(strategy)
    work = GloveTask.of(records, vocabulary_size, options)
    task = work.for_strategy(chosen, workers)
    per_step = work.batch_size if task.compiled else options.batch
    heard = _Heard(work.num_records, per_step, after_pass)
    asked = keep.options if keep is not None else Options(resume_command="", progress="none")
    if bars is not None:
        phase = bars.phase("training", work.num_records * options.passes, "records")
        asked = replace(asked, view=partial(bar_view, phase, heard.records_after))
    prepare("glove")
    began = time.monotonic()
    ended = fit_or_kept(
        task,
        chosen,
        workers=workers,
        epochs=task.epochs,
        seed=options.seed,
        options=replace(asked, on_rows=heard.rows, allow_overload=options.allow_overload),
        keep=keep,
    )
    return _result(task, ended, heard.records, time.monotonic() - began)


def _result(task: AnyTask, ended: Run | Kept, records: int, seconds: float) -> GloveResult:
    """Of a run that trained `records` records, to its end or until it was interrupted."""
    if isinstance(ended, Kept):
        model, rows, summary = task.model(), ended.rows, {}
        model.load_state_dict(ended.values)
    else:
        model, rows, summary = ended.model, list(ended.history), ended.summary
    assert isinstance(model, GloveModel | GloveTables), "what the task builds"
    found = model.snapshot()
    return GloveResult(
        costs=[row["metrics"][PASS_LOSS] for row in rows if PASS_LOSS in row.get("metrics", {})],
        word=found.word,
        context=found.context,
        word_bias=found.word_bias,
        context_bias=found.context_bias,
        seconds=seconds,
        records_per_s=records / seconds,
        interrupted=isinstance(ended, Kept),
        summary=summary,
    )


def summed_vectors(model: nn.Module) -> NDArray[np.float32]:
    """(V, dim): the sum of each word's two vectors, of any model that a task of word vectors builds."""
    assert isinstance(model, GloveModel | GloveTables), "what the task builds"
    found = model.snapshot()
    both: NDArray[np.float32] = (found.word + found.context).astype(np.float32)
    return both


class _Heard:
    """What is heard of a run while it goes on: how many records, and whose passes are over."""

    def __init__(self, num_records: int, per_step: int, after_pass: AfterPass | None) -> None:
        self.records = 0
        self._num_records = num_records
        self._per_step = per_step
        self._per_pass = -(-num_records // per_step)
        self._after_pass = after_pass

    def records_after(self, step: int) -> int:
        """How many records so many steps visit; the last of a pass may be short."""
        whole, more = divmod(step, self._per_pass)
        return whole * self._num_records + min(more * self._per_step, self._num_records)

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            step = row["step"]
            if PASS_LOSS not in row.get("metrics", {}):
                self.records += self.records_after(step) - self.records_after(step - 1)
            elif self._after_pass is not None:
                self._after_pass(step // self._per_pass, row["metrics"][PASS_LOSS])


def check_glove(strategy: str | Strategy, options: GloveOptions, workers: int) -> None:
    """Raise the UserError that `train_glove` would, before hours of counting."""
    chosen = Strategy.parse(strategy)
    check_together(chosen, options, workers)
    if chosen.most_workers != 1:
        check_capacity(_cost(chosen), workers, allow_overload=options.allow_overload)


def _cost(strategy: Strategy) -> MemoryCost:
    """What the workers take before anything is known of the corpus: threads share one process, the others are many."""
    if strategy.facts.in_threads:
        return MemoryCost(per_worker=Amount(tasks=1))
    return of_processes(others=strategy.processes(0).get("server", 0) + 1)  # and the template


OWN_FILES = frozenset({"vocab.txt", "cooccurrence.bin", "vectors.txt", "shuffled.bin"})
"""What is not the run's own in its directory."""


@dataclass(frozen=True, kw_only=True)
class Learning(CountingOptions):
    """What to learn and how: the settings of counting, those of training, and who does it."""

    glove: GloveOptions = field(default_factory=GloveOptions)

    def __post_init__(self) -> None:
        Strategy.parse(self.strategy)
        check_options(self)
        check_glove(self.strategy, self.glove, self.training_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What came out: the vectors, the vocabulary, and a summary that JSON can hold."""

    vectors: Vectors
    vocabulary: Vocabulary
    summary: dict[str, Any]

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended training; the vectors are those of the last checkpoint."""
        return bool(self.summary["interrupted"])


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

    Ctrl-C while training keeps what is done, and `resume` goes on with it; earlier it is raised, and only whole files
    stay. `options` are those of `fit`.
    """
    corpus.check()
    if resume:
        RunDirectory.open(out, lock=False)  # UserError where there is none
    else:
        commanded = options is not None and options.resume_command
        require_free(out, OWN_FILES, ON_COMMAND_LINE if commanded else IN_PYTHON)
    _make_folder(out)
    prepare("glove")
    clock = _Clock()
    with clock.phase("total"):
        vocabulary, records = _prepare(corpus, out, learning, clock, bars, resume)
        with clock.phase("training"):
            result = _train(len(vocabulary), out, learning, bars, after_pass, (resume, options))
        vectors = Vectors(vocabulary.words, result.vectors())
        vectors.save_text(out / "vectors.txt")
    summary = {
        "task": "glove",
        "corpus": str(corpus),
        "strategy": str(Strategy.parse(learning.strategy)),
        "workers": learning.training_workers,
        "tokens": vocabulary.tokens,
        "vocabulary": len(vocabulary),
        "records": records,
        "seconds": clock.seconds,
        "tokens_per_s": vocabulary.tokens / max(clock.seconds["counting"], 1e-9),
        "records_per_s": result.records_per_s,
        "costs": list(result.costs),
        "interrupted": result.interrupted,
        "settings": asdict(learning),
        "run": dict(result.summary),
    }
    return Learnt(vectors=vectors, vocabulary=vocabulary, summary=summary)


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
    with temporary_folder(out / "vectors.txt") as folder:
        with clock.phase("vocabulary"):
            vocabulary = count_words(
                corpus,
                min_count=learning.min_count,
                max_size=learning.max_vocab,
                workers=learning.workers,
                bars=bars,
            )
            vocabulary.save(out / "vocab.txt")
        counts = (out if learning.keep_counts else folder) / "cooccurrence.bin"
        with clock.phase("counting"):
            records = _count(corpus, vocabulary, counts, learning, bars)
        with clock.phase("shuffling"):
            memory, seed = learning.memory_bytes, learning.glove.seed
            shuffle_records(counts, folder / "shuffled.bin", seed=seed, memory_bytes=memory, bars=bars)
            (folder / "shuffled.bin").replace(shuffled)
    return vocabulary, records


def _train(
    vocabulary_size: int,
    out: Path,
    learning: Learning,
    bars: Bars | None,
    after_pass: AfterPass | None,
    kept: tuple[bool, Options | None],
) -> GloveResult:
    """Train on the shuffled records, which stay as long as a run may want to go on with them."""
    (resume, options), shuffled = kept, out / "shuffled.bin"
    options = replace(options or Options(resume_command="", progress="none"), own_files=OWN_FILES)
    try:
        result = train_glove(
            shuffled,
            vocabulary_size,
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
    if not result.interrupted:
        shuffled.unlink(missing_ok=True)
    return result


def _count(
    corpus: Corpus, vocabulary: Vocabulary, counts: Path, learning: Learning, bars: Bars | None
) -> int:
    records = count_cooccurrence(
        corpus,
        vocabulary,
        counts,
        window=learning.window,
        symmetric=learning.symmetric,
        weighting=learning.weighting,
        diagonal=learning.diagonal,
        memory_bytes=learning.memory_bytes,
        workers=learning.workers,
        bars=bars,
    )
    if not records:
        raise UserError(
            f"no two words of the vocabulary stand together in a line of {corpus}; give longer lines, or a lower "
            "min_count"
        )
    return records


class _Clock:
    """Seconds of each phase, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - began


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={out} cannot be a folder: {reason(error)}; name another") from error
