"""What the workers of `pipeline` send in a step: the chain is computed on tensors without memory, whole or in slices.

Stages pass on outputs and get as much back as gradients; replicas, and stages that share weights, sum gradients.
"""

from __future__ import annotations

from itertools import pairwise

from manyhands.data.batches import cut, split
from manyhands.engine.chain import chain_of
from manyhands.engine.exchange import Traffic
from manyhands.facts import TracedModel
from manyhands.strategies.common.grid.grid_group import (
    traffic_of_agreement,
    traffic_of_gradients,
    traffic_of_sum,
)
from manyhands.strategies.pipeline.cuts import balanced
from manyhands.strategies.pipeline.exchange import holding_of
from manyhands.strategies.pipeline.played_chain import Cuts, PlayedChain, play_chain
from manyhands.strategies.pipeline.strategy import Pipeline
from manyhands.strategies.tensor.played_slices import sent_by_all
from manyhands.strategy import WorkerTraffic, silent


def sent_in_step(strategy: Pipeline, traced: TracedModel, workers: int) -> list[WorkerTraffic] | None:
    """None for cuts that will be measured, unless all layers hand on as much; and of sliced stages, for those that
    compute twice or split their backward, and for slices of time.
    """
    grid, table, task = strategy.grid(workers), strategy.table(), traced.task
    over_time = table.over_time
    if strategy.tensor > 1 and (strategy.recompute or table.splits_backward or over_time):
        return None
    if workers == 1:
        return silent(1)
    most = task.microbatches if over_time else strategy.microbatches
    shares = [len(split(task.batch_size, replica, grid.data)) for replica in range(grid.data)]
    pieces = [len(piece) for share in shares for piece in cut(share, most)]
    cuts = _cuts(strategy, traced, pieces[0])
    if cuts is None:
        return None
    total = traffic_of_agreement(workers)
    if task.clip_norm is not None:
        total += traffic_of_sum(8, workers)
    slices: list[PlayedChain] = []
    for piece in pieces:
        slices = _played(strategy, traced, piece, cuts)
        total += sent_by_all(slices)
        for one in slices:
            total += _over_borders(strategy, one, cuts)
    for one in slices:
        total += _of_gradients(strategy, one, cuts, grid.data)
    return [WorkerTraffic.of_all("worker", workers, total.bytes_sent, total.messages_sent)]


def _over_borders(strategy: Pipeline, played: PlayedChain, cuts: Cuts) -> Traffic:
    """What the stages of one slice pass on of one piece, and give back."""
    total, table = Traffic(), strategy.table()
    for part, place in enumerate(cuts):
        output = played.outputs[place - 1]
        if output is None or part % strategy.stages == (part + 1) % strategy.stages:
            continue
        times, ways = table.microbatches if table.over_time else 1, 1 + output.has_gradient
        total += Traffic(messages_sent=times * ways, bytes_sent=ways * output.num_bytes)
        if table.over_time:  # a shape is announced where it is not that of the slice before
            lengths = [len(split(output.shape[1], number, times)) for number in range(times)]
            changes = sum(one != other for one, other in pairwise([lengths[-1], *lengths]))
            total += Traffic(messages_sent=changes, bytes_sent=changes * 8 * len(output.shape))
    return total


def _of_gradients(strategy: Pipeline, played: PlayedChain, cuts: Cuts, data: int) -> Traffic:
    """What the stages of one slice, in all replicas, send to sum gradients."""
    chain, total = chain_of(played.model), Traffic()
    for stage in range(strategy.stages):
        holding = holding_of(played.model, chain, cuts, strategy.stages, stage)
        total += traffic_of_gradients(data, holding.parameters)
        for stages, parameters in holding.tied:
            if stages[0] == stage:
                sent = traffic_of_gradients(len(stages), parameters)
                total += sum((sent for _ in range(data)), Traffic())
    return total


def _cuts(strategy: Pipeline, traced: TracedModel, samples: int) -> Cuts | None:
    """Where the chain is cut; None where that is measured when a run begins, and makes a difference."""
    chain, parts = chain_of(traced.model), strategy.table().parts
    if strategy.cuts:
        return strategy.cuts
    if parts in (1, len(chain)) and not strategy.memory:
        return tuple(range(1, parts))
    [played] = play_chain(traced, 1, samples, None)
    if len({output and output.num_bytes for output in played.outputs[:-1]}) > 1:
        return None
    return balanced([sum(one.nbytes for one in module.parameters()) for module in chain], parts)


def _played(strategy: Pipeline, traced: TracedModel, samples: int, cuts: Cuts) -> list[PlayedChain]:
    return play_chain(traced, strategy.tensor, samples, cuts if strategy.tensor > 1 else None)
