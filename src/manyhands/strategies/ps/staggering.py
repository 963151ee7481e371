"""Flow control: the order in which a worker visits the shards, so that bursts do not meet at one server. Pure."""

from __future__ import annotations

__all__ = ["round_of_shards"]


def round_of_shards(slot: int, num_shards: int) -> tuple[int, ...]:
    """Every shard once, starting at number `slot`, so that workers that push at the same time start at different
    shards.
    """
    return tuple((slot + turn) % num_shards for turn in range(num_shards))
