"""The stores of a server process, created on first use, and their handover at the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from manyhands.strategies.ps.digests import shard_digest
from manyhands.strategies.ps.live.area import SharedParameters
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.reports import LeftShard
from manyhands.strategies.ps.server_core import ServerCore
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_state import ShardState
from manyhands.strategies.ps.shard_store import ShardStore

__all__ = ["Stores"]


class Stores:
    """The stores by shard; `is_primary` says which shards this server serves, whose workers read `home` if given."""

    def __init__(
        self,
        job: Job,
        layout: FlatLayout,
        home: SharedParameters | None,
        is_primary: Callable[[int], bool],
    ) -> None:
        self._job, self._layout, self._home, self._is_primary = job, layout, home, is_primary
        self._stores: dict[int, ShardStore] = {}

    def get(self, shard: int) -> ShardStore:
        """The store of a shard, created from the job's initial state if there is none."""
        store = self._stores.get(shard)
        if store is None:
            _, built, _ = self._job.build()
            is_read_here = self._home is not None and self._is_primary(shard)
            memory = self._home.part(shard) if self._home is not None and is_read_here else None
            store = self._stores[shard] = ShardStore(built, self._layout, shard, memory)
            store.votes = self._job.strategy.votes
            store.averaging = self._job.averaging
        return store

    def known(self, shard: int) -> ShardStore | None:
        """The store of a shard, if there is one."""
        return self._stores.get(shard)

    def load(self, shard: int, state: ShardState) -> None:
        """Replace a shard's store with a new one in this state."""
        self.discard(shard)
        self.get(shard).load_state(state)

    def discard(self, shard: int) -> None:
        """Release a store."""
        self._stores.pop(shard, None)

    def leave(
        self,
        hand_over: Callable[[FlatLayout, int, ShardStore], None],
        wanted: Collection[int],
        core: ServerCore,
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
                    member=core.member,
                    staleness=tuple(sorted(staleness[shard].items())),
                    nbytes=store.nbytes,
                    sha256=shard_digest(store, self._layout, shard),
                    version=core.replicas[shard].core.version,
                )
            )
        return shards
