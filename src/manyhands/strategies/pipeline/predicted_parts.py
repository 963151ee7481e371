"""The time of a pipeline's step: its schedule, played with the times that its parts of the model take."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product

from manyhands.facts import LayerTimes, Machines, PredictedStep, TaskProfile
from manyhands.strategies.common.grid.grid_group import traffic_of_sums
from manyhands.strategies.common.step_times import in_groups_s
from manyhands.strategies.pipeline.cuts import balanced, parts_of
from manyhands.strategies.pipeline.played_chain import is_chain, output_bytes, places_of_units
from manyhands.strategies.pipeline.schedule_cost import cost
from manyhands.strategies.pipeline.schedules import PartTimes, Schedule


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
