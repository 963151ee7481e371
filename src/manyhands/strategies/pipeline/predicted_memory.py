"""What each stage of a pipeline holds: its part of the model, and activations of the micro-batches in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from manyhands.data.randomness import preserved
from manyhands.engine.chain import applied, chain_of
from manyhands.facts import ModelFootprint, TracedModel
from manyhands.strategies.common.grid.grid_group import memory_of_sums
from manyhands.strategies.common.peak_memory import CountedMemory
from manyhands.strategies.pipeline.cuts import balanced, parts_of
from manyhands.strategies.pipeline.ends import StandIn, call_of
from manyhands.strategies.pipeline.played_chain import is_chain, places_of_parameters
from manyhands.strategies.pipeline.schedule_cost import most_held
from manyhands.strategies.pipeline.schedules import Schedule
from manyhands.strategy import WorkerMemory


def cuts_by_work(traced: TracedModel, parts: int, samples: int) -> tuple[int, ...] | None:
    """Where parts have about the same number of operations; None for what is no chain, or one that is too short."""
    if not is_chain(traced.model):
        return None
    key = ("work of layers", samples)
    if key not in traced.played:
        traced.played[key] = _work_of_layers(traced, samples)
    work: list[float] = traced.played[key]
    return balanced(work, parts)


def _work_of_layers(traced: TracedModel, samples: int) -> list[float]:
    model = traced.copy()
    chain, work = chain_of(model), list[float]()
    with preserved(), traced.tracing(), torch.no_grad():
        x, named = call_of(traced.task.loss, traced.batch(samples))
        for module in chain:
            with FlopCounterMode(display=False) as counted:
                x = applied(module, x, named)
            values = sum(one.numel() for one in tree_leaves(x) if isinstance(one, Tensor))
            work.append(counted.get_total_flops() + values)
    return work


def needs_of_stages(
    table: Schedule,
    model: ModelFootprint,
    cuts: tuple[int, ...],
    samples: int,
    replicas: int,
    *,
    recompute: bool,
) -> list[WorkerMemory]:
    """Of each stage of a chain with these cuts, and micro-batches of so many samples.

    A part holds what forward has left of all micro-batches in flight but one, and what that one takes at its peak.
    """
    traced = model.traced
    assert traced is not None, "the chain is known"
    held, held_bytes = most_held(table, by_part=True), _bytes_of_places(traced)
    parts = parts_of(cuts, len(held_bytes))
    played_parts = _played(traced, parts, samples)
    rows = []
    for stage in range(table.stages):
        own = range(stage, len(parts), table.stages)
        weights = sum(held_bytes[place] for number in own for place in parts[number])
        share = weights / (model.parameters or 1)
        gradients = round(model.gradients * share)
        played = [(held[number], played_parts[number]) for number in own]
        kept = sum(count * (one.given if recompute else one.kept) for count, one in played)
        working = kept + max(one.peak - (one.given if recompute else one.kept) for _, one in played)
        rows.append(
            WorkerMemory(
                who=f"stage {stage}",
                count=replicas,
                weights=weights + model.buffers,
                gradients=gradients,
                state=round(model.state * share),
                activations=max(
                    working, model.step_work if weights else 0, memory_of_sums(gradients, replicas)
                ),
            )
        )
    return rows


class _PlayedPart(NamedTuple):
    """Bytes of one micro-batch in a part: of its input from another stage, after forward, and at the peak."""

    given: int
    kept: int
    peak: int


def _played(traced: TracedModel, parts: Sequence[range], samples: int) -> list[_PlayedPart]:
    key = ("parts of a pipeline", tuple(parts), samples)
    if key not in traced.played:
        with preserved(), traced.tracing():
            traced.played[key] = list(_play(traced, parts, samples))
    found: list[_PlayedPart] = traced.played[key]
    return found


def _play(traced: TracedModel, parts: Sequence[range], samples: int) -> Iterator[_PlayedPart]:
    """One after the other, each with its backward; it leaves to the next what it hands on."""
    model = traced.copy()
    chain, batch = chain_of(model), traced.batch(samples)
    x, named = call_of(traced.task.loss, batch)
    fixed = [one for one in tree_leaves(batch) if isinstance(one, Tensor)]
    for part in parts:
        came, given, is_last = (
            [one for one in tree_leaves(x) if isinstance(one, Tensor)],
            0,
            part is parts[-1],
        )
        if part.start:
            x = x.detach().requires_grad_(x.is_floating_point())
            given = x.nbytes
        counted = CountedMemory([*model.parameters(), *model.buffers(), *fixed, *came])
        with counted.of_gradients(model), counted:
            for place in part:
                x = applied(chain[place], x, named)
            root = traced.task.loss(StandIn(output=x), batch) if is_last else x
            kept = counted.now
            if root.requires_grad:
                root.backward(None if is_last else torch.empty_like(root))
        model.zero_grad(set_to_none=True)
        yield _PlayedPart(given, given + kept, given + counted.peak_beside)


def _bytes_of_places(traced: TracedModel) -> list[int]:
    """Of the parameters that each place of the chain holds; one that several share counts where it is used first."""
    by_place = [0] * len(chain_of(traced.model))
    known = {id(one): one for one in traced.model.parameters()}
    for one, place in places_of_parameters(traced).items():
        by_place[place] += known[one].nbytes
    return by_place
