"""The stores of a server process, created on first use: the parameters that go to workers, and what is left at the end.

A worker finds a shard's parameters in the shared copy, in its own memory, or in the message that answers it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from manyhands.strategies.ps.digests import shard_digest
from manyhands.strategies.ps.live.area import SharedParameters
from manyhands.strategies.ps.live.payloads import Gradients
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.reports import LeftShard
from manyhands.strategies.ps.live.shard_encoding import RangeCoding
from manyhands.strategies.ps.server_core import ServerCore
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_state import ShardState
from manyhands.strategies.ps.shard_store import ShardStore
from manyhands.transport.hub.hub import Hub

__all__ = ["Stores"]


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
        self._stores: dict[int, ShardStore] = {}
        self._encoded: dict[int, tuple[int, Tensor]] = {}  # by shard, parameters to send and their version
        self._under_way: dict[tuple[int, int], Tensor] = {}  # parameters on their way to a worker, by shard
        self._published: dict[int, int] = {}  # by shard, the version last copied to the shared copy

    def get(self, shard: int) -> ShardStore:
        """The store of a shard, created from the job's initial state if there is none."""
        store = self._stores.get(shard)
        if store is None:
            _, built, _ = self._job.build()
            is_read_here = self._shared is not None and self._is_primary(shard)
            memory = self._shared.part(shard) if self._shared is not None and is_read_here else None
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

    def deliver(self, hub: Hub, to: int, shard: int) -> tuple[list[Any], int]:
        """Deliver a shard's parameters to worker `to`: what has to travel with the message, and the bytes moved."""
        store = self.get(shard)
        if self._shared is not None:
            values, version = self._shared.part(shard), self._core.replicas[shard].core.version
            # The store of a former backup lies elsewhere: its values are copied to where workers read them.
            if store.memory.data_ptr() != values.data_ptr() and self._published.get(shard) != version:
                store.read_into(values)
                self._published[shard] = version
            return [], 0
        own = self._gradients.values(to, shard)
        if own is not None:
            store.read_into(own)
            return [], self._layout.range_bytes(shard)
        if self._coding.codes_values:
            version, known = self._core.replicas[shard].core.version, self._encoded.get(shard)
            if known is None or known[0] != version:
                known = self._encoded[shard] = (version, self._coding.encode(shard, store.values))
            return [known[1].numpy()], known[1].nbytes
        if (
            self._job.is_lockstep
        ):  # the next step waits for this worker, who pushes when all of it has arrived
            return [store.memory.numpy()], store.memory.nbytes
        under_way = self._under_way.get((to, shard))
        if under_way is None or not hub.sent(to):  # what is still on its way must not change
            under_way = torch.empty(self._layout.range_bytes(shard), dtype=torch.uint8)
            self._under_way[to, shard] = under_way
        store.read_into(under_way)
        return [under_way.numpy()], under_way.nbytes

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
