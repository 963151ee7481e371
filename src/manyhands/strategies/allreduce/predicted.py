"""What the processes of `allreduce` send in a step, from the buckets, tables and codecs that are executed."""

from __future__ import annotations

from manyhands.facts import TracedModel
from manyhands.strategies.allreduce.exchange import algorithm_of
from manyhands.strategies.allreduce.helpers import sent_with_helpers
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.common.collectives.collective import gradient_layouts, step_parcels
from manyhands.strategies.common.collectives.collective_traffic import sent_in_memory, sent_over_links
from manyhands.strategies.common.collectives.row_sums import row_sparse
from manyhands.strategies.common.collectives.schedule_collective import carrier
from manyhands.strategy import WorkerTraffic, silent
from manyhands.wire.flat_layout import trainable
from manyhands.wire.names import has_known_size


def sent_in_step(strategy: AllReduce, traced: TracedModel, workers: int) -> list[WorkerTraffic] | None:
    """None for NCCL's own ways, codecs whose size depends on values, and sparse rows."""
    model = traced.model
    if strategy.link == "nccl" or not has_known_size(strategy.codec) or row_sparse(model):
        return None
    if workers == 1:
        return silent(1)
    shapes = [parameter.shape for parameter in trainable(model)]
    parcels = step_parcels(gradient_layouts(model, strategy.buckets), shapes, workers)
    if strategy.helpers:
        mine, theirs = sent_with_helpers(
            parcels, workers, strategy.helpers, strategy.codec, early=strategy.uses_network
        )
        return [
            WorkerTraffic.of_all("worker", workers, mine.bytes_sent, mine.messages_sent),
            WorkerTraffic.of_all("helper", strategy.helpers, theirs.bytes_sent, theirs.messages_sent),
        ]
    if strategy.facts.uses_links:
        carries = carrier(strategy.codec, feedback=strategy.feedback, seed=0, rank=0, world=workers)
        sent, _ = sent_over_links(algorithm_of(strategy, workers), workers, parcels, carries)
    else:
        sent = sent_in_memory(parcels, workers)
    return [WorkerTraffic.of_all("worker", workers, sent.bytes_sent, sent.messages_sent)]
