"""The links between the workers of this host, measured within seconds by processes like theirs."""

from __future__ import annotations

from manyhands.facts import LinkRate, Machines
from manyhands.lab.bench.allreduce import run_bench

__all__ = ["measured_host"]

_SMALL, _LARGE, _REPEATS = 1 << 10, 4 << 20, 15


def measured_host(workers: int) -> Machines:
    """This host with so many workers; with one, links that take no time."""
    if workers == 1:
        return Machines()
    rows = run_bench(workers, (_SMALL, _LARGE), _REPEATS, schedules=("direct",))["results"]
    took_s = {
        name: [row["contenders"][name]["median_us"] / 1e6 for row in rows] for name in ("bucket", "direct")
    }
    # A sum in shared memory meets twice and moves the bucket twice; `direct` sends 2 (P - 1) parts of 1 / P.
    messages, moved = 2 * (workers - 1), 2 * (workers - 1) / workers
    return Machines(
        per_host=workers,
        memory=_line(took_s["bucket"], 2, 2),
        inside=_line(took_s["direct"], messages, moved),
    )


def _line(took_s: list[float], messages: int, moved: float) -> LinkRate:
    small, large = took_s
    rate = moved * (_LARGE - _SMALL) / max(large - small, 1e-9)
    return LinkRate(latency_s=max(0.0, (small - moved * _SMALL / rate) / messages), bytes_per_s=rate)
