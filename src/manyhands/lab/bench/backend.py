"""The backend `manyhands` of torch.distributed beside torch's Gloo: `dist.all_reduce` on both, as a program calls it.

Both backends are groups of the same worker processes and take turns on the same tensor, so that a busy minute of the
machine hits both. Before each run every rank fills its tensor afresh and all meet at a barrier; a run takes as long as
its slowest rank. Every contender's result is first compared with the exact sum. Gloo gets its best case: a preallocated
tensor, the loopback interface, connections that are warm. `async` is the same call with `async_op=True` and a wait.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from manyhands.errors import UserError
from manyhands.lab.bench.allreduce import format_table, repeats_for, summaries
from manyhands.lab.bench.allreduce_worker import ITEM_BYTES
from manyhands.lab.bench.backend_worker import BackendPlan
from manyhands.lab.bench.workers import Workers
from manyhands.places.local.capacity import check_capacity, of_processes

__all__ = ["DEFAULT_SIZES_BYTES", "format_table", "run_bench"]

DEFAULT_SIZES_BYTES = (1 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20)


def run_bench(
    workers: int,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    repeats: int = 40,
    timeout_s: float = 240.0,
    allow_overload: bool = False,
) -> dict[str, Any]:
    """Measure, and return a dictionary ready for JSON; raises if a worker fails or `timeout_s` passes.

    `repeats` counts for sizes up to 1 MiB; larger ones get fewer, at least 7. Per size and contender there are
    microseconds (median, 10th and 90th percentile) and how many times faster than Gloo it is.
    """
    check_capacity(of_processes(), workers, allow_overload=allow_overload)
    if workers < 2:
        raise UserError(f"workers={workers}: an all-reduce takes at least 2")
    if repeats < 1:
        raise UserError(f"repeats={repeats}: must be at least 1")
    for size in sizes_bytes:
        if size < 0 or size % ITEM_BYTES:
            raise UserError(f"sizes_bytes: {size} is not a multiple of {ITEM_BYTES}, the bytes of a float32")
    per_size = tuple(repeats_for(size, repeats) for size in sizes_bytes)
    load = os.getloadavg()[0]
    seconds = _run_workers(workers, tuple(sizes_bytes), per_size, timeout_s)
    return {
        "benchmark": "backend",
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


def _run_workers(
    workers: int, sizes_bytes: tuple[int, ...], repeats: tuple[int, ...], timeout_s: float
) -> list[dict[str, list[list[float]]]]:
    with (
        tempfile.TemporaryDirectory(prefix="manyhands-bench-") as folder,
        Workers("manyhands.lab.bench.backend_worker") as processes,
    ):
        for rank in range(workers):
            plan = BackendPlan(
                rank=rank,
                world=workers,
                store=str(Path(folder) / "store"),
                parent_pid=os.getpid(),
                sizes_bytes=sizes_bytes,
                repeats=repeats,
                timeout_s=timeout_s,
            )
            processes.start(plan.to_json(), ())
        return processes.results(timeout_s)
