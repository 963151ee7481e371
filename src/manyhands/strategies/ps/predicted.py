"""What workers and servers of `ps` send in a step, from the layout of the shards and the sizes of their codec."""

from __future__ import annotations

from manyhands.facts import TracedModel
from manyhands.strategies.ps.live.shard_encoding import RangeCoding
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategy import WorkerTraffic
from manyhands.wire.names import has_known_size


def sent_in_step(strategy: Ps, traced: TracedModel, workers: int) -> list[WorkerTraffic] | None:
    """None for tables, backup workers, whose late pushes may be left out, and codecs whose size depends on values.

    A server sends a backup the gradients that it got; where memory is shared, the backup reads them there. A run counts
    what workers send, and each server records what it answers.
    """
    policy, sparse = strategy.consistency, traced.task.sparse
    backups = policy.stepwise and policy.chosen_by_lead
    if sparse or strategy.filter or backups or not has_known_size(strategy.codec):
        return None
    ways = strategy.facts.stepping
    layout = FlatLayout.of(traced.model, traced.optimizer, strategy.servers, sparse, ways)
    coding, inline = RangeCoding(layout, strategy.codec), strategy.uses_network
    shards = range(layout.shards)
    flags = sum(map(layout.flag_bytes, shards)) if inline else 0
    plain = sum(map(layout.range_bytes, shards))
    encoded = sum(map(coding.most_bytes, shards)) if coding.codec is not None else plain
    values = 0 if strategy.reads_in_place else encoded if coding.codes_values else plain
    slots = tuple(range(workers))
    config = ShardConfig(shard=0, num_shards=layout.shards, policy=policy, steps=1, slots=slots)
    # Parts of one batch make a step, or each batch is an update of its own. Each is answered with the parameters.
    updates = workers if policy.stepwise else 1
    messages = layout.shards * (
        2 if config.confirms else 1
    )  # the read goes with the push, or after all of them
    forwarded = strategy.replicas * (flags + plain if inline else 0)
    servers, answers = strategy.num_server_processes, layout.shards * (1 + strategy.replicas)
    return [
        WorkerTraffic.of_all("worker", workers, updates * (encoded + flags), updates * messages),
        WorkerTraffic.of_all("server", servers, updates * (values + forwarded), updates * answers),
    ]
