"""Co-occurrence counting: how often, and how near, words stand together, with all cores and within a memory limit.

The text is taken in parts, as many numbers of words as memory allows. Of each part the places of every word are
listed, and the rows of the matrix are computed block by block in threads, each row in one go (see `count_kernels`),
and written in order. A text of one part is done then; otherwise each part is a sorted run on disk and the runs are
merged, equal pairs summed in the order of the runs. No hashing and no sorting, and memory for the text only.

Weights are 1/distance within `window` words, or plain counts, 1 each; words outside the vocabulary are skipped and do
not count for the distance, and a line's end ends a context, as in the published tool.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import UserError, check_count, format_bytes, num_of
from manyhands.observe.draw.bars import BarPhase, Bars
from manyhands.strategy import check_choice
from manyhands.workloads.glove.cooccurrence_files import RECORD, RecordWriter, read_records, temporary_folder
from manyhands.workloads.glove.corpus import BLOCK_BYTES, Block, Corpus
from manyhands.workloads.glove.count_kernels import MERGE_DONE, count_rows, merge_rows, place_words
from manyhands.workloads.glove.options import WEIGHTINGS
from manyhands.workloads.glove.vocabulary import Vocabulary, children, in_order
from manyhands.workloads.glove.word_table import BREAK, WordTable

_OUT_RECORDS = 1 << 17
_MOST_PLACES = 2**31 - 2**16  # places in a part are int32
_LEAST_PLACES = 1 << 10
_INDEX_BYTES = 40  # for each word: where its places start, and how its row fits into blocks
_LEAST_RUN_RECORDS = 256
_MOST_FAN_IN = 128  # within the usual limit of open files


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingRoom:
    """How a memory limit is spent: what is read at once, the words of a part, and the records of an output buffer.

    A merge takes `fan_in` runs at once, each with a buffer of `run_records`.
    """

    block_bytes: int = 0
    part_words: int = 0
    out_records: int
    fan_in: int
    run_records: int


def plan_memory(memory_bytes: int, words: int, table_bytes: int, workers: int, window: int) -> CountingRoom:
    """Divide `memory_bytes` for a vocabulary of `words`; a UserError says how much is needed at least.

    Each block read is bytes and, once numbered, four times as many; each of the buffers in flight must hold the
    longest row; a part costs 8 bytes a word (its number and its place); the rest is fixed.
    """
    flights, share = 2 * workers, memory_bytes // 8
    block_bytes = max(1 << 12, min(BLOCK_BYTES, share // (8 * flights)))
    out_records = max(words, min(_OUT_RECORDS, share // (RECORD.itemsize * flights)))
    out_bytes = out_records * RECORD.itemsize * flights
    dense = 8 * (words + words // 64 + words // 4096 + 2)
    fixed = table_bytes + _INDEX_BYTES * words + workers * dense + 8 * flights * block_bytes + out_bytes
    least = _LEAST_PLACES + 2 * window + block_bytes
    if memory_bytes < fixed + 8 * least:
        raise UserError(
            f"memory={format_bytes(memory_bytes)} is too little: counting {words:,} words with "
            f"{num_of(workers, 'worker')} needs at least {format_bytes(fixed + 8 * least)}; give more, or fewer words "
            "or workers"
        )
    part_words = min(_MOST_PLACES, (memory_bytes - fixed) // 8)
    run_room = (memory_bytes - dense - out_records * RECORD.itemsize) // RECORD.itemsize
    fan_in = max(2, min(_MOST_FAN_IN, run_room // _LEAST_RUN_RECORDS))
    return CountingRoom(
        block_bytes=block_bytes,
        part_words=part_words,
        out_records=out_records,
        fan_in=fan_in,
        run_records=max(1, min(1 << 16, run_room // fan_in)),
    )


def count_cooccurrence(
    corpus: Corpus,
    vocabulary: Vocabulary,
    out: Path,
    *,
    window: int = 15,
    symmetric: bool = True,
    weighting: str = "distance",
    diagonal: bool = True,
    memory_bytes: int = 2 << 30,
    workers: int = 2,
    bars: Bars | None = None,
) -> int:
    """Write the co-occurrence records of `corpus` to `out`, sorted by (word, context); return how many.

    A record is (left word, right word, sum of 1/distance) over all pairs at most `window` apart; with the `weighting`
    `count` it is their number. `symmetric` counts each pair the other way round too; without the `diagonal`, a word
    beside itself is no pair. Which records there are depends on neither `workers` nor `memory_bytes`; the
    sums do not depend on `workers` in any bit, and on `memory_bytes` by no more than rounding. Temporary files lie in
    a folder `.tmp-…` beside `out` and are removed whatever happens.
    """
    check_count("window", window)
    check_count("workers", workers)
    check_choice("weighting", weighting, tuple(WEIGHTINGS))
    table = WordTable.of(word.encode() for word in vocabulary.words)
    if len(table) != len(vocabulary):
        raise UserError("words of the vocabulary must not contain white space")
    room = plan_memory(memory_bytes, len(vocabulary), table.num_bytes, workers, window)
    bars = bars or Bars()
    with temporary_folder(out) as folder:
        runs, counted = list[Path](), 0
        with children(workers) as pool:
            how = WEIGHTINGS[weighting](window), (symmetric, diagonal)
            counter = _RowCounter(pool, len(vocabulary), workers, room.out_records, *how)
            with bars.phase("counting", int(vocabulary.counts.sum()), "tokens") as phase:
                for text, carried in _parts(corpus, table, pool, workers, window, room):
                    runs.append(folder / f"run-{len(runs)}")
                    counted += counter.count(text, carried, runs[-1], phase)
        whole = folder / "whole"
        if len(runs) == 1:
            runs[0].rename(whole)
        else:
            with bars.phase("merging", counted, "records") as phase:
                counted = merge_runs(runs, whole, len(vocabulary), room, phase)
        whole.replace(out)
    return counted


def _parts(
    corpus: Corpus, table: WordTable, pool: ThreadPoolExecutor, workers: int, window: int, room: CountingRoom
) -> Iterator[tuple[NDArray[np.int32], int]]:
    """The text as numbers of words, in parts with a BREAK at both ends; each begins with what it carries over.

    The second of a pair is how many items at the beginning belong to the part before: the BREAK and its last `window`.
    """
    part = np.empty(room.part_words, np.int32)  # the system gives memory only for what is written
    part[0] = BREAK
    carried = size = 1

    def number(block: Block) -> NDArray[np.int32]:
        numbers = np.empty(len(block.data), np.int32)
        return numbers[: table.numbers(block.data, numbers)]

    for numbers in in_order(pool, number, corpus.blocks(room.block_bytes), workers + 1):
        at = 0
        while at < len(numbers):
            taken = min(len(numbers) - at, len(part) - 1 - size)
            part[size : size + taken] = numbers[at : at + taken]
            size, at = size + taken, at + taken
            if size == len(part) - 1:
                part[size] = BREAK
                yield part[: size + 1], carried
                kept = part[size - window : size].copy()
                part[1 : 1 + len(kept)] = kept
                carried = size = 1 + len(kept)
    part[size] = BREAK
    if size > carried or carried == 1:
        yield part[: size + 1], carried


class _RowCounter:
    """Counts the rows of a part in threads, in blocks whose records fit a buffer, and writes them in order."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        words: int,
        workers: int,
        out_records: int,
        weights: NDArray[np.float64],
        kinds: tuple[bool, bool],
    ) -> None:
        """`weights` are by distance, from 1; `kinds` are symmetric and diagonal, as of `count_cooccurrence`."""
        self._pool, self._words, self._flights, self._out_records = pool, words, 2 * workers, out_records
        self._weights, self._kinds = weights, kinds
        self._rows: SimpleQueue[tuple[NDArray[Any], ...]] = SimpleQueue()
        self._buffers: SimpleQueue[NDArray[Any]] = SimpleQueue()
        for number in range(self._flights):
            self._buffers.put(np.empty(out_records, RECORD))
            if number < workers:
                self._rows.put(_dense_row(words))

    def count(self, text: NDArray[np.int32], carried: int, path: Path, phase: BarPhase) -> int:
        starts, places = np.zeros(self._words + 1, np.int64), np.empty(len(text), np.int32)
        place_words(text, starts, places)

        def rows(block: tuple[int, int]) -> tuple[NDArray[Any], int, int]:
            buffer, dense = self._buffers.get(), self._rows.get()
            index, how = (starts, places), (self._weights, self._kinds)
            found = count_rows(text, index, block, carried, *how, dense, _views(buffer))
            self._rows.put(dense)
            return buffer, int(found), int(starts[block[1]] - starts[block[0]])

        with RecordWriter(path) as writer:
            for buffer, found, visited in in_order(self._pool, rows, self._blocks(starts), self._flights):
                writer.write(buffer[:found])
                self._buffers.put(buffer)
                phase.advance(visited)
            return writer.written

    def _blocks(self, starts: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Ranges of rows of which each has, at the most, as many records as a buffer holds."""
        reach = len(self._weights) * (2 if self._kinds[0] else 1)
        most = np.minimum(np.diff(starts) * reach, self._words)
        sums = np.concatenate([[0], np.cumsum(most)])
        first = 0
        while first < self._words:
            last = int(np.searchsorted(sums, sums[first] + self._out_records, side="right")) - 1
            yield first, last
            first = last


def _dense_row(words: int) -> tuple[NDArray[Any], ...]:
    """One row of the matrix, dense, and which cells and groups of 64 are in use, a bit each; all 0 between rows."""
    return np.zeros(words), np.zeros(-(-words // 64), np.int64), np.zeros(-(-words // 4096), np.int64)


def _views(buffer: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """A buffer of records as the kernels take it: the same memory as int64 and as float64."""
    return buffer.view(np.int64), buffer.view(np.float64)


def merge_runs(runs: Sequence[Path], out: Path, words: int, room: CountingRoom, phase: BarPhase) -> int:
    """Merge runs into `out`, more than `room.fan_in` of them in several rounds; removes them, returns the records."""
    waiting, names = list(runs), (out.with_name(f"{out.name}.{number}") for number in count())
    while len(waiting) > room.fan_in:
        # The oldest first, and their sum in their place: sums stay in the order of the text.
        groups = [waiting[at : at + room.fan_in] for at in range(0, len(waiting), room.fan_in)]
        waiting = [next(names) for _ in groups]
        for group, path in zip(groups, waiting, strict=True):
            _merge_once(group, path, words, room, phase)
    return _merge_once(waiting, out, words, room, phase)


def _merge_once(runs: Sequence[Path], out: Path, words: int, room: CountingRoom, phase: BarPhase) -> int:
    buffers = np.empty((len(runs), room.run_records), RECORD)
    done = np.empty(max(words, room.out_records), RECORD)
    cursors, ends = np.zeros(len(runs), np.int64), np.zeros(len(runs), np.int64)
    dense, state = _dense_row(words), np.zeros(3, np.int64)
    with ExitStack() as stack:
        writer = stack.enter_context(RecordWriter(out))
        files = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in runs]
        for file in files:
            stack.callback(os.close, file)

        def refill(run: int) -> None:
            cursors[run], ends[run] = 0, read_records(files[run], buffers[run])
            phase.advance(int(ends[run]))

        for run in range(len(runs)):
            refill(run)
        answer = 0
        while answer != MERGE_DONE:
            answer = int(merge_rows(state, _views(buffers), cursors, ends, dense, _views(done)))
            if answer >= 0:
                refill(answer)
            else:  # done, or full
                writer.write(done[: state[2]])
                state[2] = 0
    for path in runs:
        path.unlink()
    return writer.written
