"""Around a run of `fit`: a bar while it goes on, and the weights of its last whole pass where it was interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from manyhands.observe.bars import Bars, Phase
from manyhands.server.layout import FlatLayout
from manyhands.server.live.snapshots import ShardSnapshots
from manyhands.server.shard_state import merge
from manyhands.store.checkpoint import NoCheckpoint
from manyhands.store.rundir import RunDirectory
from manyhands.strategy import Ps, Strategy
from manyhands.task import Task

__all__ = ["BarView", "Kept", "last_kept"]

_LOOK_EVERY_S = 0.25


class BarView:
    """Moves a bar along with the steps of a run, as `fit` asks a view to; a thread of its own looks at them."""

    def __init__(self, bars: Bars, batch: int, steps: int, snapshot: Callable[[], Any]) -> None:
        self._phase = bars.phase("learning", steps * batch, "examples")
        self._batch = batch
        self._snapshot = snapshot
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="bar", daemon=True)

    def __enter__(self) -> Self:
        self._phase.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._phase.__exit__(kind, error, trace)

    def _follow(self) -> None:
        phase: Phase = self._phase
        shown = 0
        while not self._over.wait(_LOOK_EVERY_S):
            step = self._snapshot().step
            phase.advance((step - shown) * self._batch)
            shown = step


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
