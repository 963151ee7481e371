"""Saves a server's shards to the disk and to backups, and restores them from either."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from manyhands.data.store.atomic import WriteFailed
from manyhands.places.local.status import State
from manyhands.strategies.ps.live.member_resources import MemberContext, Snapshots
from manyhands.strategies.ps.live.message_events import ServerRecords
from manyhands.strategies.ps.live.payloads import Gradients
from manyhands.strategies.ps.live.snapshots import ShardSnapshot, pack_install, unpack_install
from manyhands.strategies.ps.live.stores import Stores
from manyhands.strategies.ps.server_core import ServerCore
from manyhands.strategies.ps.update_files import ShardRecorder

__all__ = ["ShardKeeping"]


class ShardKeeping:
    """The snapshots of one server process; `note` shows the user a notice, if there is one."""

    def __init__(
        self,
        context: MemberContext,
        snapshots: Snapshots,
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

    def packed(self, shard: int) -> list[Any]:
        """The payload of an Install: everything a backup needs."""
        return pack_install(self._stores.get(shard).state(), self._waiting(shard))

    def install(self, shard: int, payload: memoryview) -> None:
        """Load what a primary packed."""
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
            self._snapshots.save(
                shard,
                ShardSnapshot(
                    version=core.core.version,
                    state=self._stores.get(shard).state(),
                    held=self._waiting(shard),
                    core=json.dumps(core.state()),
                ),
            )
            self._unsaved.discard(shard)
        except WriteFailed as error:
            if shard not in self._unsaved:  # said once, until one is taken again
                self._unsaved.add(shard)
                self._note(f"no snapshot of shard {shard} at version {core.core.version}: {error}")
        self._records.saved(begin_ns)
        self._context.mark(core.core.version, State.COMPUTING)

    def _waiting(self, shard: int) -> dict[tuple[int, int], Tensor]:
        """The gradients that are committed and not in a step yet."""
        waiting = self._core.replicas[shard].core.steps.waiting
        held = self._gradients.held(shard)
        return {name: gradient for name, gradient in held.items() if name in waiting}
