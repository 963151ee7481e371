"""The stores of a server process, created on first use: the parameters that go to workers, and what is left at the end.

A worker finds a shard's parameters in the shared copy, in its own memory, or in the message that answers it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.checkpoint import CheckpointStore
from manyhands.data.store.state_tree import restore_optimizer
from manyhands.places.local.status import State
from manyhands.strategies.ps.digests import shard_digest
from manyhands.strategies.ps.live.area import SharedParameters
from manyhands.strategies.ps.live.message_events import ServerRecords
from manyhands.strategies.ps.live.payloads import Gradients
from manyhands.strategies.ps.live.ps_job import Job, MemberContext
from manyhands.strategies.ps.live.reports import LeftShard
from manyhands.strategies.ps.live.shard_encoding import RangeCoding
from manyhands.strategies.ps.live.snapshots import ShardSnapshot, ShardSnapshots, unpack_install
from manyhands.strategies.ps.shard_layout import FlatLayout, ShardState, split
from manyhands.strategies.ps.shard_replica import ServerCore
from manyhands.strategies.ps.shard_store import ShardStore, byte_view
from manyhands.strategies.ps.update_files import ShardRecorder
from manyhands.transport.hub.hub import Hub


class Stores:
    """The stores by shard; `is_primary` says which shards this server serves, whose workers read `shared` if given.

    In lockstep no worker reads values that are changing.
    """

    def __init__(
        self,
        job: Job,
        core: ServerCore,
        layout: FlatLayout,
        gradients: Gradients,
        coding: RangeCoding,
        *,
        shared: SharedParameters | None,
        is_primary: Callable[[int], bool],
    ) -> None:
        self._job, self._core, self._layout, self._gradients = job, core, layout, gradients
        self._coding, self._shared, self._is_primary = coding, shared, is_primary
        self.by_shard: dict[int, ShardStore] = {}
        self.shards = layout.shards
        self._not_shared: set[int] = set()  # shards that workers do not read where their store lies
        self._encoded: dict[int, tuple[int, Tensor]] = {}  # by shard, parameters to send and their version
        self._is_lockstep = job.strategy.consistency.lockstep
        # By worker and shard: parameters on their way.
        self._under_way: dict[tuple[int, int], tuple[Tensor, memoryview]] = {}
        self._published: dict[int, int] = {}  # by shard, the version last copied to the shared copy

    def get(self, shard: int) -> ShardStore:
        """The store of a shard, created from the job's initial state if there is none."""
        store = self.by_shard.get(shard)
        if store is None:
            _, built, _ = self._job.build()
            memory = None
            if self._shared is not None and self._is_primary(shard):
                memory = self._shared.part(shard)
                self._not_shared.discard(shard)
            else:
                self._not_shared.add(shard)
            store = self.by_shard[shard] = ShardStore(built, self._layout, shard, memory)
            store.votes = self._job.strategy.votes
            store.mark_rows(self._job.strategy.filter.kkt)
            store.averaging = self._job.averaging
        return store

    def load(self, shard: int, state: ShardState) -> None:
        self.by_shard.pop(shard, None)
        self.get(shard).load_state(state)

    def load_checkpoint(self, shard: int, folder: str, step: int) -> None:
        """Continue from this shard's part of a regular checkpoint."""
        loaded = CheckpointStore(Path(folder)).load(step)
        _, built, _ = self._job.build()
        built.model.load_state_dict(loaded.model)
        restore_optimizer(built.optimizer, loaded.optimizer)
        model, optimizer = built.model.state_dict(), built.optimizer.state_dict()
        self.get(shard).load_state(split(self._layout, shard, model, optimizer, step))

    def deliver(self, hub: Hub, to: int, shard: int, ahead: int = 0) -> tuple[list[Any], int]:
        """Deliver a shard's parameters to worker `to`: what has to travel with the message, and the bytes moved.

        So many of the bytes were sent `ahead`.
        """
        store = self.get(shard)
        if self._shared is not None:
            if shard in self._not_shared:  # of a former backup: copied to where workers read them
                version = self._core.replicas[shard].core.version
                if self._published.get(shard) != version:
                    store.read_into(self._shared.part(shard))
                    self._published[shard] = version
            return [], 0
        own = self._gradients.parts.get((to, shard))
        if own is not None:  # the worker's memory
            store.read_into(own.values)
            return [], own.values.nbytes
        if self._coding.codes_values:
            version, known = self._core.replicas[shard].core.version, self._encoded.get(shard)
            if known is None or known[0] != version:
                known = self._encoded[shard] = (version, self._coding.encode(shard, store.values))
            return [known[1].numpy()], known[1].nbytes
        if self._is_lockstep:  # the next step waits for this worker, who pushes when all of it has arrived
            return [store.buffer[ahead:]], store.buffer.nbytes
        under_way = self._under_way.get((to, shard))
        if under_way is None or not hub.sent(to):  # what is still on its way must not change
            values = torch.empty(self._layout.range_bytes(shard), dtype=torch.uint8)
            under_way = self._under_way[to, shard] = (values, byte_view(values))
        values, sent = under_way
        store.read_into(values)
        return [sent], sent.nbytes

    def forget(self, member: int) -> None:
        """Release the buffers in flight to a member that is disconnected."""
        for to, shard in [key for key in self._under_way if key[0] == member]:
            del self._under_way[to, shard]

    def leave(
        self,
        hand_over: Callable[[FlatLayout, int, ShardStore], None],
        wanted: Collection[int],
        staleness: Mapping[int, Mapping[int, int]],
    ) -> list[LeftShard]:
        """Hand over the parameters of those shards that this server serves; returns a report of each."""
        shards = []
        for shard in range(self._layout.shards):
            if shard not in wanted or not self._is_primary(shard):
                continue
            store = self.get(shard)
            hand_over(self._layout, shard, store)
            shards.append(
                LeftShard(
                    shard=shard,
                    member=self._core.member,
                    staleness=tuple(sorted(staleness[shard].items())),
                    nbytes=store.nbytes,
                    sha256=shard_digest(store, self._layout, shard),
                    version=self._core.replicas[shard].core.version,
                )
            )
        return shards


class ShardKeeping:
    """Saves a server's shards to the disk, and restores them from there; `note` shows the user a notice, if any."""

    def __init__(
        self,
        context: MemberContext,
        snapshots: ShardSnapshots,
        core: ServerCore,
        stores: Stores,
        gradients: Gradients,
        logs: ShardRecorder,
        records: ServerRecords,
        note: Callable[..., None],
    ) -> None:
        self._context, self._core, self._stores, self._gradients = context, core, stores, gradients
        self._logs, self._records, self._note = logs, records, note
        self._snapshots = snapshots
        self._unsaved: set[int] = set()  # shards whose last snapshot the disk did not take

    def install(self, shard: int, payload: memoryview) -> None:
        state, held = unpack_install(payload)
        self._stores.load(shard, state)
        self._gradients.replace(shard, held)

    def restore(self, shard: int, version: int | None = None) -> None:
        """Load a snapshot of a shard that this server is about to serve and no other server has a copy of."""
        found = self._snapshots.load(shard, version) if self._snapshots.kept else None
        if found is None:  # none was written yet: from the beginning
            self._core.restore(shard, None)
            return
        self._stores.load(shard, found.state)
        self._gradients.replace(shard, found.held)
        self._core.restore(shard, json.loads(found.core))

    def save(self, shard: int) -> None:
        """Write a snapshot; a full disk costs the snapshot and not the run."""
        if not self._snapshots.kept:
            return
        core = self._core.replicas[shard]
        begin_ns = time.monotonic_ns()
        self._context.mark(core.core.version, State.SAVING)
        self._note(self._logs.sync(shard), ends_recording=True)  # on the disk before what follows from it
        try:
            state, held = self._stores.get(shard).state(), self.waiting(shard)
            text = json.dumps(core.state())
            snapshot = ShardSnapshot(version=core.core.version, state=state, held=held, core=text)
            self._snapshots.save(shard, snapshot)
            self._unsaved.discard(shard)
        except WriteFailed as error:
            if shard not in self._unsaved:  # said once, until one is taken again
                self._unsaved.add(shard)
                self._note(f"no snapshot of shard {shard} at version {core.core.version}: {error}")
        self._records.saved(begin_ns)
        self._context.mark(core.core.version, State.COMPUTING)

    def leave_copy(self, shard: int, folder: str, step: int) -> None:
        """Write the shard's state to `folder`, as of `step`, for the worker that puts all of them together."""
        state = self._stores.get(shard).state()
        snapshot = ShardSnapshot(version=step, state=state, held={}, core="")
        try:
            ShardSnapshots(Path(folder), self._stores.shards).save(shard, snapshot)
        except WriteFailed as error:
            self._note(f"the state of shard {shard} was not written to {folder}: {error}")

    def waiting(self, shard: int) -> dict[tuple[int, int], Tensor]:
        """The gradients that are committed and not in a step yet."""
        waiting = self._core.replicas[shard].core.steps.waiting
        held = self._gradients.held(shard)
        return {name: gradient for name, gradient in held.items() if name in waiting}
