"""One server's replica of one shard, its role and what it does as a backup; and all replicas of a server.

A backup commits what it is forwarded and sends nothing to workers; when a view makes it primary (`ShardPrimary`),
everything is already there.

The driver delivers messages between two live members in the order in which they were sent, and none is lost while
both live. Repeating a view makes the lead resend what the others may lack.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from manyhands.strategies.ps.actions import Action, Discard, Keep, Load, SendMessage
from manyhands.strategies.ps.known_members import KnownMembers
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.ps_messages import (
    LAUNCHER,
    LEAD,
    Chosen,
    ChosenKept,
    Forward,
    Forwarded,
    Hello,
    HostPush,
    Install,
    Installed,
    Message,
    NotPrimary,
    Push,
    Read,
    ReadRows,
    View,
    Yield,
)
from manyhands.strategies.ps.shard_core import ShardCore
from manyhands.strategies.ps.shard_primary import ShardPrimary

_OF_WORKERS = (Push, HostPush, Read, ReadRows, Hello)
_OF_A_SHARD = (*_OF_WORKERS, Forward, Forwarded, Chosen, Yield)


class ReplicaRole(Enum):
    """A server's role for a shard."""

    PRIMARY = auto()  # it serves the shard
    BACKUP = auto()  # it holds a copy and commits what the primary forwards
    EMPTY = auto()  # it has no state of the shard: not yet, or not any more


class ShardReplica:
    """The replica of one shard on server `member`.

    A new one is empty. It becomes primary by a view, of a new shard or of what `restore` was given, and backup by
    an Install.
    """

    make_core = ShardCore
    make_primary = ShardPrimary

    def __init__(self, config: ShardConfig, member: int) -> None:
        self.config = config
        self.member = member
        self.core = self.make_core(config)
        self.role = ReplicaRole.EMPTY
        self.serving: ShardPrimary | None = None  # what it does as a primary; None in any other role
        self._known = KnownMembers()
        self._restored = False

    @property
    def epoch(self) -> int:
        return self._known.epoch

    @property
    def sequence(self) -> int:
        """The last entry of the log, committed or in flight."""
        return self.core.sequence if self.serving is None else self.serving.sequence

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go back to a snapshot, an earlier `state()`, before the view that makes this replica primary.

        None: there is no snapshot yet, and the shard begins again; the log says so, and what that loses.
        """
        make = self.make_core
        self.core = make(self.config) if state is None else make.from_state(self.config, state["core"])
        self._restored = True

    def view(self, view: View) -> list[Action]:
        known = self._known
        mine = next((place for place in view.shards if place.shard == self.config.shard), None)
        if mine is None or mine.epoch < known.epoch or view.epoch < known.view.epoch:
            return []
        before, changed = known.primaries, mine.epoch > known.epoch
        known.view, known.epoch, known.primary = view, mine.epoch, mine.primary
        known.primaries = {place.shard: (place.epoch, place.primary) for place in view.shards}
        known.lead = max(known.lead, known.primaries[LEAD])
        for place in (*view.slots, *view.retiring):
            if place.member > known.holders.get(place.slot, 0):
                known.holders[place.slot] = place.member
        if mine.primary != self.member:
            stays = mine.backup == self.member and self.role is ReplicaRole.BACKUP
            return self._step_down() if changed and not stays else []
        actions: list[Action] = []
        if self.serving is None:
            is_empty, restored = self.role is ReplicaRole.EMPTY, self._restored
            if is_empty:
                actions = self.core.restore(mine.epoch) if restored else self.core.open_log()
            self.role = ReplicaRole.PRIMARY
            self.serving = self.make_primary(self.core, known, self.member, restored=is_empty and restored)
        return actions + self.serving.follow(mine, before, changed=changed)

    def keeps(self, message: Push | HostPush | Forward) -> bool:
        """Whether `handle` will keep the gradient of this message; that of a primary of an older epoch may be gone."""
        if isinstance(message, Forward):
            is_next = message.sequence == self.core.sequence + 1
            return self.role is ReplicaRole.BACKUP and message.epoch >= self.epoch and is_next
        return self.serving is not None and not self.core.awaiting and self.serving.keeps(message)

    def handle(self, message: Message, sender: int) -> list[Action]:
        serving = self.serving
        if isinstance(message, _OF_WORKERS):
            if serving is not None and not self.core.awaiting:
                return serving.serve(message, sender)
            return [SendMessage(sender, NotPrimary(shard=self.config.shard, epoch=self.epoch))]
        match message:
            case Forward() | Install() if message.epoch < self.epoch:
                # A server that claims the shard by an older epoch has to yield, unless it is also the current primary.
                yields = SendMessage(sender, Yield(shard=self.config.shard, epoch=self.epoch))
                return [] if sender == self._known.primary else [yields]
            case Forward():
                return self._take_forward(message, sender)
            case Forwarded() | Chosen() | ChosenKept():
                # Where it does not serve: the lead and the other shards send all of it again to the next primary.
                return [] if serving is None else serving.hear_shard(message, sender)
            case Install():
                return self._install(message, sender)
            case Yield():
                return self._step_down() if serving is not None and message.epoch > self.epoch else []
            case _:
                raise ValueError(f"shard {self.config.shard} does not accept a {type(message).__name__}")

    def state(self) -> dict[str, Any]:
        """The committed state as JSON values; the store matches it once all actions are executed.

        A snapshot additionally holds the gradients of `core.steps.waiting` only: entries in flight are not in it.
        """
        return {"shard": self.config.shard, "core": self.core.state()}

    def _step_down(self) -> list[Action]:
        """Discard all state, as another server serves; entries in flight were never acknowledged."""
        had_something = self.role is not ReplicaRole.EMPTY
        self.role, self.serving, self._restored = ReplicaRole.EMPTY, None, False
        self.core = self.make_core(self.config)
        return [Discard(shard=self.config.shard)] if had_something else []

    def _take_forward(self, message: Forward, sender: int) -> list[Action]:
        if self.role is not ReplicaRole.BACKUP or message.sequence > self.core.sequence + 1:
            return []
        actions: list[Action] = []
        if message.sequence == self.core.sequence + 1:
            entry = message.entry
            for part in (entry,) if isinstance(entry, Push) else getattr(entry, "parts", ()):
                if not part.skip:
                    name = (part.shard, part.slot, part.clock)
                    actions.append(Keep(*name, self.config.copies, carried=part.carrier >= 0))
            actions += self.core.commit(entry).actions
        return [*actions, self._forwarded_to(sender)]

    def _install(self, message: Install, sender: int) -> list[Action]:
        self._step_down()
        self.core = self.make_core.from_state(self.config, json.loads(message.state))
        self.role, self._known.epoch, self._known.primary = ReplicaRole.BACKUP, message.epoch, sender
        installed = Installed(shard=self.config.shard, epoch=self.epoch, member=self.member)
        return [
            Load(shard=self.config.shard),
            *self.core.open_log(),
            self._forwarded_to(sender),
            SendMessage(LAUNCHER, installed),
        ]

    def _forwarded_to(self, sender: int) -> SendMessage:
        forwarded = Forwarded(shard=self.config.shard, epoch=self.epoch, sequence=self.core.sequence)
        return SendMessage(sender, forwarded)


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
        actions: list[Action] = []
        for place in view.shards:
            if place.shard in self.replicas or self.member in (place.primary, place.backup):
                actions += self._replica(place.shard).view(view)
        return actions

    def keeps(self, message: Push | HostPush | Forward) -> bool:
        """Whether `handle` will keep the gradient of this message; if not, its payload need not be looked up."""
        replica = self.replicas.get(message.shard)
        return replica is not None and replica.keeps(message)

    def handle(self, message: Message, sender: int) -> list[Action]:
        if isinstance(message, _OF_A_SHARD):
            replica = self.replicas.get(message.shard)
        elif isinstance(message, ChosenKept):  # of another shard, for the lead
            replica = self.replicas.get(LEAD)
        elif isinstance(message, Install):
            replica = self._replica(message.shard)
        elif isinstance(message, View):
            return self.view(message)
        else:
            raise ValueError(f"server {self.member} does not accept a {type(message).__name__}")
        if replica is not None:
            return replica.handle(message, sender)
        if isinstance(message, _OF_WORKERS):
            return [SendMessage(sender, NotPrimary(shard=message.shard, epoch=-1))]
        return []  # of a part in the shard that this server does not have yet, or had in an earlier life

    def _replica(self, shard: int) -> ShardReplica:
        if shard not in self.replicas:
            self.replicas[shard] = self._make_replica(replace(self._config, shard=shard), self.member)
        return self.replicas[shard]
