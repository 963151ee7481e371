"""What happens when every worker pushes to every shard at once: a model that `priority.py` makes its table with."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """The result of one push of every worker to every shard."""

    messages: int  # the time until the last has come in, in messages' times
    longest_queue: int  # the most messages that a server had to take in at one moment


def push_at_once(workers: int, shards: int, order: Callable[[int, int], Sequence[int]]) -> Burst:
    """Simulate that each of `workers` sends one message to each of `shards`, in `order(worker, shards)`, at once."""
    # A message is at the server's link when it begins to leave: both are busy with it at once.
    comes = sorted(
        (slot, worker, shard) for worker in range(workers) for slot, shard in enumerate(order(worker, shards))
    )
    ends: dict[int, list[int]] = {shard: [] for shard in range(shards)}
    longest = last = 0
    for slot, _, shard in comes:
        queue = ends[shard]
        while queue and queue[0] <= slot:
            heapq.heappop(queue)
        end = max([slot, *queue]) + 1
        heapq.heappush(queue, end)
        longest, last = max(longest, len(queue)), max(last, end)
    return Burst(messages=last, longest_queue=longest)
