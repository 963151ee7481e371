"""What the workers of `local` send in a step of a long run: an average every few steps, and gossip in all others."""

from __future__ import annotations

import math
from collections import Counter

import torch

from manyhands.engine.exchange import Traffic
from manyhands.facts import TracedModel
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.collective_traffic import sent_in_memory, sent_over_links
from manyhands.strategies.common.collectives.schedule_collective import carrier
from manyhands.strategies.local.local_exchange import launched_by_average, partner
from manyhands.strategies.local.strategy import Local
from manyhands.strategy import WorkerTraffic, silent
from manyhands.wire.flat_layout import trainable
from manyhands.wire.names import has_known_size


def sent_in_step(strategy: Local, traced: TracedModel, workers: int) -> list[WorkerTraffic] | None:
    """None for codecs whose size depends on values; the `first` steps, with an average each, do not count."""
    if not has_known_size(strategy.codec):
        return None
    if workers == 1:
        return silent(1)
    sent, averages = Traffic(), 0.0 if strategy.steps == math.inf else 1 / strategy.steps
    if averages:
        parcels = launched_by_average(strategy, traced.model, traced.optimizer, workers)
        if strategy.uses_network:
            carries = carrier(strategy.codec, feedback=strategy.feedback, seed=0, rank=0, world=workers)
            sent, _ = sent_over_links(ALGORITHMS["ring"], workers, parcels, carries)
        else:
            sent = sent_in_memory(parcels, workers)
    met, others = _sent_in_gossip(strategy, traced, workers), 1 - averages
    num_bytes = averages * sent.bytes_sent + others * met.bytes_sent
    messages = averages * sent.messages_sent + others * met.messages_sent
    return [WorkerTraffic.of_all("worker", workers, num_bytes, messages)]


def _sent_in_gossip(strategy: Local, traced: TracedModel, workers: int) -> Traffic:
    """What all workers together send after a step that no average follows; in each round as many are paired."""
    if not strategy.gossip:
        return Traffic()
    num_bytes: Counter[torch.dtype] = Counter()
    for parameter in trainable(traced.model):
        num_bytes[parameter.dtype] += parameter.nbytes
    paired = sum(partner(rank, workers, 0) is not None for rank in range(workers))
    return Traffic(messages_sent=paired * len(num_bytes), bytes_sent=paired * num_bytes.total())
