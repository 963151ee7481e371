"""The time of a pipeline's step, and what each stage holds.

The time is that of the schedule, played with the times that the parts of the model take. A stage holds its part of the
model, and activations of the micro-batches in flight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from manyhands.data.randomness import preserved
from manyhands.engine.chain import applied, chain_of
from manyhands.facts import LayerTimes, Machines, ModelFootprint, PredictedStep, TaskProfile, TracedModel
from manyhands.strategies.common.grid.grid_group import memory_of_sums, traffic_of_sums
from manyhands.strategies.common.peak_memory import CountedMemory
from manyhands.strategies.common.step_times import in_groups_s
from manyhands.strategies.pipeline.cuts import balanced, parts_of
from manyhands.strategies.pipeline.ends import StandIn, call_of
from manyhands.strategies.pipeline.played_chain import (
    is_chain,
    output_bytes,
    places_of_parameters,
    places_of_units,
)
from manyhands.strategies.pipeline.schedule_cost import cost, most_held
from manyhands.strategies.pipeline.schedules import PartTimes, Schedule
from manyhands.strategy import WorkerMemory


@dataclass(frozen=True, slots=True)
class TimedChain:
    """The times of what a pipeline cuts: of each place of a model's chain those of its units, and what it hands on."""

    places: tuple[tuple[LayerTimes, ...], ...]
    output_bytes: tuple[float, ...]  # for each sample

    @classmethod
    def of(cls, profile: TaskProfile) -> TimedChain:
        """Of a profile without a traced model, or of one that says no chain, every layer is a place."""
        layers, traced = profile.layers, profile.model.traced
        if traced is None or not is_chain(traced.model):
            return cls(tuple((one,) for one in layers), tuple(one.output_bytes for one in layers))
        at = places_of_units(traced)
        assert len(at) == len(layers), "a profile is of the units of its model"
        outputs = output_bytes(traced)
        places = [
            tuple(layer for layer, own in zip(layers, at, strict=True) if own == place)
            for place in range(len(outputs))
        ]
        return cls(tuple(places), outputs)

    def cuts(self, parts: int, samples: float) -> tuple[int, ...]:
        """Where it is cut into parts of about the same time; what has no parameters goes with what is before it."""
        took_s = [sum(map(partial(_took_s, samples=samples), place)) for place in self.places]
        whole_s = sum(took_s) or 1.0
        heavy = [number for number, seconds in enumerate(took_s) if seconds]
        if len(heavy) < parts:
            found = _balanced(tuple(took_s), parts)
        else:  # as of a scaled profile
            shares = tuple(round(took_s[number] / whole_s, 6) for number in heavy)
            found = tuple(heavy[cut] for cut in _balanced(shares, parts))
        return found


def _took_s(layer: LayerTimes, samples: float) -> float:
    return layer.forward.seconds(samples) + layer.backward.seconds(samples)


@lru_cache(maxsize=256)
def _balanced(costs: tuple[float, ...], parts: int) -> tuple[int, ...]:
    found = balanced(costs, parts)
    assert found is not None, "there are enough layers"
    return found


def predicted_cuts(table: Schedule, profile: TaskProfile, replicas: int) -> tuple[int, ...] | None:
    """Those that these times make, as a run measures its own; None for a chain that is too short."""
    chain = TimedChain.of(profile)
    if len(chain.places) < table.parts:
        return None
    return chain.cuts(table.parts, _samples_of(table, profile, replicas))


def _samples_of(table: Schedule, profile: TaskProfile, replicas: int) -> int:
    """Of a micro-batch."""
    return -(-profile.samples(replicas) // table.microbatches)


def predicted_parts(
    table: Schedule,
    profile: TaskProfile,
    machines: Machines,
    *,
    replicas: int,
    cuts: tuple[int, ...],
    recompute: bool = False,
) -> PredictedStep:
    """Where the time of a step goes; stages are neighbours, and replicas of the pipeline come one after the other.

    A host's link to the others is busy at least as long as all messages over it take one after the other.
    """
    samples, chain = _samples_of(table, profile, replicas), TimedChain.of(profile)
    found_cuts = parts_of(cuts, len(chain.places))
    parts = [[layer for place in part for layer in chain.places[place]] for part in found_cuts]
    handed_on = [chain.output_bytes[part.stop - 1] for part in found_cuts]
    crossings = _crossings(table.parts, table.stages, machines.hosts, machines.per_host, replicas)
    hops = [machines.between if leaving else machines.inside for leaving in crossings]
    again = 1.0 if recompute else 0.0

    def seconds(of_layer: Callable[[LayerTimes], float]) -> tuple[float, ...]:
        return tuple(sum(map(of_layer, part)) for part in parts)

    forward = seconds(lambda one: one.forward.seconds(samples))
    half = seconds(lambda one: one.backward.seconds(samples) / 2)
    sent_s = tuple(hop.seconds(num_bytes * samples) for hop, num_bytes in zip(hops, handed_on, strict=True))
    times = PartTimes(
        forward=forward,
        backward=tuple(gradient + again * first for gradient, first in zip(half, forward, strict=True)),
        weights=half,
        send=sent_s,
        send_back=(0.0, *sent_s[:-1]),  # a gradient is as large as the output that it is of
    )
    found = cost(table, times)
    busy_s: dict[int, float] = defaultdict(float)  # by host, its link to the others
    for leaving, send_s in zip(crossings, times.send, strict=True):
        for host, messages in leaving.items():
            busy_s[host] += messages * table.microbatches * send_s
    whole_s = max(found.time, *busy_s.values(), 0.0)
    stage_bytes = [0] * table.stages
    for number, part in enumerate(parts):
        stage_bytes[number % table.stages] += sum(layer.gradient_bytes for layer in part)
    total, summed = sum(stage_bytes) or 1, traffic_of_sums(max(stage_bytes), replicas)
    return PredictedStep(
        compute_s=max(found.busy) + profile.rest.seconds(profile.samples(replicas)),
        exchange_s=in_groups_s(
            machines,
            replicas,
            summed.bytes_sent / replicas,
            summed.messages_sent / replicas,
            stride=table.stages,
        ),
        waiting_s=whole_s - max(found.busy) + (profile.slowest - 1) * max(found.busy),
        optimizer_s=profile.optimizer_s * max(stage_bytes) / total,
    )


@lru_cache(maxsize=256)
def _crossings(parts: int, stages: int, hosts: int, per_host: int, replicas: int) -> list[Counter[int]]:
    """Of each part: how many messages of a micro-batch leave each host, of all replicas, where it hands on its output.

    An output leaves the host of its part, and the gradient that comes back the host of the next one.
    """
    found, machines = [Counter[int]() for _ in range(parts)], Machines(hosts=hosts, per_host=per_host)
    for part, replica in product(range(parts - 1), range(replicas)):
        ends = [machines.host_of(replica * stages + one % stages) for one in (part, part + 1)]
        if ends[0] != ends[1]:
            found[part].update(ends)
    return found


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
