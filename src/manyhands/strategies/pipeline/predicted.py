"""What the workers of `pipeline` send in a step: the chain is computed on tensors without memory, whole or in slices.

Stages pass on outputs and get as much back as gradients; replicas, and stages that share weights, sum gradients.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from manyhands.data.batches import cut, split
from manyhands.data.randomness import preserved
from manyhands.engine.chain import chain_of
from manyhands.engine.exchange import Traffic
from manyhands.facts import TracedModel, WorkerTraffic, silent
from manyhands.strategies.common.grid.grid_group import (
    PlayedGroup,
    traffic_of_agreement,
    traffic_of_gradients,
    traffic_of_sum,
)
from manyhands.strategies.pipeline.cuts import balanced, parts_of
from manyhands.strategies.pipeline.ends import StandIn, input_of
from manyhands.strategies.pipeline.exchange import holding_of
from manyhands.strategies.pipeline.strategy import Pipeline
from manyhands.strategies.tensor.lazy_tensor import as_whole
from manyhands.strategies.tensor.predicted import are_alike, each_slice
from manyhands.strategies.tensor.slicing import slice_modules
from manyhands.strategies.tensor.slicing_plan import Slicing, find_plan

__all__ = ["sent_in_step"]

Cuts = tuple[int, ...]


class _Output(NamedTuple):
    """What a layer hands on."""

    num_bytes: int
    shape: tuple[int, ...]
    has_gradient: bool  # which comes back

    @staticmethod
    def of(x: Tensor) -> _Output:
        return _Output(x.nbytes, tuple(x.shape), x.is_floating_point())


class PlayedChain(NamedTuple):
    """One slice of all stages after a forward and a backward of some samples; see `Played`."""

    sent: Traffic
    parameters: list[nn.Parameter]
    alike: bool
    model: nn.Module
    outputs: tuple[_Output | None, ...]  # by layer; None for no tensor, and inside the stages of slices


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
        for one in slices:
            total += one.sent + _over_borders(strategy, one, cuts)
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
    [played] = _play(traced, 1, samples, None)
    if len({output and output.num_bytes for output in played.outputs[:-1]}) > 1:
        return None
    return balanced([sum(one.nbytes for one in module.parameters()) for module in chain], parts)


def _played(strategy: Pipeline, traced: TracedModel, samples: int, cuts: Cuts) -> list[PlayedChain]:
    return _play(traced, strategy.tensor, samples, cuts if strategy.tensor > 1 else None)


def _play(traced: TracedModel, slices: int, samples: int, cuts: Cuts | None) -> list[PlayedChain]:
    key = ("pipeline", slices, samples, cuts)
    if key not in traced.played:
        with preserved():
            traced.played[key] = each_slice(
                slices, lambda index: _played_slice(traced, index, slices, samples, cuts or ())
            )
    found: list[PlayedChain] = traced.played[key]
    return found


def _played_slice(traced: TracedModel, index: int, slices: int, samples: int, cuts: Cuts) -> PlayedChain:
    model = traced.copy()
    group, chain = PlayedGroup(index, slices), chain_of(model)
    plan: dict[str, Slicing] = {}
    if slices > 1:
        for within in parts_of(cuts, len(chain)):
            plan |= find_plan(model, slices, chain[within.start : within.stop])
        slice_modules(model, group, plan, part=chain)
    batch, outputs = traced.batch(samples), list[_Output | None]()
    x = input_of(traced.task.loss, batch)
    for place, module in enumerate(chain, 1):
        x = module(x)
        if slices == 1 or place in cuts:  # elsewhere, what is sliced stays so
            x = as_whole(x)
            outputs.append(_Output.of(x) if isinstance(x, Tensor) else None)
        else:
            outputs.append(None)
    traced.task.loss(StandIn(output=x), batch).backward()
    return PlayedChain(
        group.traffic(), list(model.parameters()), are_alike(model, plan), model, tuple(outputs)
    )
