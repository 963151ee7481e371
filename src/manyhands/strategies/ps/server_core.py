"""The core of one server process: routes messages to the replicas of its shards, and creates new ones."""

from __future__ import annotations

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


class ServerCore:
    """All shards of which server `member` is a replica; `config` is what they have in common."""

    def __init__(self, config: ShardConfig, member: int) -> None:
        self._config = config
        self.member = member
        self.replicas: dict[int, ShardReplica] = {}

    @property
    def awaited_member(self) -> int | None:
        """The worker whose missing update holds reads back, if any."""
        awaited = (replica.awaited_member for replica in self.replicas.values())
        return next((member for member in awaited if member is not None), None)

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
        match message:
            case Push() | Read() | Forward() | Forwarded() | Chosen() | ReadRows() | Hello() | Yield():
                replica = self.replicas.get(message.shard)
            case ChosenKept():
                replica = self.replicas.get(LEAD)
            case View():
                return self.view(message)
            case Install():
                replica = self._replica(message.shard)
            case _:
                raise ValueError(f"server {self.member} was sent a {type(message).__name__}")
        if replica is not None:
            return replica.handle(message, sender)
        if isinstance(message, Hello | Read | ReadRows | Push):
            return [SendMessage(to=sender, message=NotPrimary(shard=message.shard, epoch=-1))]
        return []  # of a part in the shard that this server does not have yet, or had in an earlier life

    def _replica(self, shard: int) -> ShardReplica:
        if shard not in self.replicas:
            self.replicas[shard] = self._make_replica(replace(self._config, shard=shard))
        return self.replicas[shard]

    def _make_replica(self, config: ShardConfig) -> ShardReplica:
        return ShardReplica(config, self.member)
