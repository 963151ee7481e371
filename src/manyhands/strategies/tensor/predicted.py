"""What the workers of `tensor` send in a step: the sliced layers compute on tensors without memory, and are counted."""

from __future__ import annotations

from manyhands.data.batches import split
from manyhands.facts import TracedModel
from manyhands.strategies.common.grid.grid_group import (
    traffic_of_agreement,
    traffic_of_gradients,
    traffic_of_sum,
)
from manyhands.strategies.tensor.played_slices import moved_in_pieces, piece_of, played
from manyhands.strategies.tensor.strategy import Tensor
from manyhands.strategy import WorkerTraffic, silent


def sent_in_step(strategy: Tensor, traced: TracedModel, workers: int) -> list[WorkerTraffic]:
    if workers == 1:
        return silent(1)
    grid, task, total = strategy.grid(workers), traced.task, traffic_of_agreement(workers)
    for replica in range(grid.data):
        samples = len(split(task.batch_size, replica, grid.data))
        total += moved_in_pieces(traced, grid.slices, samples)
        if task.clip_norm is not None:
            total += traffic_of_sum(8, grid.slices)
    each = played(traced, grid.slices, piece_of(traced, len(split(task.batch_size, 0, grid.data))))
    for index, one in enumerate(each):
        total += traffic_of_gradients(grid.data, one.parameters_of(index))
    return [WorkerTraffic.of_all("worker", workers, total.bytes_sent, total.messages_sent)]
