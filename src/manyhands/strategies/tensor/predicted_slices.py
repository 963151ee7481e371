"""The time of a step of slices: what each computes of the layers, and the sums and gathers between them."""

from __future__ import annotations

from manyhands.engine.exchange import Traffic
from manyhands.facts import Machines, PredictedStep, TaskProfile
from manyhands.strategies.common.grid.grid_group import traffic_of_sum, traffic_of_sums
from manyhands.strategies.common.grid.grid_layout import Grid
from manyhands.strategies.common.step_times import in_groups_s
from manyhands.strategies.tensor.played_slices import held_shares, moved_in_pieces


def predicted_slices(profile: TaskProfile, machines: Machines, grid: Grid) -> PredictedStep:
    """A slice waits for the others wherever a layer ends whole, so nothing of that hides behind computing.

    A layer of which a slice holds half is computed in half the time. Of a profile without a traced model every layer
    is a pair that can be cut: its output is summed, and the gradient of its input.
    """
    samples, traced = profile.samples(grid.data), profile.model.traced
    if grid.slices == 1:
        shares, moved = (1.0,) * len(profile.layers), Traffic()
    elif traced is not None:
        shares = held_shares(traced, grid.slices, samples)
        moved = moved_in_pieces(traced, grid.slices, samples)
    else:
        shares = (1 / grid.slices,) * len(profile.layers)
        sums = (traffic_of_sum(round(one.output_bytes * samples), grid.slices) for one in profile.layers)
        moved = sum((one for each in sums for one in (each, each)), Traffic())
    assert len(shares) == len(profile.layers), "a profile is of the units of its model"
    held = [share * one.gradient_bytes for share, one in zip(shares, profile.layers, strict=True)]
    summed = traffic_of_sums(round(sum(held)), grid.data)
    compute_s = profile.rest.seconds(samples) + sum(
        share * (one.forward.seconds(samples) + one.backward.seconds(samples))
        for share, one in zip(shares, profile.layers, strict=True)
    )
    whole = sum(one.gradient_bytes for one in profile.layers) or 1
    return PredictedStep(
        compute_s=compute_s,
        exchange_s=in_groups_s(
            machines, grid.slices, moved.bytes_sent / grid.slices, moved.messages_sent / grid.slices
        )
        + in_groups_s(
            machines,
            grid.data,
            summed.bytes_sent / grid.data,
            summed.messages_sent / grid.data,
            stride=grid.slices,
        ),
        waiting_s=(profile.slowest - 1) * compute_s if machines.workers > 1 else 0.0,
        optimizer_s=profile.optimizer_s * sum(held) / whole,
    )
