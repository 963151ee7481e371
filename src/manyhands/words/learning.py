"""From a corpus to word vectors in one call: vocabulary, counts, shuffled records, training, files.

    DIR/vocab.txt          words and counts
    DIR/cooccurrence.bin   records sorted by (word, context), where they are to be kept
    DIR/vectors.txt        word + context vectors, Stanford's text

Everything temporary lies in a folder DIR/.tmp-… that is removed whatever happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from manyhands.draw.bars import Bars
from manyhands.errors import UserError
from manyhands.store.atomic import reason
from manyhands.strategy import Strategy
from manyhands.words.corpus import Corpus
from manyhands.words.counting import count_cooccurrence
from manyhands.words.glove import GloveOptions, check_glove, train_glove
from manyhands.words.records import temporary_folder
from manyhands.words.shuffle import shuffle_records
from manyhands.words.vectors import Vectors
from manyhands.words.vocabulary import Vocabulary, count_words

__all__ = ["BATCH", "Learning", "Learnt", "learn_vectors", "usual_batch"]

BATCH = 1024
"""Records at a time where a strategy works on batches and no other number is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """What to learn and how: the settings of counting, those of training, and who does it.

    `workers` threads count; as many workers train, under `single` one.
    """

    min_count: int = 5
    max_vocab: int | None = None
    window: int = 15
    symmetric: bool = True
    memory_bytes: int = 2 * 1024**3
    workers: int = 2
    strategy: str = "hogwild"
    keep_counts: bool = False
    glove: GloveOptions = field(default_factory=GloveOptions)

    def __post_init__(self) -> None:
        Strategy.parse(self.strategy)
        for name, least in (("min_count", 1), ("window", 1), ("memory_bytes", 1), ("workers", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.max_vocab is not None and self.max_vocab < 2:
            raise UserError(f"max_vocab={self.max_vocab} must be at least 2")
        check_glove(self.strategy, self.glove, self.training_workers)

    @property
    def training_workers(self) -> int:
        """How many train: `single` is one, whoever counted."""
        return min(self.workers, Strategy.parse(self.strategy).most_workers or self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What came out: the vectors, the vocabulary, and a summary that JSON can hold."""

    vectors: Vectors
    vocabulary: Vocabulary
    summary: dict[str, Any]

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended training; the vectors are those of the last whole pass."""
        return bool(self.summary["interrupted"])


def usual_batch(strategy: str) -> int:
    """How many records a strategy takes at a time unless it is told: one, or `BATCH`."""
    return BATCH if Strategy.parse(strategy).record_order is None else 1


def learn_vectors(
    corpus: Corpus,
    out: Path,
    learning: Learning,
    *,
    bars: Bars | None = None,
    after_pass: Callable[[int, float], None] | None = None,
) -> Learnt:
    """Learn word vectors from `corpus` and write them to the folder `out`.

    Ctrl-C while training keeps the vectors of the last whole pass; earlier it is raised, and only whole files stay.
    """
    corpus.check()
    _make_folder(out)
    clock = _Clock()
    with temporary_folder(out / "vectors.txt") as folder, clock.phase("total"):
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
        shuffled = folder / "shuffled.bin"
        with clock.phase("shuffling"):
            memory, seed = learning.memory_bytes, learning.glove.seed
            shuffle_records(counts, shuffled, seed=seed, memory_bytes=memory, bars=bars)
            if not learning.keep_counts:
                counts.unlink()
        with clock.phase("training"):
            result = train_glove(
                shuffled,
                len(vocabulary),
                learning.glove,
                strategy=learning.strategy,
                workers=learning.training_workers,
                bars=bars,
                after_pass=after_pass,
            )
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
    }
    return Learnt(vectors=vectors, vocabulary=vocabulary, summary=summary)


def _count(
    corpus: Corpus, vocabulary: Vocabulary, counts: Path, learning: Learning, bars: Bars | None
) -> int:
    records = count_cooccurrence(
        corpus,
        vocabulary,
        counts,
        window=learning.window,
        symmetric=learning.symmetric,
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
