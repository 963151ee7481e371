"""Learning one example at a time in one process: alone, or with several threads on one table (HOGWILD!).

Threads do the same as processes here: the steps are compiled and need no interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import NonFinite, PeerTimeout, UserError, format_bytes
from manyhands.memory.segment import available_bytes
from manyhands.regression.examples import Labelled, scale_of
from manyhands.regression.kernels import (
    BETA,
    FREE,
    LOSS,
    ORDERS,
    PATIENCE_S,
    RULES,
    TIMED_OUT,
    TURNS,
    WEIGHT,
    WIDTHS,
    train,
)
from manyhands.regression.options import LogregOptions

__all__ = [
    "CHUNK",
    "SAVING_BYTES",
    "OnlineLearner",
    "Share",
    "mean_loss",
    "require_in_time",
    "require_room",
    "settings_of",
    "shares",
]

SAVING_BYTES = 12
"""What saving a model takes for each feature: its weights without the bias, the file's bytes, and a copy of these."""

_MODEL_BYTES = 4  # a weight in single precision

CHUNK = 2048
"""Examples that a worker takes at a time: some tenths of a millisecond."""

Share = tuple[int, tuple[int, int, int], int]
"""Which block, which of its rows (first, end, step), and how many examples came before the block."""


class OnlineLearner:
    """A table and the threads that learn on it; a context manager. `dtype` is that of the table."""

    def __init__(self, options: LogregOptions, order: str, workers: int, dtype: Any = np.float32) -> None:
        self._width = WIDTHS[options.learner]
        self._rule, self._order = RULES[options.learner], ORDERS[order] if workers > 1 else FREE
        self._options = options
        self._workers = workers
        self._table = np.zeros(self._width, dtype)
        self._words = np.zeros(2, np.int64)
        self._seen = 0
        self._pool = ThreadPoolExecutor(workers, "learn") if workers > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def learn(self, stretch: Sequence[Labelled], on_done: Callable[[int], None]) -> NDArray[np.float64]:
        """Learn from some blocks; the sums of loss and weight. `on_done` is told of examples as they are done."""
        self._options = self._options.settled(scale_of(stretch[0].rows))
        self._reserve(max(block.rows.size for block in stretch))
        lengths = [len(block.rows) for block in stretch]
        self._words[0] = self._seen if self._order == TURNS else 0
        hands = min(self._workers, sum(lengths))
        if self._order == TURNS:
            given = [iter(shares(lengths, self._seen, True, rank, hands)) for rank in range(hands)]
        else:  # whoever comes first takes the next: `next` of a list's iterator is atomic
            given = [iter(shares(lengths, self._seen, False, 0, hands))] * hands
        sums = np.zeros((hands, 8))  # a cache line for each
        if self._pool is None:
            self._work(stretch, given[0], sums[0], on_done)
        else:
            self._work_together(stretch, given, sums, on_done)
        self._seen += sum(lengths)
        total: NDArray[np.float64] = sums.sum(axis=0)[:2]
        return total

    @property
    def row_bytes(self) -> int:
        """All that is kept of one feature: the table and its copy, then the model, an earlier one, and its file."""
        return (self._width + 1) * self._table.itemsize + 2 * _MODEL_BYTES + SAVING_BYTES

    @property
    def rate(self) -> float | None:
        """The learning rate; None before the first example, where none was given."""
        return self._options.rate

    def table(self, size: int) -> NDArray[Any]:
        """The bias and the weights of `size` features as they are now, in memory of their own."""
        self._reserve(size)
        return self._table[:: self._width][: size + 1].copy()

    def weights(self, size: int) -> NDArray[np.float32]:
        """The same in single precision."""
        return self.table(size).astype(np.float32)

    def _reserve(self, size: int) -> None:
        """Make room for so many features, by doubling: files tell of their largest only at the end."""
        needed = (size + 1) * self._width
        if needed > self._table.size:
            require_room(size, self.row_bytes, self._table.nbytes)
            larger = np.zeros(max(needed, min(2 * self._table.size, needed + (1 << 28))), self._table.dtype)
            larger[: self._table.size] = self._table
            self._table = larger

    def _work_together(
        self,
        stretch: Sequence[Labelled],
        given: Sequence[Iterator[Share]],
        sums: NDArray[np.float64],
        on_done: Callable[[int], None],
    ) -> None:
        assert self._pool is not None
        work = [
            self._pool.submit(self._work, stretch, mine, sums[rank], on_done)
            for rank, mine in enumerate(given)
        ]
        try:
            wait(work, return_when=FIRST_EXCEPTION)
        finally:
            # where one failed, or all were interrupted: this ends every wait, and nothing more is taken
            self._words[1] = 1
            wait(work)
            self._words[1] = 0
        for one in work:
            one.result()

    def _work(
        self,
        stretch: Sequence[Labelled],
        given: Iterator[Share],
        sums: NDArray[np.float64],
        on_done: Callable[[int], None],
    ) -> None:
        address = self._words.ctypes.data if self._pool is not None else 0
        settings = settings_of(self._options, self._table.dtype)
        for block, span, seen in given:
            if self._words[1]:
                return
            one = stretch[block]
            ended = train(
                self._table,
                one.arrays(),
                one.targets,
                span,
                self._rule,
                settings,
                self._order,
                address,
                seen,
                sums,
            )
            require_in_time(ended)
            on_done(len(range(*span)))


def require_room(size: int, row_bytes: int, held_bytes: int = 0) -> None:
    """UserError where what is kept of so many features does not fit in memory, as one absurd index may make it.

    `row_bytes` is all that is kept of one feature until the model is saved, copies included; `held_bytes` of it are
    taken already.
    """
    needed, room = size * row_bytes, available_bytes() + held_bytes
    if needed > room:
        raise UserError(
            f"a weight for every feature up to {size - 1} takes {format_bytes(needed)} with its copies, but only "
            f"{format_bytes(room)} is available; hash the features into fewer with a number of bits, such as 24"
        )


def require_in_time(ended: int) -> None:
    """Raise PeerTimeout where `train` waited in vain for another worker."""
    if ended == TIMED_OUT:
        raise PeerTimeout(
            f"a worker waited {PATIENCE_S} s for the example of another, which has stopped inside of one", -1
        )


def settings_of(options: LogregOptions, dtype: Any) -> NDArray[Any]:
    """What `train` takes, in the type of the table, of options that have a rate."""
    return np.array([options.rate, options.l1, options.l2, BETA], dtype)


def shares(lengths: Sequence[int], seen: int, by_turns: bool, rank: int, workers: int) -> list[Share]:
    """The work on blocks of these lengths: all of it, in order, or where it goes by turns that of one worker."""
    found: list[Share] = []
    for block, length in enumerate(lengths):
        for first in range(0, length, CHUNK):
            end = min(first + CHUNK, length)
            if by_turns:
                begin = first + (rank - seen - first) % workers
                if begin < end:
                    found.append((block, (begin, end, workers), seen))
            else:
                found.append((block, (first, end, 1), seen))
        seen += length
    return found


def mean_loss(sums: NDArray[np.float64], number: int) -> float:
    """The progressive loss of pass `number` (from 1): of every example before the update with it."""
    mean = float(sums[LOSS] / sums[WEIGHT]) if sums[WEIGHT] else 0.0
    if not np.isfinite(mean):
        raise NonFinite(
            f"the loss is {mean} in pass {number}; use a smaller rate, or scale the features down"
        )
    return mean
