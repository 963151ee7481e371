"""Which words there are and how often: counted with all cores, saved as Stanford's `vocab.txt`.

Words come by falling count, equal counts in the order of their bytes, as the published `vocab_count` has them; a word's
number is its place in this order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from manyhands.data.store.atomic import reason, write_atomically
from manyhands.errors import DataError, UserError, check_count, num_of
from manyhands.observe.draw.bars import Bars
from manyhands.workloads.glove.corpus import Block, Corpus
from manyhands.workloads.glove.word_table import WordTable

_MOST_COUNT = 1 << 40  # of one word; the sum over all words then fits in 64 bits


class Vocabulary:
    """Words and their counts, most frequent first; `tokens` is how many words the corpus has, rare ones included."""

    def __init__(
        self, words: Sequence[str], counts: Sequence[int] | NDArray[np.int64], tokens: int | None = None
    ) -> None:
        self.words: tuple[str, ...] = tuple(words)
        self.counts: NDArray[np.int64] = np.asarray(counts, np.int64)
        size = len(self.words)
        if self.counts.shape != (size,):
            raise UserError(f"a vocabulary of {size} words needs as many counts, not {self.counts.shape}")
        if len(set(self.words)) != size:
            raise UserError("a vocabulary must not contain a word twice")
        self.tokens = int(self.counts.sum()) if tokens is None else tokens

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def index(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words)}

    def save(self, path: Path | str) -> None:
        lines = (f"{word} {count}\n" for word, count in zip(self.words, self.counts.tolist(), strict=True))
        write_atomically(Path(path), ["".join(lines).encode()])

    @classmethod
    def load(cls, path: Path | str) -> Vocabulary:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"vocabulary {path} cannot be read: {reason(error)}") from error
        words, counts = list[str](), list[int]()
        # Only a newline ends a line here: str.splitlines would cut words that have other separators in them.
        for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), 1):
            word, _, text = line.rstrip(b"\r").rpartition(b" ")
            count = -1
            with suppress(ValueError):
                words.append(word.decode())
                count = int(text) if word else -1
            if not 0 <= count <= _MOST_COUNT:
                raise DataError(f"{path}, line {number}: {line[:80]!r} is not a word and a count")
            counts.append(count)
        return cls(words, counts)


def count_words(
    corpus: Corpus,
    *,
    min_count: int = 5,
    max_size: int | None = None,
    workers: int = 2,
    bars: Bars | None = None,
) -> Vocabulary:
    """The words that come at least `min_count` times, at most the `max_size` most frequent.

    Each of `workers` threads counts blocks in a table of its own; the tables are added at the end, so the result does
    not depend on who counted what. A vocabulary of fewer than two words is rejected: nothing can be learnt from it.
    """
    check_count("min_count", min_count)
    if max_size is not None and max_size < 2:
        raise UserError(f"max_size={max_size} must be at least 2")
    tables = [WordTable(1 << 16) for _ in range(workers)]
    free: SimpleQueue[WordTable] = SimpleQueue()
    for table in tables:
        free.put(table)

    def count(block: Block) -> tuple[int, float]:
        table = free.get()
        try:
            return table.count(block.data), block.share
        finally:
            free.put(table)

    tokens = 0
    with children(workers) as pool, (bars or Bars()).phase("vocabulary", None, "tokens") as phase:
        for counted, share in in_order(pool, count, corpus.blocks(), 2 * workers):
            tokens += counted
            phase.advance(counted, total=tokens / max(share, 1e-9))
    whole, *others = tables
    for table in others:
        whole.absorb(table)
    counts = whole.counts
    chosen = [(-int(counts[at]), whole.word(at)) for at in np.flatnonzero(counts >= min_count).tolist()]
    chosen = sorted(chosen)[:max_size]
    if len(chosen) < 2:
        raise UserError(
            f"only {len(chosen)} of {num_of(len(whole), 'word')} in {corpus} occur at least min_count={min_count} "
            "times; at least 2 are needed: give more text, or a lower min_count"
        )
    words, often = [word.decode() for _, word in chosen], [-count for count, _ in chosen]
    return Vocabulary(words, often, tokens=int(counts.sum()))


Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def children(workers: int) -> Iterator[ThreadPoolExecutor]:
    """`workers` threads; on the way out what has not begun is dropped and what runs is awaited."""
    check_count("workers", workers)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="words")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def in_order(
    pool: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """`function` of each item, in the order of the items, at most `ahead` of them begun and not yet taken.

    Items are drawn in the calling thread, so that reading overlaps with the work.
    """
    waiting: deque[Future[Result]] = deque()
    for item in items:
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
        waiting.append(pool.submit(function, item))
    while waiting:
        yield waiting.popleft().result()
