"""All-reduce on one host, beside torch's Gloo: ours in a shared bucket and every schedule over shared-memory links;
and the backend `manyhands` of torch.distributed, as a program calls it.

All contenders run in the same worker processes, on the same data, in turn, so that a busy minute of the machine hits
all of them. Before each run every rank fills its own part afresh (as a backward pass does, so the data lies in that
rank's cache) and all meet at a barrier; a run takes as long as its slowest rank. Every contender's result is first
compared with the exact sum. Gloo gets its best case: a preallocated tensor, the loopback interface, connections that
are warm. `async` is the call of the backend with `async_op=True` and a wait.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.engine.footprint import PER_LINK
from manyhands.errors import UserError, format_bytes, nearest
from manyhands.lab.bench.allreduce_worker import GLOO, ITEM_BYTES, AllReducePlan
from manyhands.lab.bench.harness import Workers, host_facts, percentiles, ratio_text, time_text
from manyhands.native.group.shared_group import SharedGroupFiles
from manyhands.places.local.host import check_capacity, of_processes
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.transport.link.mesh import SharedMesh

__all__ = ["BACKEND_SIZES_BYTES", "DEFAULT_SIZES_BYTES", "format_table", "run_backend_bench", "run_bench"]

DEFAULT_SIZES_BYTES = (1 << 10, 16 << 10, 64 << 10, 1 << 20, 25 << 20)
BACKEND_SIZES_BYTES = (1 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20)
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
    _check(workers, sizes_bytes, repeats)
    for name in schedules:
        if name not in ALGORITHMS:
            raise UserError(f"schedules: no schedule {name!r}; {nearest(name, ALGORITHMS)}")
    check_capacity(replace(of_processes(), per_pair=PER_LINK), workers, allow_overload=allow_overload)
    return _run("allreduce", workers, sizes_bytes, repeats, timeout_s, schedules)


def run_backend_bench(
    workers: int,
    sizes_bytes: Sequence[int] = BACKEND_SIZES_BYTES,
    repeats: int = 40,
    timeout_s: float = 240.0,
    allow_overload: bool = False,
) -> dict[str, Any]:
    """The same of the backend of torch.distributed."""
    _check(workers, sizes_bytes, repeats)
    check_capacity(of_processes(), workers, allow_overload=allow_overload)
    return _run("backend", workers, sizes_bytes, repeats, timeout_s)


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
        medians = [f"{time_text(cell['median_us'])}{ratio_text(cell['times_gloo']):>8}" for cell in cells]
        spreads = [f"{time_text(cell['p10_us'])} to {time_text(cell['p90_us'])}" for cell in cells]
        lines.append(f"{name:<{margin}}" + "".join(f"{cell:>{_COLUMN}}" for cell in medians))
        lines.append(" " * margin + "".join(f"{cell:>{_COLUMN}}" for cell in spreads))
    return "\n".join(lines)


def _check(workers: int, sizes_bytes: Sequence[int], repeats: int) -> None:
    if workers < 2:
        raise UserError(f"workers={workers}: an all-reduce takes at least 2")
    if repeats < 1:
        raise UserError(f"repeats={repeats}: must be at least 1")
    for size in sizes_bytes:
        if size < 0 or size % ITEM_BYTES:
            raise UserError(f"sizes_bytes: {size} is not a multiple of {ITEM_BYTES}, the bytes of a float32")


def _run(
    name: str,
    workers: int,
    sizes_bytes: Sequence[int],
    repeats: int,
    timeout_s: float,
    schedules: Sequence[str] | None = None,
) -> dict[str, Any]:
    facts = {"benchmark": name, "dtype": "float32", "workers": workers, **host_facts()}
    # Fewer for large sizes, which take long and vary less.
    per_size = [min(repeats, max(7, repeats * (1 << 20) // max(size, 1))) for size in sizes_bytes]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="manyhands-bench-"))
        processes = stack.enter_context(Workers("manyhands.lab.bench.allreduce_worker"))
        starting = stack.enter_context(ExitStack())
        common = AllReducePlan(
            rank=0,
            world=workers,
            store=str(Path(folder) / "store"),
            sizes_bytes=sizes_bytes,
            repeats=per_size,
            group=None,
            schedules=schedules or (),
            timeout_s=timeout_s,
        )
        if schedules is None:
            for rank in range(workers):
                processes.start(replace(common, rank=rank))
        else:
            group = stack.enter_context(SharedGroupFiles.create(workers)).descriptors
            mesh = starting.enter_context(SharedMesh(workers))
            for rank in range(workers):
                links = mesh.descriptors(rank)
                plan = replace(common, rank=rank, group=group, links=links)
                processes.start(plan, [*group, *(one for ends in links.values() for one in ends)])
        starting.close()  # the ends of the links are the workers' now
        seconds = processes.results(timeout_s)
    results = [
        {"size_bytes": size, "repeats": per_size[index], "contenders": _summaries(seconds, index)}
        for index, size in enumerate(sizes_bytes)
    ]
    return {**facts, "results": results}


def _summaries(seconds: Sequence[dict[str, list[list[float]]]], index: int) -> dict[str, dict[str, float]]:
    """Each contender at one size; `seconds` is what each rank measured."""
    slowest = {name: 1e6 * np.max([rank[name][index] for rank in seconds], axis=0) for name in seconds[0]}
    gloo = np.median(slowest[GLOO])
    return {
        name: {**percentiles(times, "us"), "times_gloo": float(gloo / np.median(times))}
        for name, times in slowest.items()
    }
