"""The executor of a replay: does what `ReplayOrder` says, with the components of the live processes.

One model computes for all workers in order, from values that are copied in as a pull would, in memory laid out
like a worker's; the stores of all shards take the steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.data.experience import Experience
from manyhands.data.store.rundir import parameter_shapes
from manyhands.engine.computing import Built, Computed, Computer, TrainingPlan
from manyhands.engine.device import check_device
from manyhands.strategies.common.tables.row_filters import HeldRows
from manyhands.strategies.ps.digests import gradient_hash, shard_digest
from manyhands.strategies.ps.live.area import AreaPart, WorkerArea
from manyhands.strategies.ps.live.row_payloads import pack
from manyhands.strategies.ps.live.shard_encoding import RangeCoding
from manyhands.strategies.ps.live.worker_state import ReplicaModel
from manyhands.strategies.ps.live.worker_tables import tables_of
from manyhands.strategies.ps.log_rows import StepRow
from manyhands.strategies.ps.ps_messages import LEAD
from manyhands.strategies.ps.replay_order import (
    Forget,
    ReplayApply,
    ReplayCompute,
    ReplayKeep,
    ReplayOrder,
    num_batches,
)
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import Contribution, ShardStore, add_up
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.update_files import ComputedRow, RunRecord
from manyhands.task import Task


class Difference(NamedTuple):
    """Where a replay departs from the recorded run."""

    shard: int
    version: int | None  # that the update became at that shard; None if it was never applied there
    slot: int
    clock: int
    batch: int
    sentence: str


class ReplayStage:
    """The state of a worker and of all servers of the run, in one process; a context manager."""

    def __init__(self, task: Task, record: RunRecord, strategy: Ps) -> None:
        plan = TrainingPlan(
            task=task,
            steps=record.steps,
            seed=record.seed,
            evaluate_every=record.steps,
            checkpoint_every=0,
            device=check_device(record.device),
            autocast=record.autocast,
        )
        self.computer = Computer(plan, 0)
        built = self.computer.build()
        self.layout = FlatLayout.of(
            built.model, built.optimizer, strategy.servers, task.sparse, strategy.facts.stepping
        )
        self._strategy, self._seed = strategy, record.seed
        self._codings: dict[int, RangeCoding] = {}
        self.parameters = parameter_shapes(built.model.named_parameters())
        # Whether what a process computes depends on what it computed before
        self.has_state = any(True for _ in built.model.buffers()) or isinstance(task.data, Experience)
        self._built, self._sparse, self._workers = built, task.sparse, record.workers
        self._held: dict[int, list[HeldRows]] = {}

    def __enter__(self) -> ReplayStage:
        self._acting = ExitStack()
        if isinstance(self.computer.task.data, Experience):
            self._acting.enter_context(self.computer.loading_ahead())
        self.area = WorkerArea.create(self.layout)
        self.replica = ReplicaModel(self._built.model, self.layout, self.area)
        self.replica.model.train()
        self.tables = tables_of(self._strategy, self._built, self.layout, self._sparse, self._workers)
        return self

    def __exit__(self, *_: object) -> None:
        self._acting.close()
        self.replica.close()
        self.area.close()

    def store(self, shard: int) -> ShardStore:
        store = ShardStore(self._build(), self.layout, shard)
        store.votes = self._strategy.votes
        store.mark_rows(self._strategy.filter.kkt)
        return store

    def _build(self) -> Built:
        return self.computer.build()

    def coding(self, process: int) -> RangeCoding:
        if process not in self._codings:
            codec, feedback = self._strategy.codec, self._strategy.feedback
            self._codings[process] = RangeCoding(self.layout, codec, feedback=feedback, seed=self._seed)
        return self._codings[process]

    def switch(self, process: int) -> None:
        """Let the tables have what this process keeps of their gradients."""
        if process not in self._held:
            self._held[process] = self.tables.hold_anew()
        self.tables.held = self._held[process]

    def evaluate(self, model: nn.Module) -> dict[str, float] | None:
        """The metrics of a model, which is on the CPU again afterwards."""
        evaluated = self.computer.evaluate(model.to(self.computer.device))
        model.cpu()
        return evaluated[0] if evaluated is not None else None


class _Values(NamedTuple):
    """The values of a shard at one version."""

    dense: Tensor
    tables: dict[str, Tensor]


class Player:
    """Executes the actions of a `ReplayOrder`."""

    def __init__(self, stage: ReplayStage, order: ReplayOrder) -> None:
        self._stage, self._order, self._layout = stage, order, stage.layout
        shards = range(stage.layout.shards)
        self._stores = [stage.store(shard) for shard in shards]
        self._versions = [0 for _ in shards]
        self._parts = [stage.area.part(shard) for shard in shards]
        self._kept: dict[tuple[int, int], _Values] = {}
        self._gradients: dict[tuple[int, tuple[int, int, int]], Contribution] = {}
        self._computed: dict[tuple[int, int, int], Computed] = {}
        self._buffers = ProcessBuffers(stage.replica.model)
        self._process: int | None = None  # whose buffers the model is to have
        self._ends: dict[int, _Values] = {}
        self._stopped = False
        self.batches = [0 for _ in shards]
        self.updates = 0
        self.last_batch = -1  # the greatest of those that the lead shard applied; -1 before the first
        self._last_parts: dict[int, Computed] = {}
        self.peak_bytes = 0

    def play(self) -> Difference | None:
        for shard in range(self._layout.shards):
            self._end(shard)
        for action in self._order:
            match action:
                case ReplayCompute():
                    difference = self._compute(action)
                    if difference is not None:
                        self._stopped = True
                        return difference
                case ReplayApply(row=row):
                    self._apply(row)
                case ReplayKeep(shard=shard, version=version):
                    self._kept[shard, version] = self._values(shard)
                case Forget(shard=shard, version=version):
                    del self._kept[shard, version]
            held = sum(
                one.gradient.memory.nbytes + sum(rows.values.nbytes for rows in one.rows.values())
                for one in self._gradients.values()
            )
            kept = sum(
                values.dense.nbytes + sum(rows.nbytes for rows in values.tables.values())
                for values in self._kept.values()
            )
            self.peak_bytes = max(self.peak_bytes, held + kept)
        return None

    @property
    def loss(self) -> float | None:
        """The loss of the last batch, as in the history; None before the first."""
        parts = [self._last_parts[part] for part in sorted(self._last_parts)]
        applied = sum(one.share for one in parts)
        loss = sum(one.loss * one.share for one in parts)
        # Of a batch of which a part came too late to count, the mean over the others.
        return (loss if math.isclose(applied, 1) else loss / applied) if parts else None

    def digests(self) -> list[str]:
        return [shard_digest(store, self._layout, shard) for shard, store in enumerate(self._stores)]

    def model(self) -> nn.Module:
        model, source = self._stage.computer.build().model, self._stage.replica.model
        theirs = dict(source.named_parameters())
        with torch.no_grad():
            for shard, values in () if self._stopped else self._ends.items():
                self._parts[shard].values.copy_(values.dense)
                for table in self._layout.tables:
                    own = table.placed(self._layout.shards).rows(shard)
                    theirs[table.name][own] = values.tables[table.name].view(len(own), *table.shape[1:])
            if not self._stopped:
                self._stage.replica.pulled()
            for name, parameter in model.named_parameters():
                parameter.copy_(theirs[name])
            if self._process is not None:
                self._buffers.switch(self._process)
            for own, other in zip(model.buffers(), source.buffers(), strict=True):
                own.copy_(other)
        return model.cpu()

    def _compute(self, compute: ReplayCompute) -> Difference | None:
        row, stage = compute.row, self._stage
        self._read(row, self._parts)
        stage.replica.pulled()
        self._buffers.switch(row.process)
        stage.replica.begin()
        stage.tables.begin()
        prepare = (lambda batch: self._read_rows(row, batch)) if stage.tables.exist else None
        stage.computer.act_as(row.process, row.slot)
        done = stage.computer.compute(
            stage.replica.model, row.batch, row.part, row.parts, stage.replica.backward, prepare
        )
        stage.replica.end()
        if compute.undone:
            stage.replica.undo()
        stage.switch(row.process)
        stage.tables.collect(done.share, row.batch)
        self._computed[row.name] = done
        return self._take(compute, self._parts)

    def _read(self, row: ComputedRow, parts: Sequence[AreaPart]) -> None:
        """Copy the versions that were read into a worker's memory."""
        coding = self._stage.coding(row.process)
        coding.begin(row.batch, row.part)
        for shard, version in enumerate(row.versions):
            kept = self._kept.get((shard, version))
            if kept is not None:
                parts[shard].values.copy_(kept.dense)
            else:
                self._stores[shard].read_into(parts[shard].values)
            if coding.codes_values:
                coding.round(shard, self._layout.range_in(parts[shard].values, shard))

    def _take(self, compute: ReplayCompute, parts: Sequence[AreaPart]) -> Difference | None:
        """Compare a gradient with its record, and keep it for the shards that applied it."""
        row, stage, coding = compute.row, self._stage, self._stage.coding(compute.row.process)
        self.updates += 1
        for shard, part in enumerate(parts):
            if coding.codes_gradients:
                coding.round(shard, part.gradient)
            found = gradient_hash(part.flags, part.gradient, stage.tables.gradients(shard))
            if found != row.gradients[shard]:
                applied = self._order.applied_as[shard].get(row.name)
                became = (
                    f"version {applied}" if applied is not None else "an update that was not applied there"
                )
                where = f"shard {shard}, {became} (slot {row.slot}, clock {row.clock}, batch {row.batch})"
                sentence = f"{where}: its gradient differs from the recorded one"
                return Difference(shard, applied, row.slot, row.clock, row.batch, sentence)
        for shard in compute.shards:
            part = parts[shard]
            self._gradients[shard, row.name] = Contribution(
                gradient=self._layout.range_in(part.gradient.memory.clone(), shard),
                present=part.flags.clone(),
                rows=stage.tables.gradients(shard),
            )
        return None

    def _settings(self, row: StepRow) -> str:
        """What a loop of the user's own gave the optimizer for this step."""
        del row
        return ""

    def _read_rows(self, row: ComputedRow, batch: Any) -> None:
        """Bring the rows that a batch reads up to the version that its worker read."""
        tables = self._stage.tables
        for shard in tables.choose(batch):
            kept = self._kept.get((shard, row.rows_versions[shard]))
            values = []
            for table, rows in zip(self._layout.tables, tables.chosen(shard), strict=True):
                if kept is not None:
                    local = table.placed(self._layout.shards).local(rows)
                    values.append(kept.tables[table.name][local])
                else:
                    values.append(self._stores[shard].tables[table.name].gather(rows))
            tables.put(shard, memoryview(b"".join(map(bytes, pack((), values)))))

    def _apply(self, row: StepRow) -> None:
        shard = row.shard
        contributions = self._contributions(row)
        self._stores[shard].apply(contributions, row.rate, num_batches(row), self._settings(row))
        self._versions[shard] = row.version
        if row.version <= self._order.limits[shard]:
            self.batches[shard] += num_batches(row)
            for update in row.updates if shard == LEAD else ():
                # The losses of the last batch, and the last update's process, whose buffers the final model has.
                done = self._computed.pop(update.name)
                if done.share and update.batch > self.last_batch:
                    self.last_batch, self._last_parts = update.batch, {}
                if done.share and update.batch == self.last_batch:
                    self._last_parts[update.part] = done
                self._process = self._order.computed[update.name].process
        self._end(shard)

    def _contributions(self, row: StepRow) -> list[Contribution]:
        """The gradients of a step; those of one host are added up first, as their carrier did."""
        shard, of_host = row.shard, dict[int, list[Contribution]]()
        for update in row.updates:
            gradient = self._gradients.pop((shard, update.name))
            carrier = update.slot if update.carrier < 0 else update.carrier
            of_host.setdefault(carrier, []).append(gradient)
        factors = {update.slot: update.factor for update in row.updates}
        return [replace(self._summed(shard, terms), factor=factors[slot]) for slot, terms in of_host.items()]

    def _summed(self, shard: int, terms: Sequence[Contribution]) -> Contribution:
        if len(terms) == 1:
            return terms[0]
        into = self._layout.range_in(torch.zeros_like(terms[0].gradient.memory), shard)
        reached = add_up(terms, into)
        return Contribution(gradient=into, present=torch.tensor(reached, dtype=torch.uint8))

    def _values(self, shard: int) -> _Values:
        store, shards = self._stores[shard], self._layout.shards
        tables = {
            table.name: store.tables[table.name].gather(table.placed(shards).rows(shard))
            for table in self._layout.tables
        }
        return _Values(store.values.memory.clone(), tables)

    def _end(self, shard: int) -> None:
        """Save a shard's final values when it reaches its limit: it may have to advance for the sake of others."""
        if self._versions[shard] == self._order.limits[shard]:
            self._ends[shard] = self._values(shard)


class ProcessBuffers:
    """The buffers of every worker process, for a single model that serves all of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._first = model, [buffer.clone() for buffer in model.buffers()]
        self._kept: dict[int, list[Tensor]] = {}
        self._current: int | None = None

    def switch(self, process: int) -> None:
        """Load the last buffers of a process into the model."""
        if process == self._current or not self._first:
            return
        if self._current is not None:
            self._kept[self._current] = [buffer.clone() for buffer in self._model.buffers()]
        with torch.no_grad():
            wanted = self._kept.get(process, self._first)
            for buffer, value in zip(self._model.buffers(), wanted, strict=True):
                buffer.copy_(value)
        self._current = process
