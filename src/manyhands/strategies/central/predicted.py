"""What the workers of `central` send in a step: what others read of their slices of the gradient."""

from __future__ import annotations

from manyhands.facts import TracedModel
from manyhands.strategies.central.shared_parameters import ownership_of
from manyhands.strategies.central.strategy import Central
from manyhands.strategies.common.collectives.collective import step_parcels
from manyhands.strategies.common.collectives.collective_traffic import sent_in_memory
from manyhands.strategy import WorkerTraffic, silent
from manyhands.wire.flat_layout import trainable


def sent_in_step(strategy: Central, traced: TracedModel, workers: int) -> list[WorkerTraffic]:
    if workers == 1:
        return silent(1)
    ways = strategy.facts.stepping
    owned = ownership_of(traced.model, traced.optimizer, strategy.buckets, ways, workers)
    shapes = [parameter.shape for parameter in trainable(traced.model)]
    parcels = step_parcels(owned.layouts, shapes, workers)
    sent = sent_in_memory(parcels, workers, owned.ranges)
    if traced.task.clip_norm is not None:  # the norm travels as a status
        sent += sent_in_memory(parcels[-1:], workers)
    return [WorkerTraffic.of_all("worker", workers, sent.bytes_sent, sent.messages_sent)]
