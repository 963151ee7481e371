"""All-reduce on one host: ours in a shared bucket, every schedule over shared-memory links, and torch's Gloo.

All contenders run in the same worker processes, on the same data, taking turns, so that a busy minute of the
machine hits all of them. Before each run every rank fills its own part afresh (as a backward pass does, so
the data lies in that rank's cache) and all meet at a barrier; a run takes as long as its slowest rank. Every
contender's result is first compared with the exact sum. Gloo gets its best case: a preallocated tensor, the
loopback interface, connections that are warm.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyhands.engine.footprint import PER_LINK
from manyhands.errors import UserError, format_bytes, nearest
from manyhands.lab.bench.allreduce_worker import GLOO, ITEM_BYTES, WorkerPlan
from manyhands.lab.bench.workers import Workers
from manyhands.native.group.shared_group import SharedGroupFiles
from manyhands.places.local.capacity import check_capacity, of_processes
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.transport.link.mesh import SharedMesh

__all__ = ["DEFAULT_SIZES_BYTES", "format_table", "repeats_for", "run_bench", "summaries"]

DEFAULT_SIZES_BYTES = (1 << 10, 16 << 10, 64 << 10, 1 << 20, 25 << 20)
_COLUMN = 21


def run_bench(
    workers: int,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    repeats: int = 40,
    schedules: Sequence[str] = tuple(ALGORITHMS),
    timeout_s: float = 240.0,
    allow_overload: bool = False,
) -> dict[str, Any]:
    """Measure, and return a dictionary ready for JSON; raises if a worker fails or `timeout_s` passes.

    `repeats` counts for sizes up to 1 MiB; larger ones get fewer, at least 7. Per size and contender there
    are microseconds (median, 10th and 90th percentile) and how many times faster than Gloo it is.
    """
    _check(workers, sizes_bytes, repeats, schedules)
    check_capacity(replace(of_processes(), per_pair=PER_LINK), workers, allow_overload=allow_overload)
    per_size = tuple(repeats_for(size, repeats) for size in sizes_bytes)
    load = os.getloadavg()[0]
    seconds = _run_workers(workers, tuple(sizes_bytes), per_size, tuple(schedules), timeout_s)
    return {
        "benchmark": "allreduce",
        "dtype": "float32",
        "workers": workers,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "load_before": load,
        "results": [
            {"size_bytes": size, "repeats": per_size[index], "contenders": summaries(seconds, index)}
            for index, size in enumerate(sizes_bytes)
        ],
    }


def format_table(result: dict[str, Any]) -> str:
    """The dictionary of `run_bench` as text: one column per size, two lines per contender."""
    rows = result["results"]
    names = list(rows[0]["contenders"]) if rows else []
    margin = max((len(name) for name in names), default=0)
    lines = [
        f"all-reduce of {result['dtype']}, {result['workers']} workers on {result['cores']} cores",
        "median and ratio to Gloo; below them the 10th to 90th percentile",
        "",
        " " * margin + "".join(f"{format_bytes(row['size_bytes']):>{_COLUMN}}" for row in rows),
    ]
    for name in names:
        cells = [row["contenders"][name] for row in rows]
        medians = [f"{_time(cell['median_us'])}{_ratio(cell['times_gloo']):>8}" for cell in cells]
        spreads = [f"{_time(cell['p10_us'])} to {_time(cell['p90_us'])}" for cell in cells]
        lines.append(f"{name:<{margin}}" + "".join(f"{cell:>{_COLUMN}}" for cell in medians))
        lines.append(" " * margin + "".join(f"{cell:>{_COLUMN}}" for cell in spreads))
    return "\n".join(lines)


def _check(workers: int, sizes_bytes: Sequence[int], repeats: int, schedules: Sequence[str]) -> None:
    if workers < 2:
        raise UserError(f"workers={workers}: an all-reduce takes at least 2")
    if repeats < 1:
        raise UserError(f"repeats={repeats}: must be at least 1")
    for size in sizes_bytes:
        if size < 0 or size % ITEM_BYTES:
            raise UserError(f"sizes_bytes: {size} is not a multiple of {ITEM_BYTES}, the bytes of a float32")
    for name in schedules:
        if name not in ALGORITHMS:
            raise UserError(f"schedules: no schedule {name!r}; {nearest(name, ALGORITHMS)}")


def repeats_for(size_bytes: int, repeats: int) -> int:
    """Fewer for large sizes, which take long and vary less."""
    return min(repeats, max(7, repeats * (1 << 20) // max(size_bytes, 1)))


def _time(microseconds: float) -> str:
    unit, value = ("µs", microseconds) if microseconds < 1000 else ("ms", microseconds / 1000)
    return f"{value:.{0 if value >= 100 else 1}f} {unit}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.{0 if ratio >= 10 else 2}f}×"


def summaries(seconds: Sequence[dict[str, list[list[float]]]], index: int) -> dict[str, dict[str, float]]:
    """Each contender at one size; `seconds` is what each rank measured."""
    slowest = {name: 1e6 * np.max([rank[name][index] for rank in seconds], axis=0) for name in seconds[0]}
    gloo = np.median(slowest[GLOO])
    summaries = {}
    for name, microseconds in slowest.items():
        low, median, high = np.percentile(microseconds, [10, 50, 90]).tolist()
        summaries[name] = {
            "median_us": median,
            "p10_us": low,
            "p90_us": high,
            "times_gloo": float(gloo / median),
        }
    return summaries


def _run_workers(
    workers: int,
    sizes_bytes: tuple[int, ...],
    repeats: tuple[int, ...],
    schedules: tuple[str, ...],
    timeout_s: float,
) -> list[dict[str, list[list[float]]]]:
    """What each rank measured: contender, size, repetition."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="manyhands-bench-"))
        files = stack.enter_context(SharedGroupFiles.create(workers))
        processes = stack.enter_context(Workers("manyhands.lab.bench.allreduce_worker"))
        with SharedMesh(workers) as mesh:
            for rank in range(workers):
                plan = WorkerPlan(
                    rank=rank,
                    world=workers,
                    control=files.control,
                    arena=files.arena,
                    links=mesh.descriptors(rank),
                    store=str(Path(folder) / "store"),
                    parent_pid=os.getpid(),
                    sizes_bytes=sizes_bytes,
                    repeats=repeats,
                    schedules=schedules,
                    timeout_s=timeout_s,
                )
                links = [descriptor for ends in plan.links.values() for descriptor in ends]
                processes.start(plan.to_json(), [plan.control, plan.arena, *links])
        return processes.results(timeout_s)
