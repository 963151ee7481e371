"""What a model on parameter servers was worth on the way: its shards' snapshots, evaluated after the run."""

from __future__ import annotations

from pathlib import Path

from manyhands.computing import Computer, TrainingPlan
from manyhands.errors import CorruptCheckpoint
from manyhands.randomness import preserved
from manyhands.server.layout import Entry, FlatLayout, Table
from manyhands.server.live.snapshots import ShardSnapshots
from manyhands.server.shard_state import merge
from manyhands.strategy import Ps

__all__ = ["evaluate_snapshots"]


def evaluate_snapshots(run: Path, strategy: Ps, plan: TrainingPlan) -> dict[int, dict[str, float]]:
    """The metrics by the number of global batches, for every version that all shards have a good snapshot of.

    Buffers, such as the statistics of batch norm, are each worker's own and not in a snapshot: where a model has some,
    nothing can be said of it between the start and the end, and nothing is.
    """
    if plan.task.evaluation is None:
        return {}
    kept = ShardSnapshots(run, keep=1)
    versions = set.intersection(*(kept.versions(shard) for shard in range(strategy.servers)))
    found: dict[int, dict[str, float]] = {}
    with preserved():
        computer = Computer(plan, 0)
        built = computer.build()
        layout = FlatLayout.of(built.model, built.optimizer, strategy.servers, plan.task.sparse)
        everything: tuple[Entry | Table, ...] = (*layout.entries, *layout.tables)
        trained = {name for one in everything for name in one.aliases}
        frozen = {name for name, one in built.model.named_parameters() if not one.requires_grad}
        if set(built.model.state_dict()) - trained - frozen:
            return {}
        for version in sorted(versions):
            try:
                shards = [kept.load(shard, version) for shard in range(strategy.servers)]
            except CorruptCheckpoint:
                continue
            states = [shard.state for shard in shards if shard is not None]
            if len(states) < strategy.servers:
                continue
            model, _ = merge(layout, states, built.model.state_dict())
            built.model.load_state_dict(model)
            evaluated = computer.evaluate(built.model)
            assert evaluated is not None, "there is evaluation data"
            found[states[0].batches] = evaluated[0]
    return found
