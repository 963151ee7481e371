"""When it may be said that something is whole again: when whoever was found for it is connected.

The membership finds a process for a slot or a shard and says so. A worker is there once every shard has welcomed it. A
server that took over from a copy was connected all along, or got its copy through a connection; one that went back to a
snapshot is there once it has welcomed somebody. Workers tell each welcome with the epoch of the view they know. Pure.
"""

from __future__ import annotations

__all__ = ["Recoveries"]

SHARDS = "every shard"


class Recoveries:
    """What is found and not yet known to be connected; each call returns what may be said now: (what, member)."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}
        self._welcomed_epoch = 0
        self._restored_epoch = 0

    def restored(self, epoch: int) -> None:
        """In this view, a shard is with a server that went back to a snapshot and has met nobody."""
        self._restored_epoch = epoch

    def found(self, what: str, member: int) -> list[tuple[str, int]]:
        """Somebody was found for `what`, `slot 3` or `every shard`."""
        self._found[what] = member
        return self._shards_if_met()

    def welcomed(self, member: int, epoch: int) -> list[tuple[str, int]]:
        """Every shard of this view has welcomed a worker."""
        self._welcomed_epoch = max(self._welcomed_epoch, epoch)
        mine = [what for what, found in self._found.items() if found == member and what != SHARDS]
        return [*((what, self._found.pop(what)) for what in mine), *self._shards_if_met()]

    def over(self) -> list[tuple[str, int]]:
        """Nobody is left to be welcomed."""
        return [(SHARDS, self._found.pop(SHARDS))] if SHARDS in self._found else []

    def _shards_if_met(self) -> list[tuple[str, int]]:
        return self.over() if self._welcomed_epoch >= self._restored_epoch else []
