"""Decides when a recovery may be reported: once the replacement is connected. Pure.

The membership finds a process for a slot or a shard and reports it. A worker is connected once every shard has
welcomed it. A server that took over from a copy was connected all along, or got its copy through a connection;
one that restored a snapshot is connected once it has welcomed a worker. Workers report each welcome with the
epoch of their view.
"""

from __future__ import annotations

__all__ = ["Recoveries"]

SHARDS = "every shard"


class Recoveries:
    """The replacements not yet known to be connected; each call returns what may be reported now: (what, member)."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}
        self._welcomed_epoch = 0
        self._restored_epoch = 0

    def restored(self, epoch: int) -> None:
        """Note that in this view a shard is served by a server that restored a snapshot and has no connections
        yet.
        """
        self._restored_epoch = epoch

    def found(self, what: str, member: int) -> list[tuple[str, int]]:
        """Note the replacement for `what`, which is `slot 3` or `every shard`."""
        self._found[what] = member
        return self._shards_if_met()

    def welcomed(self, member: int, epoch: int) -> list[tuple[str, int]]:
        """Note that every shard of this view has welcomed a worker."""
        self._welcomed_epoch = max(self._welcomed_epoch, epoch)
        mine = [what for what, found in self._found.items() if found == member and what != SHARDS]
        return [*((what, self._found.pop(what)) for what in mine), *self._shards_if_met()]

    def over(self) -> list[tuple[str, int]]:
        """Report the shards as recovered: no worker is left to be welcomed."""
        return [(SHARDS, self._found.pop(SHARDS))] if SHARDS in self._found else []

    def _shards_if_met(self) -> list[tuple[str, int]]:
        return self.over() if self._welcomed_epoch >= self._restored_epoch else []
