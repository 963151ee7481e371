"""The time of a pipeline's step: its schedule, played with the times that its parts of the model take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from manyhands.facts import LayerTimes, Machines, PredictedStep, TaskProfile
from manyhands.strategies.common.step_times import all_reduce_s
from manyhands.strategies.pipeline.cuts import balanced, parts_of
from manyhands.strategies.pipeline.schedule_cost import cost
from manyhands.strategies.pipeline.schedules import PartTimes, Schedule

__all__ = ["predicted_parts"]


def predicted_parts(
    table: Schedule,
    profile: TaskProfile,
    machines: Machines,
    *,
    replicas: int,
    cuts: tuple[int, ...] = (),
    recompute: bool = False,
) -> PredictedStep:
    """Where the time of a step goes; stages are neighbours, and replicas of the pipeline come one after the other."""
    samples = -(-profile.samples(replicas) // table.microbatches)
    layers = profile.layers
    whole_s = [one.forward.seconds(samples) + one.backward.seconds(samples) for one in layers]
    found_cuts = cuts or balanced(whole_s, table.parts)
    assert found_cuts is not None, "there are enough layers"
    parts = [[layers[index] for index in part] for part in parts_of(found_cuts, len(layers))]
    hops = [machines.link(part % table.stages, (part + 1) % table.stages) for part in range(table.parts)]
    again = 1.0 if recompute else 0.0

    def seconds(of_layer: Callable[[LayerTimes], float]) -> tuple[float, ...]:
        return tuple(sum(map(of_layer, part)) for part in parts)

    forward = seconds(lambda one: one.forward.seconds(samples))
    half = seconds(lambda one: one.backward.seconds(samples) / 2)
    times = PartTimes(
        forward=forward,
        backward=tuple(gradient + again * first for gradient, first in zip(half, forward, strict=True)),
        weights=half,
        send=tuple(
            hop.seconds(part[-1].output_bytes * samples) for hop, part in zip(hops, parts, strict=True)
        ),
    )
    found = cost(table, times)
    stage_bytes = [0] * table.stages
    for number, part in enumerate(parts):
        stage_bytes[number % table.stages] += sum(layer.gradient_bytes for layer in part)
    total = sum(stage_bytes) or 1
    apart = machines.hosts > 1 and table.stages >= machines.per_host
    holders = replace(machines, hosts=replicas if apart else 1, per_host=1 if apart else replicas)
    return PredictedStep(
        compute_s=max(found.busy) + profile.rest.seconds(profile.samples(replicas)),
        exchange_s=all_reduce_s("direct", holders, max(stage_bytes)),
        waiting_s=found.time - max(found.busy) + (profile.slowest - 1) * max(found.busy),
        optimizer_s=profile.optimizer_s * max(stage_bytes) / total,
    )
