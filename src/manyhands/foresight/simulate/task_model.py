"""A real task as the model of a simulated run, built from the parts of live servers and workers in one process.

Values are laid out in memory as in a live worker and server, gradients are made by the code of a live run, and stores
are those of live servers. So a simulated run leaves the records of a live one, and `replay` reproduces it to the
byte.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from manyhands.errors import NonFinite
from manyhands.foresight.simulate.models import Gradient, Model, Store
from manyhands.strategies.ps.digests import gradient_hash, shard_digest
from manyhands.strategies.ps.ps_messages import Work
from manyhands.strategies.ps.replay_player import ProcessBuffers, ReplayStage
from manyhands.strategies.ps.shard_layout import FlatLayout, ShardState, merge
from manyhands.strategies.ps.shard_store import Contribution, ShardStore

__all__ = ["SimulatedGradient", "SimulatedTask", "TaskStore"]

_TIMED = 5  # timed computations, after one that warms up


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGradient:
    """Statistics of the gradient that a worker computed for its part of a batch."""

    loss: float
    share: float
    samples: int
    versions: tuple[int, ...]  # what it had read, by shard
    hashes: tuple[str, ...]  # of each shard's part


class _Read(NamedTuple):
    """The values of a shard at one version; a worker loads them while it computes."""

    values: Tensor
    version: int


class TaskStore(Store):
    """One copy of one shard: a live server's store."""

    def __init__(self, store: ShardStore, layout: FlatLayout, shard: int) -> None:
        self.store, self._layout, self._shard = store, layout, shard
        self._read: _Read | None = None
        self.version = 0

    def apply(self, gradients: Sequence[tuple[float, Gradient]], rate: float) -> None:
        contributions = [replace(contribution, factor=factor) for factor, (_, contribution) in gradients]
        self.store.apply(contributions, rate, len({batch for _, (batch, _) in gradients}))
        self._read = None
        self.version += 1

    def read(self) -> _Read:
        """Return a copy of the values, shared by all readers of this version."""
        if self._read is None:
            self._read = _Read(self.store.values.memory.clone(), self.version)
        return self._read

    def state(self) -> tuple[ShardState, int]:
        state = self.store.state()
        fresh = ShardState(
            model={name: value.clone() for name, value in state.model.items()},
            optimizer=tree_map_only(Tensor, Tensor.clone, state.optimizer),
            batches=state.batches,
        )
        return fresh, self.version

    def load(self, state: Any) -> None:
        shard_state, self.version = state
        self.store.load_state(shard_state)
        self._read = None

    @property
    def digest(self) -> str:
        return shard_digest(self.store, self._layout, self._shard)


class SimulatedTask(Model):
    """Computes a task's gradients with the parts of live workers; the caller enters and leaves `stage`."""

    def __init__(self, stage: ReplayStage) -> None:
        self._stage, self.layout = stage, stage.layout
        self._parts = [stage.area.part(shard) for shard in range(self.layout.shards)]
        self._buffers = ProcessBuffers(stage.replica.model)
        self.made: dict[int, SimulatedGradient] = {}  # by slot: the newest
        self.samples = 0

    def store(self, shard: int, num_shards: int) -> TaskStore:
        assert num_shards == self.layout.shards, "the stage was made for the run"
        return TaskStore(self._stage.store(shard), self.layout, shard)

    def gradient(self, slot: int, work: Work, read: Sequence[Any]) -> tuple[list[Gradient], float]:
        """Compute the gradient as a worker process does; NonFinite where the loss or gradient is not finite."""
        computer, replica = self._stage.computer, self._stage.replica
        self._show(read)
        self._buffers.switch(slot)
        replica.begin()
        done = computer.compute(replica.model, work.batch, work.part, work.parts, replica.backward)
        replica.end()
        if done.loss - done.loss != 0 or not replica.is_finite():
            raise NonFinite(
                f"worker {slot}, step {work.batch + 1}: the loss or the gradient is not finite and was not "
                "applied; try a smaller learning rate, or a staleness-aware one (consistency=aware:…)"
            )
        pushed = []
        for shard, part in enumerate(self._parts):
            gradient = self.layout.range_in(part.gradient.memory.clone(), shard)
            pushed.append((work.batch, Contribution(gradient=gradient, present=part.flags.clone())))
        self.samples += done.samples
        self.made[slot] = SimulatedGradient(
            loss=done.loss,
            share=done.share,
            samples=done.samples,
            versions=tuple(one.version for one in read),
            hashes=tuple(gradient_hash(part.flags, part.gradient) for part in self._parts),
        )
        return pushed, done.share

    def evaluate(self, slot: int, read: Sequence[Any]) -> tuple[dict[str, float], int] | None:
        self._show(read)
        self._buffers.switch(slot)
        return self._stage.computer.evaluate(self._stage.replica.model)

    def measure_step_s(self) -> float:
        """Measure how long one worker computes the first batch here, to two digits."""
        stage, took = self._stage, []
        for _ in range(_TIMED + 1):
            begin = time.perf_counter()
            stage.replica.begin()
            stage.computer.compute(stage.replica.model, 0, 0, 1, stage.replica.backward)
            stage.replica.end()
            took.append(time.perf_counter() - begin)
        stage.replica.undo()
        return float(f"{statistics.median(took[1:]):.1e}")

    def trained(self, stores: Sequence[Store], last_slot: int) -> tuple[nn.Module, dict[str, Any]]:
        """Return the final model, with the buffers of the worker that made the last update, and its optimizer."""
        model = self._stage.computer.build().model
        self._buffers.switch(last_slot)
        with torch.no_grad():
            for own, last in zip(model.buffers(), self._stage.replica.model.buffers(), strict=True):
                own.copy_(last)
        states = [store.store.state() for store in stores if isinstance(store, TaskStore)]
        values, optimizer = merge(self.layout, states, model.state_dict())
        model.load_state_dict(values)
        return model.cpu(), optimizer

    def _show(self, read: Sequence[Any]) -> None:
        for part, one in zip(self._parts, read, strict=True):
            part.values.copy_(one.values)
        self._stage.replica.pulled()
