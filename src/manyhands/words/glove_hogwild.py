"""HOGWILD! (Niu, Recht, Re, Wright 2011) for GloVe: workers update one memory, each at its own pace, without locks.

A pass is cut into blocks of records, and a worker that is done with one takes the next off a shared counter. Two
workers that meet in a row may lose each other's change to some items; with millions of records and thousands of rows
they seldom meet. Two other orders are there to compare with:

* `locked`: a ticket lock around every STEP records, from reading the rows to writing them;
* `turns`: block k is worker k mod n's, and waits for block k - 1. The result is that of one thread.

Workers are threads, since the kernels run without the interpreter's lock, or processes on one shared segment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from manyhands.cluster.context import RoleContext
from manyhands.memory.segment import CACHE_LINE, Segment, round_up
from manyhands.memory.waiting import spins_for
from manyhands.words.glove_crew import CONTROL_BYTES, PATIENCE_S, Control, Plan, Report, run_crew
from manyhands.words.glove_kernels import STEP, train_block, train_block_in_order
from manyhands.words.glove_model import GloveModel, Snapshot
from manyhands.words.glove_passes import Passes, Work
from manyhands.words.glove_reader import Block, RecordReader

__all__ = ["train_in_processes", "train_in_threads"]

_BLOCK = 1 << 16  # records: a megabyte
_TURN = 32 * STEP  # records of a block where blocks are turns: enough to be worth a system call
_LOOK_S = 0.05  # how often the parent of threads looks at them, and so how soon it hears of Ctrl-C


def train_in_threads(work: Work, passes: Passes, order: str) -> None:
    """Train with threads of this process."""
    model = GloveModel(work.vocabulary_size, work.options).initialise()
    memory = np.zeros(CONTROL_BYTES + CACHE_LINE, np.uint8)
    control = Control(round_up(memory.ctypes.data, CACHE_LINE), memory)
    hands = [_Hand(work, model, control, order, rank) for rank in range(work.workers)]
    try:
        for number in range(work.options.passes):
            control.begin_pass(number)
            passes.finish(_run_threads(hands, number, control, passes), model.snapshot)
    finally:
        for hand in hands:
            hand.reader.close()


def _run_threads(hands: list[_Hand], number: int, control: Control, passes: Passes) -> float:
    """One pass; the sum of all costs. Whatever is raised here, no thread is left running."""
    costs, done = [0.0] * len(hands), [0] * len(hands)
    errors: list[BaseException] = []

    def advanced(rank: int, count: int) -> None:
        done[rank] += count

    def take_part(rank: int) -> None:
        try:
            costs[rank] = hands[rank].run_pass(number, partial(advanced, rank))
        except BaseException as error:
            errors.append(error)
            control.abort()

    threads = [
        threading.Thread(target=take_part, args=(rank,), name=f"glove-{rank}") for rank in range(len(hands))
    ]
    shown = 0
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_S)
                shown, before = sum(done), shown
                passes.advance(shown - before)
    except BaseException:
        control.abort()
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]  # the others were ended by it
    passes.advance(sum(done) - shown)
    return sum(costs)


def train_in_processes(work: Work, passes: Passes, order: str) -> None:
    """Train with processes that share a segment."""
    _compile(work, order)

    def prepare(segment: Segment) -> Callable[[], Snapshot]:
        return GloveModel(work.vocabulary_size, work.options, segment=segment).initialise().snapshot

    plan = Plan(
        target=partial(_work, work=work, order=order),
        shared_bytes=GloveModel.num_bytes(work.vocabulary_size, work.options),
        purpose="GloVe parameters",
        prepare=prepare,
    )
    run_crew(work, passes, plan)


def _work(
    context: RoleContext, segment: Segment, report: Report, control: Control, *, work: Work, order: str
) -> None:
    model = GloveModel(work.vocabulary_size, work.options, segment=segment)
    hand = _Hand(work, model, control, order, context.rank)
    with hand.reader:
        for number in range(work.options.passes):
            report.begin_pass(number)
            report.end_pass(hand.run_pass(number, report.advance))


def _compile(work: Work, order: str) -> None:
    """Fill the cache of compiled code here, so that workers do not each compile."""
    values, shape, settings = np.zeros(64, work.options.numpy_dtype), np.ones(4, np.int64), np.ones(3)
    nothing = np.empty(0, np.int32), np.empty(0, np.float64)
    if order == "free":
        train_block(values, *nothing, shape, settings)
    else:
        train_block_in_order(values, *nothing, shape, settings, (0, 0, 0, 0, 0, 0))


class _Hand:
    """One worker: its place, its reader, and the model that all of them update."""

    def __init__(self, work: Work, model: GloveModel, control: Control, order: str, rank: int) -> None:
        self._work = work
        self._model = model
        self._shape = model.shape()
        self._settings = work.options.settings()
        self._control = control
        self._order = order
        self._rank = rank
        self._block = _block_size(work, order)
        self.reader = RecordReader(work.path, self._block, work.vocabulary_size)

    def run_pass(self, number: int, advanced: Callable[[int], None]) -> float:
        """Take blocks until none is left; the sum of their costs."""
        cost, mine = 0.0, self._rank
        while True:
            if self._order != "turns":
                mine = self._control.take_block()
            begin = mine * self._block
            if begin >= self._work.num_records:
                return cost
            self._control.check_alive(self._rank)
            count = min(self._block, self._work.num_records - begin)
            cost += self._train(self.reader.read(begin, count), number, mine)
            advanced(count)
            mine += self._work.workers

    def _train(self, block: Block, number: int, mine: int) -> float:
        if self._order == "free":
            return float(train_block(self._model.values, *block, self._shape, self._settings))
        steps_before = number * -(-self._work.num_records // STEP) + mine * (self._block // STEP)
        turn = (
            self._control.abort_word,
            self._control.serving,
            0 if self._order == "turns" else self._control.tickets,
            steps_before,
            int(PATIENCE_S * 1e9),
            spins_for(self._work.workers),
        )
        cost, status = train_block_in_order(self._model.values, *block, self._shape, self._settings, turn)
        self._control.check(status, self._rank)
        return float(cost)


def _block_size(work: Work, order: str) -> int:
    """Records of a block: a multiple of STEP, and small enough that all workers have some of a short file."""
    if order == "turns":
        return _TURN
    return min(_BLOCK, round_up(-(-work.num_records // (8 * work.workers)), STEP))
