"""The core of one server process: routes messages to the replicas of its shards, and creates new ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from manyhands.strategies.ps.actions import Action, SendMessage
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.ps_messages import (
    LEAD,
    Chosen,
    ChosenKept,
    Forward,
    Forwarded,
    Hello,
    Install,
    Message,
    NotPrimary,
    Push,
    Read,
    ReadRows,
    View,
    Yield,
)
from manyhands.strategies.ps.shard_replica import ShardReplica

__all__ = ["ServerCore"]

_OF_WORKERS = (Push, Read, ReadRows, Hello)
_FOR_SERVERS = (*_OF_WORKERS, Forward, Forwarded, Chosen, Yield)


class ServerCore:
    """All shards of which server `member` is a replica; `config` is what they have in common."""

    def __init__(
        self,
        config: ShardConfig,
        member: int,
        make_replica: Callable[[ShardConfig, int], ShardReplica] = ShardReplica,
    ) -> None:
        self._config = config
        self._make_replica = make_replica
        self.member = member
        self.replicas: dict[int, ShardReplica] = {}

    @property
    def awaited_member(self) -> int | None:
        """The worker whose missing update holds reads back, if any."""
        serving = (replica.serving for replica in self.replicas.values() if replica.serving is not None)
        return next((one.awaited_member for one in serving if one.awaited_member is not None), None)

    def restore(self, shard: int, state: dict[str, Any] | None) -> None:
        """Go back to a snapshot (None: to the start), before the view that makes this server primary of `shard`."""
        self._replica(shard).restore(state)

    def view(self, view: View) -> list[Action]:
        """Handle a membership change, or a repeated view."""
        actions: list[Action] = []
        for place in view.shards:
            if place.shard in self.replicas or self.member in (place.primary, place.backup):
                actions += self._replica(place.shard).view(view)
        return actions

    def keeps(self, message: Push | Forward) -> bool:
        """Whether `handle` will keep the gradient of this message; if not, its payload need not be looked up."""
        replica = self.replicas.get(message.shard)
        return replica is not None and replica.keeps(message)

    def handle(self, message: Message, sender: int) -> list[Action]:
        """The actions for a message of member `sender`."""
        if isinstance(message, _FOR_SERVERS):
            replica = self.replicas.get(message.shard)
        elif isinstance(message, ChosenKept):  # of another shard, for the lead
            replica = self.replicas.get(LEAD)
        elif isinstance(message, Install):
            replica = self._replica(message.shard)
        elif isinstance(message, View):
            return self.view(message)
        else:
            raise ValueError(f"server {self.member} was sent a {type(message).__name__}")
        if replica is not None:
            return replica.handle(message, sender)
        if isinstance(message, _OF_WORKERS):
            return [SendMessage(sender, NotPrimary(shard=message.shard, epoch=-1))]
        return []  # of a part in the shard that this server does not have yet, or had in an earlier life

    def _replica(self, shard: int) -> ShardReplica:
        if shard not in self.replicas:
            self.replicas[shard] = self._make_replica(replace(self._config, shard=shard), self.member)
        return self.replicas[shard]
