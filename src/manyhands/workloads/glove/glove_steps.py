"""GloVe's compiled step on one memory, record by record: alone, or with others who change it too (HOGWILD!).

Niu, Recht, Ré, Wright (2011): two workers that meet in a row may lose each other's change to some items; with millions
of records and thousands of rows they seldom meet. Where an order is asked for, a worker goes through a gate for every
STEP records, from reading the rows to writing them.
"""

from __future__ import annotations

import time

from manyhands.engine.kernel_task import KernelStep, Portion, Taken
from manyhands.native.group.gate import FREE, Turn, require_turn
from manyhands.workloads.glove.glove_kernels import train_block, train_block_in_order
from manyhands.workloads.glove.glove_model import GloveModel
from manyhands.workloads.glove.glove_reader import RecordReader
from manyhands.workloads.glove.glove_work import GloveWork, turn_number

__all__ = ["RecordStep"]


class RecordStep(KernelStep):
    """The published rule, record by record."""

    def __init__(self, work: GloveWork, model: GloveModel, turn: Turn) -> None:
        super().__init__(model)
        self._rows, self._shape = model, model.shape()
        self._settings = work.glove.settings()
        self._num_records = work.num_records
        self._turn = turn
        capacity = min(work.step_records, work.num_records)
        self._reader = RecordReader(work.path, capacity, work.vocabulary_size)

    def fill(self) -> None:
        """Draw the vectors and biases."""
        self._rows.initialise()

    def take(self, portion: Portion) -> Taken:
        """Read the records and visit them."""
        begin, count = time.monotonic_ns(), portion.end - portion.begin
        block = self._reader.read(portion.begin, count)
        read_ns = time.monotonic_ns() - begin
        if self._turn.order == FREE:
            cost = train_block(self._rows.values, *block, self._shape, self._settings)
        else:
            number = turn_number(self._num_records, portion)
            cost, status = train_block_in_order(
                self._rows.values, *block, self._shape, self._settings, tuple(self._turn), number
            )
            require_turn(status, self._turn)
        return Taken(loss=float(cost), weight=count, samples=count, input_ns=read_ns)

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._reader.close()
