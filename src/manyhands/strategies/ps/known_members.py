"""What a replica of a shard has learned of the membership, from views and from messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from manyhands.strategies.ps.ps_messages import View

NOBODY = (0, 0)
"""The epoch and member of a server that was not heard of yet."""


@dataclass(slots=True)
class KnownMembers:
    """What a replica of a shard has learned of the membership; it outlives the replica's roles."""

    epoch: int = -1  # of the shard
    primary: int = 0  # of this epoch
    lead: tuple[int, int] = NOBODY  # epoch and member of the newest lead that was heard of
    view: View = field(default_factory=lambda: View(epoch=-1, shards=(), slots=()))
    primaries: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of that view: epoch and primary of every shard."""
    holders: dict[int, int] = field(default_factory=dict)  # the newest member known of each slot
