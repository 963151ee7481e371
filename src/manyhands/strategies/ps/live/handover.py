"""Converts a regular checkpoint to snapshots of shards and back, so that a run may change its strategy.

    checkpoints/step-00000040  ──onto_shards──►  shards/*/step-00000040    a run that another strategy began
                               ◄─off_shards────                            … or ps with other servers or workers

A checkpoint says one thing of the data: the first `step` batches have been trained on. Shards say it too where all
updates of a batch make one step. Otherwise they stop with some batches done and earlier ones not, and no other
strategy can resume from that.
"""

from __future__ import annotations

import json
from dataclasses import replace

from manyhands.data.store.checkpoint import Loaded, NoCheckpoint, Snapshot
from manyhands.data.store.rundir import RunDirectory
from manyhands.data.store.state_tree import restore_optimizer
from manyhands.engine.computing import Built, Computer, TrainingPlan
from manyhands.errors import UserError
from manyhands.strategies.ps.live.live_training import resume_point
from manyhands.strategies.ps.live.snapshots import ShardSnapshot, ShardSnapshots
from manyhands.strategies.ps.live.worker_state import ResidualMemory
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.shard_core import ShardCore
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_replica import ShardReplica
from manyhands.strategies.ps.shard_state import merge, split
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.update_files import clear_records

__all__ = ["off_shards", "onto_shards"]


def onto_shards(
    directory: RunDirectory, start: Loaded | None, plan: TrainingPlan, strategy: Ps, workers: int
) -> None:
    """Make `start` the state from which the shards of `strategy` continue; other shards' files are removed.

    Takes the tensors out of `start`; without one, the run begins again. UserError if it is of another optimizer,
    WriteFailed if the disk does not take it.
    """
    states = []
    if start is not None:
        built, layout = _built(plan, strategy, start.step)
        built.model.load_state_dict(start.model)
        restore_optimizer(built.optimizer, start.optimizer)
        model, optimizer = built.model.state_dict(), built.optimizer.state_dict()
        states = [split(layout, shard, model, optimizer, start.step) for shard in range(layout.shards)]
    snapshots = ShardSnapshots(directory.path, strategy.servers)
    snapshots.remove_after(-1)
    ResidualMemory.remove_after(directory.path, -1)
    clear_records(directory.path)
    for shard, state in enumerate(states):
        config = ShardConfig(
            shard=shard,
            num_shards=strategy.servers,
            policy=strategy.consistency,
            steps=plan.steps,
            slots=tuple(range(workers)),
        )
        replica = ShardReplica(config, member=0)
        replica.core = ShardCore(config, state.batches)
        core = json.dumps(replica.state())
        snapshots.save(shard, ShardSnapshot(version=state.batches, state=state, held={}, core=core))


def off_shards(directory: RunDirectory, plan: TrainingPlan, strategy: Ps) -> None:
    """Write a checkpoint of the shards of `strategy`, if they are ahead of the newest one.

    UserError if the shards stopped with batches missing between those that are done.
    """
    point = resume_point(directory.path, strategy)
    try:
        kept = directory.checkpoints().load()
    except NoCheckpoint:
        kept = None
    if point is None or (kept is not None and point.to_come.start <= kept.step):
        return
    if not strategy.consistency.stepwise:
        raise UserError(
            f"{directory.path} cannot be resumed with another strategy or number of workers yet: it stopped in the "
            f"middle of consistency={strategy.consistency}, where batches are done out of their order; resume it with "
            f"{str(strategy)!r} and workers={directory.config['workers']}, and change them once that has ended"
        )
    found = ShardSnapshots(directory.path, strategy.servers).at([point.version] * strategy.servers)
    assert found is not None, "the point is of these snapshots"
    built, layout = _built(plan, strategy, point.to_come.start)
    if kept is not None:
        built.model.load_state_dict(kept.model)  # shards have no buffers
    model, optimizer = merge(layout, [one.state for one in found], built.model.state_dict())
    directory.checkpoints().save(
        Snapshot(
            step=point.to_come.start,
            model=model,
            optimizer=optimizer,
            extra={"seed": plan.seed},
            may_hold_infinity=frozenset(name for name, _ in built.model.named_buffers()),
        )
    )


def _built(plan: TrainingPlan, strategy: Ps, step: int) -> tuple[Built, FlatLayout]:
    computer = Computer(replace(plan, device="cpu"), 0)
    built = computer.build(step)
    model, sparse = built.model, computer.task.sparse
    return built, FlatLayout.of(model, built.optimizer, strategy.servers, sparse, strategy.facts.stepping)
