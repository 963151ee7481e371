"""Where the time of a step goes, played as events on the tables that a run executes; pure.

A strategy's `predict` puts these together: buckets that leave while backward continues, layers that are gathered one
ahead of their use, servers whose links all workers share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from manyhands.facts import LayerTimes, LinkRate, Machines, TaskProfile
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS, grouped
from manyhands.strategies.common.collectives.schedule_proof import cost

Seconds = Callable[[float], float]
"""The time of an exchange of so many bytes."""

_ITEM_BYTES = 4
_PLAYED = 64  # workers whose messages are played one by one; beyond, a host stands for all hosts


def all_reduce_s(algorithm: str, machines: Machines, num_bytes: float, helpers: int = 0) -> float:
    """Time of one all-reduce between the workers, and `helpers` that only sum."""
    world = machines.workers + helpers
    if world == 1:
        return 0.0
    if world > _PLAYED:
        return _LARGE[algorithm](machines, num_bytes)
    # Links that are all twice as slow take twice as long: a play is in units of one of them, and kept.
    unit_s = _slowest(machines).seconds(num_bytes)
    unit_s = unit_s if 0 < unit_s < math.inf else 1.0

    def in_units(link: LinkRate) -> LinkRate:
        return LinkRate(
            latency_s=_short(link.latency_s / unit_s), bytes_per_s=_short(link.bytes_per_s * unit_s)
        )

    played = _played(
        algorithm,
        world,
        round(num_bytes / _ITEM_BYTES),
        (machines.hosts, machines.per_host),
        (in_units(machines.inside), in_units(machines.between)),
        _short(machines.added_per_s * unit_s),
    )
    return unit_s * played


def _short(number: float) -> float:
    """Without the last digits, which differ by how a number was computed."""
    return float(f"{number:.12g}")


@lru_cache(maxsize=4096)
def _played(
    algorithm: str,
    world: int,
    items: int,
    shape: tuple[int, int],
    links: tuple[LinkRate, LinkRate],
    added_per_s: float,
) -> float:
    """The time of an all-reduce whose messages are played one by one, on hosts and workers of this `shape`."""
    hosts, per_host = shape
    inside, between = links
    machines = Machines(
        hosts=hosts, per_host=per_host, inside=inside, between=between, added_per_s=added_per_s
    )
    known = grouped(per_host) if _is_by_host(algorithm, machines) else ALGORITHMS[algorithm]
    return cost(known, world, items * _ITEM_BYTES, _ITEM_BYTES).time_on(machines)


def is_modelled(algorithm: str, machines: Machines, helpers: int = 0) -> bool:
    """Whether the time of so many workers is known: of few by playing their messages, else by a closed form."""
    few = machines.workers + helpers <= _PLAYED
    return few or (
        algorithm in _LARGE and not helpers and (algorithm != "hierarchical" or machines.hosts > 1)
    )


def _is_by_host(algorithm: str, machines: Machines) -> bool:
    return algorithm == "hierarchical" and machines.hosts > 1


# Of workers that are alike, each round takes as long as its slowest messages, of those that share a host's link.


def _slowest(machines: Machines) -> LinkRate:
    return machines.between if machines.hosts > 1 else machines.inside


def _large_ring(machines: Machines, num_bytes: float) -> float:
    part, rounds = num_bytes / machines.workers, machines.workers - 1
    return 2 * rounds * _slowest(machines).seconds(part) + rounds * part / machines.added_per_s


def _large_direct(machines: Machines, num_bytes: float) -> float:
    world, per_host = machines.workers, machines.per_host
    part = num_bytes / world
    leaving = per_host * (world - per_host) * machines.between.seconds(part) if machines.hosts > 1 else 0.0
    here = (per_host - 1) * machines.inside.seconds(part)
    return 2 * max(leaving, here) + (world - 1) * part / machines.added_per_s


def _large_hierarchical(machines: Machines, num_bytes: float) -> float:
    per_host, others = machines.per_host, machines.hosts - 1
    own, part = num_bytes / per_host, num_bytes / machines.workers
    here = 2 * (per_host - 1) * machines.inside.seconds(own)
    leaving = 2 * others * per_host * machines.between.seconds(part)
    return here + leaving + ((per_host - 1) * own + others * part) / machines.added_per_s


def _large_butterfly(machines: Machines, num_bytes: float) -> float:
    """Halving and doubling: by and by all of a host's workers talk to other hosts at once."""
    rate, moved = _slowest(machines), (machines.workers - 1) / machines.workers * num_bytes
    sharing = machines.per_host if machines.hosts > 1 else 1
    rounds = (machines.workers - 1).bit_length()
    return 2 * (rounds * rate.latency_s + sharing * moved / rate.bytes_per_s) + moved / machines.added_per_s


_LARGE: dict[str, Callable[[Machines, float], float]] = {
    "ring": _large_ring,
    "direct": _large_direct,
    "hierarchical": _large_hierarchical,
    "butterfly": _large_butterfly,
}


def summed_in_memory_s(machines: Machines, num_bytes: float) -> float:
    """Time in which the workers of a host sum a bucket in place: each reads its slice of all, and writes it to all.

    The workers' cores do it, so it hides behind no computing.
    """
    if machines.per_host == 1:
        return 0.0
    return 2 * machines.memory.latency_s + 2 * num_bytes / machines.memory.bytes_per_s


def spread_s(machines: Machines, num_bytes: float) -> float:
    """Time in which every worker sends every other one a part: a layer is gathered, or its gradient summed."""
    return all_reduce_s("direct", machines, num_bytes) / 2


def in_groups_s(
    machines: Machines, size: int, num_bytes: float, messages: float, *, stride: int = 1
) -> float:
    """Time in which each worker sends so much to the others of its group, equally, as all groups do at once.

    A group has `size` ranks, `stride` apart. What leaves a host goes over its link, one message after the other.
    """
    if size == 1 or not messages:
        return 0.0
    near, leaving = _near_and_leaving(machines.hosts, machines.per_host, size, stride)
    each = num_bytes / messages
    inside_s = near * messages * machines.inside.seconds(each)
    between_s = leaving * messages * machines.between.seconds(each) if leaving else 0.0
    return max(inside_s, between_s)


@lru_cache(maxsize=1024)
def _near_and_leaving(hosts: int, per_host: int, size: int, stride: int) -> tuple[float, float]:
    """The share of its group on its own host, of the worker with most, and such shares elsewhere, summed by host."""
    near, leaving = 0.0, [0.0] * hosts
    for rank in range(hosts * per_host):
        host, first = rank // per_host, rank // (size * stride) * size * stride + rank % stride
        before = [-(-max(0, end - first) // stride) for end in (host * per_host, (host + 1) * per_host)]
        own, whole = (min(size, before[1]) - min(size, before[0]) - 1) / (size - 1), 1.0
        near, leaving[host] = max(near, own), leaving[host] + whole - own
    return near, max(leaving)


def buckets_of(layers: Sequence[LayerTimes], most_bytes: float) -> list[tuple[int, float]]:
    """What leaves together as backward goes through the layers: the layer that completes it, and its bytes."""
    found: list[tuple[int, float]] = []
    filled, last = 0.0, 0
    for index in reversed(range(len(layers))):
        left = float(layers[index].gradient_bytes)
        while left > 0:
            taken = min(left, most_bytes - filled)
            filled, left, last = filled + taken, left - taken, index
            if filled >= most_bytes:
                found.append((index, filled))
                filled = 0.0
    return [*found, (last, filled)] if filled else found


def beyond_backward_s(
    profile: TaskProfile, samples: float, buckets: Sequence[tuple[int, float]], seconds: Seconds
) -> float:
    """How long the last of the buckets takes beyond the end of backward; one is exchanged after the other."""
    now, ready = 0.0, [0.0] * len(profile.layers)
    for index in reversed(range(len(profile.layers))):
        now += profile.layers[index].backward.seconds(samples)
        ready[index] = now
    free = 0.0
    for index, num_bytes in buckets:
        free = max(free, ready[index]) + seconds(num_bytes)
    return max(0.0, free - now)


def gathered_s(computing_s: Sequence[float], gathering_s: Sequence[float]) -> float:
    """Time in which layers are computed, each gathered while the one before it computes; the first one is waited for.

    At most one layer is ahead: its memory is that of one more layer.
    """
    arrived, begin, end = 0.0, 0.0, 0.0
    for compute, gather in zip(computing_s, gathering_s, strict=True):
        arrived = max(arrived, begin) + gather  # it is asked for when the layer before it begins
        begin = max(end, arrived)
        end = begin + compute
    return end
