"""Flow control: in which order a worker goes through the shards, so that bursts do not meet at one server. Pure."""

from __future__ import annotations

__all__ = ["round_of_shards"]


def round_of_shards(slot: int, num_shards: int) -> tuple[int, ...]:
    """Every shard once, from number `slot` on: of workers that push at the same time, each begins at another one."""
    return tuple((slot + turn) % num_shards for turn in range(num_shards))
