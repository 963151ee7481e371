"""Around a run of `fit`: a bar while it goes on, and the weights of its last whole pass where it was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from manyhands.observe.bars import Bars, following
from manyhands.observe.totals import Snapshot as Totals
from manyhands.server.layout import FlatLayout
from manyhands.server.live.snapshots import ShardSnapshots
from manyhands.server.shard_state import merge
from manyhands.store.checkpoint import NoCheckpoint
from manyhands.store.rundir import RunDirectory
from manyhands.strategy import Ps, Strategy
from manyhands.task import Task

__all__ = ["Kept", "bar_view", "last_kept"]


@contextmanager
def bar_view(bars: Bars, batch: int, steps: int, snapshot: Callable[[], Totals]) -> Iterator[None]:
    """Move a bar along with the steps of a run, as `fit` asks a view to."""
    with (
        bars.phase("learning", steps * batch, "examples") as phase,
        following(lambda: snapshot().step * batch, phase.advance),
    ):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What an interrupted run left: parameters by name after `steps` steps, and the losses of those steps."""

    values: Mapping[str, Tensor]
    steps: int
    losses: list[float]


def last_kept(folder: Path, task: Task, strategy: Strategy) -> Kept | None:
    """The newest checkpoint in a run's directory; None where there is none yet."""
    directory = RunDirectory.open(folder, lock=False)
    try:
        found = _from_shards(folder, task, strategy) if isinstance(strategy, Ps) else _from_workers(directory)
        if found is None:
            return None
        steps, values = found
        losses = [row["loss"] for row in directory.metrics.read() if "loss" in row][:steps]
    finally:
        directory.close()
    return Kept(values=values, steps=steps, losses=losses)


def _from_workers(directory: RunDirectory) -> tuple[int, dict[str, Tensor]] | None:
    try:
        loaded = directory.checkpoints().load()
    except NoCheckpoint:
        return None
    return loaded.step, loaded.model


def _from_shards(folder: Path, task: Task, strategy: Ps) -> tuple[int, dict[str, Tensor]] | None:
    found = ShardSnapshots(folder, keep=1).newest_whole(strategy.servers)
    if found is None:
        return None
    model = task.model()
    layout = FlatLayout.of(model, task.optimizer(model.parameters()), strategy.servers, task.sparse)
    values, _ = merge(layout, [one.state for one in found], model.state_dict())
    return found[0].state.batches, values
