"""HOGWILD! in processes: one table in shared memory, which every worker maps, as it does the files of examples.

Work is handed out by a counter in that memory, a chunk of examples at a time, pass after pass without a stop between
them. Whoever finishes a pass leaves a copy of the weights, so that an interrupted run has those of its last whole pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.cluster.context import RoleContext
from manyhands.cluster.local import LocalCluster, Role
from manyhands.cluster.signals import signal_of
from manyhands.draw.bars import Bars
from manyhands.memory.counters import Counter
from manyhands.memory.segment import CACHE_LINE, Segment, round_up
from manyhands.regression.kernels import ORDERS, RULES, TURNS, WIDTHS, train
from manyhands.regression.online import CHUNK, Share, mean_loss, require_in_time, settings_of, shares
from manyhands.regression.options import LogregOptions
from manyhands.regression.spool import SpooledRows

__all__ = ["Learned", "learn_in_processes"]

_LOCK, _ABORT, _COUNTER, _SAVED = 0, 1, 16, 32  # places among the shared words, each line with its own
_WORDS = 48
_TELL_EVERY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The bias and the weights, and whether Ctrl-C ended the training early."""

    table: NDArray[np.float32]
    interrupted: bool = False


def learn_in_processes(
    rows: SpooledRows,
    options: LogregOptions,
    order: str,
    workers: int,
    *,
    bars: Bars,
    on_pass: Callable[[float], None],
) -> Learned:
    """Learn with `workers` processes; `on_pass` is called with the progressive loss of each pass.

    Raises WorkerFailed naming a worker that died, and KeyboardInterrupt before the first pass is over.
    """
    options = options.settled(rows.scale)
    plan = _Plan(options=options, order=ORDERS[order], workers=workers, rows=rows)
    with Segment.create(plan.num_bytes, "logistic regression") as segment:
        memory = plan.views(segment)
        _learn(
            memory, plan, (0, (0, 0, 1), 0), np.zeros(2)
        )  # compiles it, so that the workers find it compiled
        roles = [
            Role(
                name=f"worker {rank}",
                target=partial(_work, plan=plan),
                descriptors={"memory": segment.descriptor},
                env={"OMP_NUM_THREADS": "1"},
            )
            for rank in range(workers)
        ]
        finished = 0

        def close_passes() -> None:
            nonlocal finished
            while finished < options.passes and memory.done[finished] == plan.rows.examples:
                finished += 1
                on_pass(mean_loss(memory.sums[finished - 1].sum(axis=0), finished))

        with bars.phase("learning", plan.rows.examples * options.passes, "examples") as phase:

            def hear(_rank: int, note: Mapping[str, Any]) -> None:
                phase.advance(int(note["examples"]))
                close_passes()

            def abort(_rank: int) -> None:
                memory.words[_ABORT] = 1

            try:
                with LocalCluster(roles, on_note=hear, on_failure=abort) as cluster:
                    cluster.run()
            except (KeyboardInterrupt, SystemExit) as stop:
                saved = int(memory.words[_SAVED])
                if not saved or signal_of(stop) is None:
                    raise
                return Learned(table=memory.saved[(saved - 1) % 2].copy(), interrupted=True)
        close_passes()
        return Learned(table=memory.weights().copy())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What every worker knows: how the memory is laid out and how to learn."""

    options: LogregOptions
    order: int
    workers: int
    rows: SpooledRows

    def _parts(self) -> Iterator[tuple[str, tuple[int, ...], Any]]:
        weights = self.rows.size + 1
        yield "words", (_WORDS,), np.int64
        yield "done", (self.options.passes,), np.int64
        yield "sums", (self.options.passes, self.workers, CACHE_LINE // 8), np.float64
        yield "table", (weights * WIDTHS[self.options.learner],), np.float32
        yield "saved", (2, weights), np.float32

    def done_places(self) -> range:
        """Where the examples that are done are counted, by pass."""
        begin = round_up(8 * _WORDS, CACHE_LINE)
        return range(begin, begin + 8 * self.options.passes, 8)

    @property
    def num_bytes(self) -> int:
        """The memory of all parts."""
        return sum(
            round_up(int(np.prod(shape)) * np.dtype(kind).itemsize, CACHE_LINE)
            for _, shape, kind in self._parts()
        )

    def views(self, segment: Segment) -> _Memory:
        """The parts in the memory of this process."""
        found, offset = {}, 0
        for name, shape, kind in self._parts():
            count = int(np.prod(shape))
            found[name] = segment.array(offset, count, kind).reshape(shape)
            offset += round_up(count * np.dtype(kind).itemsize, CACHE_LINE)
        return _Memory(
            width=WIDTHS[self.options.learner], address=segment.address, examples=self.rows.open(), **found
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Memory:
    """The shared memory: `words` come first, at `address`."""

    width: int
    address: int
    words: NDArray[np.int64]
    done: NDArray[np.int64]
    sums: NDArray[np.float64]
    table: NDArray[np.float32]
    saved: NDArray[np.float32]
    examples: dict[str, NDArray[Any]]
    """Mapped from their files: starts, indices, values, weights and targets."""

    def weights(self) -> NDArray[np.float32]:
        """The bias and the weights as they are now."""
        return self.table[:: self.width]


def _learn(memory: _Memory, plan: _Plan, share: Share, sums: NDArray[np.float64]) -> None:
    _, span, seen = share
    given = memory.examples
    ended = train(
        memory.table,
        (given["starts"], given["indices"], given["values"], given["weights"]),
        given["targets"],
        span,
        RULES[plan.options.learner],
        settings_of(plan.options, np.float32),
        plan.order,
        memory.address + 8 * _LOCK,
        seen,
        sums,
    )
    require_in_time(ended)


def _work(context: RoleContext, plan: _Plan) -> dict[str, Any]:
    """A worker process: take chunks until all passes are done, or it is asked to leave."""
    with Segment.attach(context.descriptor("memory")) as segment:
        memory = plan.views(segment)
        done = [Counter.within(segment, place) for place in plan.done_places()]
        untold, told = 0, time.monotonic()
        for share in _given(plan, Counter.within(segment, 8 * _COUNTER), context.rank):
            if context.stop_requested():
                break
            passed = share[2] // plan.rows.examples
            _learn(memory, plan, share, memory.sums[passed, context.rank])
            count = len(range(*share[1]))
            untold += count
            is_last = done[passed].add(count) + count == plan.rows.examples
            if is_last:
                memory.saved[passed % 2] = memory.weights()
                memory.words[_SAVED] = passed + 1
            if is_last or time.monotonic() - told > _TELL_EVERY_S:
                context.send({"examples": untold})
                untold, told = 0, time.monotonic()
    return {}


def _given(plan: _Plan, chunks_taken: Counter, rank: int) -> Iterator[Share]:
    if plan.order == TURNS:
        for passed in range(plan.options.passes):
            yield from shares([plan.rows.examples], passed * plan.rows.examples, True, rank, plan.workers)
        return
    chunks = -(-plan.rows.examples // CHUNK)
    while (number := chunks_taken.add()) < chunks * plan.options.passes:
        passed, chunk = divmod(number, chunks)
        first = chunk * CHUNK
        yield 0, (first, min(first + CHUNK, plan.rows.examples), 1), passed * plan.rows.examples
