"""Sorted runs of records on disk, and merging them: an external merge sort whose merge sums equal pairs.

Runs are sorted by (word, context). Because a word's row fits in memory as a dense row, merging k runs costs the
same for each record however many runs there are; equal pairs are summed in the order of the runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.observe.draw.bars import BarPhase
from manyhands.workloads.glove.cooccurrence_files import RECORD, RecordWriter, read_records
from manyhands.workloads.glove.count_kernels import MERGE_DONE, MERGE_FULL, merge_rows

__all__ = ["DenseRow", "MergeRoom", "merge_runs", "view_records"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRoom:
    """How much memory a merge may use: `fan_in` runs at once, each with a buffer; the rest for what comes out."""

    fan_in: int
    run_records: int
    out_records: int


class DenseRow:
    """One row of the matrix, dense, with a bitmap of the cells in use; all zero between rows."""

    def __init__(self, words: int) -> None:
        self.row = np.zeros(words, np.float64)
        self.used = np.zeros(-(-words // 64), np.int64)
        self.groups = np.zeros(-(-words // 4096), np.int64)

    @staticmethod
    def num_bytes(words: int) -> int:
        """The memory that a row of so many words takes."""
        return 8 * (words + words // 64 + words // 4096 + 2)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """As the kernels take them."""
        return self.row, self.used, self.groups


def view_records(buffer: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """A buffer of records as the kernels take it: the same memory as int64 and as float64."""
    return buffer.view(np.int64), buffer.view(np.float64)


def merge_runs(runs: Sequence[Path], out: Path, words: int, room: MergeRoom, phase: BarPhase) -> int:
    """Merge runs into `out`, more than `room.fan_in` of them in several rounds; removes them, returns the records."""
    waiting = list(runs)
    number = 0
    while len(waiting) > room.fan_in:
        # The oldest first, and their sum in their place: sums stay in the order of the text.
        merged: list[Path] = []
        for start in range(0, len(waiting), room.fan_in):
            group = waiting[start : start + room.fan_in]
            path = out.with_name(f"{out.name}.{number}")
            number += 1
            _merge_once(group, path, words, room, phase)
            merged.append(path)
        waiting = merged
    return _merge_once(waiting, out, words, room, phase)


def _merge_once(runs: Sequence[Path], out: Path, words: int, room: MergeRoom, phase: BarPhase) -> int:
    buffers = np.empty((len(runs), room.run_records), RECORD)
    done = np.empty(max(words, room.out_records), RECORD)
    cursors, ends = np.zeros(len(runs), np.int64), np.zeros(len(runs), np.int64)
    dense = DenseRow(words)
    state = np.zeros(3, np.int64)
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
        while True:
            answer = int(
                merge_rows(state, view_records(buffers), cursors, ends, dense.arrays, view_records(done))
            )
            if answer >= 0:
                refill(answer)
                continue
            writer.write(done[: state[2]])
            state[2] = 0
            if answer == MERGE_DONE:
                break
            assert answer == MERGE_FULL
    for path in runs:
        path.unlink()
    return writer.written
