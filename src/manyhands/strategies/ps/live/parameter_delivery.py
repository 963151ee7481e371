"""Delivers a shard's parameters to a worker: in the shared copy, in the worker's memory, or in a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyhands.strategies.ps.live.area import SharedParameters
from manyhands.strategies.ps.live.payloads import Gradients
from manyhands.strategies.ps.live.shard_encoding import RangeCoding
from manyhands.strategies.ps.server_core import ServerCore
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import ShardStore
from manyhands.transport.hub.hub import Hub

__all__ = ["OutgoingParameters"]


class OutgoingParameters:
    """The outgoing parameters of one server process; under `is_lockstep` no worker reads values that are
    changing.
    """

    def __init__(
        self,
        core: ServerCore,
        store: Callable[[int], ShardStore],
        gradients: Gradients,
        layout: FlatLayout,
        *,
        home: SharedParameters | None,
        coding: RangeCoding,
        is_lockstep: bool,
    ) -> None:
        self._core, self._store, self._gradients, self._layout = core, store, gradients, layout
        self._home, self._coding, self._is_lockstep = home, coding, is_lockstep
        self._encoded: dict[int, tuple[int, Tensor]] = {}  # by shard, parameters to send and their version
        self._under_way: dict[tuple[int, int], Tensor] = {}  # parameters on their way to a worker, by shard
        self._published: dict[int, int] = {}  # by shard, the version last copied to the shared copy

    def payload(self, hub: Hub, to: int, shard: int) -> list[Any]:
        """Deliver a shard's parameters to worker `to`; returns the part that has to travel with the message."""
        if self._home is not None:
            self._publish(shard, self._home.part(shard))
            return []
        values = self._gradients.values(to, shard)
        if values is not None:
            self._store(shard).read_into(values)
            return []
        if self._coding.codes_values:
            return [self._encoded_values(shard).numpy()]
        if self._is_lockstep:  # the next step waits for this worker, who pushes when all of it has arrived
            return [self._store(shard).memory.numpy()]
        values = self._under_way.get((to, shard))
        if values is None or not hub.sent(to):  # what is still on its way must not change
            values = self._under_way[to, shard] = torch.empty(
                self._layout.range_bytes(shard), dtype=torch.uint8
            )
        self._store(shard).read_into(values)
        return [values.numpy()]

    def num_bytes(self, shard: int, payload: list[Any]) -> int:
        """The number of bytes that an answer with this payload moved."""
        in_memory = self._layout.range_bytes(shard) if self._home is None else 0
        return int(payload[0].nbytes) if payload else in_memory

    def forget(self, member: int) -> None:
        """Release the buffers in flight to a member that is disconnected."""
        for to, shard in [key for key in self._under_way if key[0] == member]:
            del self._under_way[to, shard]

    def _encoded_values(self, shard: int) -> Tensor:
        """A shard's encoded parameters, encoded once per version."""
        version = self._core.replicas[shard].core.version
        known = self._encoded.get(shard)
        if known is None or known[0] != version:
            known = self._encoded[shard] = (version, self._coding.encode(shard, self._store(shard).values))
        return known[1]

    def _publish(self, shard: int, values: Tensor) -> None:
        """Copy the parameters to where workers read them, if needed: a former backup's store lies elsewhere."""
        store, version = self._store(shard), self._core.replicas[shard].core.version
        if store.memory.data_ptr() != values.data_ptr() and self._published.get(shard) != version:
            store.read_into(values)
            self._published[shard] = version
