"""All-reduce on one host, beside torch's Gloo: ours in a shared bucket and every schedule over shared-memory links;
and the backend `manyhands` of torch.distributed, as a program calls it (`async`: with `async_op=True` and a wait).

All contenders run in the same worker processes (`python -m manyhands.lab.bench.allreduce PLAN`), on the same data, in
turn, so that a busy minute of the machine hits all of them. Before each run every rank fills its own part afresh and
all meet at a barrier; a run takes as long as its slowest rank. Every result is first compared with the exact sum.
Gloo gets its best case: a preallocated tensor, the loopback interface, connections that are warm.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from manyhands.engine.footprint import PER_LINK
from manyhands.errors import ManyhandsError, UserError, check_count, format_bytes, nearest
from manyhands.lab.bench import harness
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.places.local.host import check_capacity, of_processes
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.transport.link.mesh import SharedMesh

DEFAULT_SIZES_BYTES = (1 << 10, 16 << 10, 64 << 10, 1 << 20, 25 << 20)
BACKEND_SIZES_BYTES = (1 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20)
_COLUMN = 21
_GLOO = "gloo"
_ITEM_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan(harness.WorkerPlan):
    """What one worker does."""

    rank: int
    world: int
    store: str  # the file through which Gloo's ranks find each other
    sizes_bytes: Sequence[int]
    repeats: Sequence[int]  # one number per size
    group: tuple[int, int] | None
    """Control and arena of the shared group; None: the drop-in backend of torch.distributed is measured."""
    links: Mapping[int, Sequence[int]] = field(default_factory=dict)  # the descriptors to each other rank
    schedules: Sequence[str] = ()


def run_bench(
    workers: int,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    repeats: int = 40,
    schedules: Sequence[str] = tuple(ALGORITHMS),
    timeout_s: float = 240.0,
    allow_overload: bool = False,
) -> dict[str, Any]:
    """Measure, and return a dictionary ready for JSON; raises if a worker fails or `timeout_s` passes.

    `repeats` counts for sizes up to 1 MiB; larger ones get fewer, at least 7.
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
    _check(workers, sizes_bytes, repeats)
    check_capacity(of_processes(), workers, allow_overload=allow_overload)
    return _run("backend", workers, sizes_bytes, repeats, timeout_s)


def format_table(result: dict[str, Any]) -> str:
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
        medians = [
            f"{harness.time_text(cell['median_us'])}{harness.ratio_text(cell['times_gloo']):>8}"
            for cell in cells
        ]
        spreads = [
            f"{harness.time_text(cell['p10_us'])} to {harness.time_text(cell['p90_us'])}" for cell in cells
        ]
        lines.append(f"{name:<{margin}}" + "".join(f"{cell:>{_COLUMN}}" for cell in medians))
        lines.append(" " * margin + "".join(f"{cell:>{_COLUMN}}" for cell in spreads))
    return "\n".join(lines)


def _check(workers: int, sizes_bytes: Sequence[int], repeats: int) -> None:
    if workers < 2:
        raise UserError(f"workers={workers}: an all-reduce needs at least 2")
    check_count("repeats", repeats)
    for size in sizes_bytes:
        if size < 0 or size % _ITEM_BYTES:
            raise UserError(f"sizes_bytes: {size} is not a multiple of {_ITEM_BYTES}, the bytes of a float32")


def _run(
    name: str,
    workers: int,
    sizes_bytes: Sequence[int],
    repeats: int,
    timeout_s: float,
    schedules: Sequence[str] | None = None,
) -> dict[str, Any]:
    facts = {"benchmark": name, "dtype": "float32", "workers": workers, **harness.host_facts()}
    # Fewer for large sizes, which take long and vary less.
    per_size = [min(repeats, max(7, repeats * (1 << 20) // max(size, 1))) for size in sizes_bytes]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="manyhands-bench-"))
        processes = stack.enter_context(harness.Workers("manyhands.lab.bench.allreduce"))
        starting = stack.enter_context(ExitStack())
        common = _Plan(
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
    gloo = np.median(slowest[_GLOO])
    return {
        name: {**harness.percentiles(times, "us"), "times_gloo": float(gloo / np.median(times))}
        for name, times in slowest.items()
    }


@dataclass(slots=True)
class _Contender:
    """One way to all-reduce a buffer in place: the tensor to fill, and the call."""

    name: str
    buffer: torch.Tensor
    reduce: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    def run(self, source: torch.Tensor, meet: Callable[[], None]) -> float:
        self.buffer.copy_(source)
        meet()
        began = time.perf_counter()
        self.reduce()
        return time.perf_counter() - began


_Contenders = Callable[[int], list[_Contender]]  # all of them, for so many items


def _measure(plan: _Plan, contenders: _Contenders, meet: Callable[[], None]) -> dict[str, list[list[float]]]:
    seconds: dict[str, list[list[float]]] = {}
    for size_bytes, repeats in zip(plan.sizes_bytes, plan.repeats, strict=True):
        count = size_bytes // _ITEM_BYTES
        pattern = torch.arange(count, dtype=torch.float32).remainder_(13).add_(1)
        source = pattern * (plan.rank + 1)
        total = pattern * (plan.world * (plan.world + 1) // 2)  # small integers: exact
        made = contenders(count)
        for _ in range(harness.WARM_UP):
            for contender in made:
                contender.run(source, meet)
                if not torch.equal(contender.buffer, total):
                    raise ManyhandsError(f"{contender.name} gave a wrong sum of {count} items")
        for contender in harness.interleaved(made, repeats):
            contender.seconds.append(contender.run(source, meet))
        for contender in made:
            seconds.setdefault(contender.name, []).append(contender.seconds)
    return seconds


def _of_schedules(
    plan: _Plan, descriptors: tuple[int, int], stack: ExitStack
) -> tuple[_Contenders, Callable[[], None]]:
    control, arena = descriptors
    most = max(plan.sizes_bytes, default=0)
    group = stack.enter_context(
        SharedGroup(control=control, arena=arena, rank=plan.rank, world=plan.world, timeout_s=plan.timeout_s)
    )
    group.allocate(most, "the benchmark")
    links = SharedMesh.attach(plan.rank, {int(peer): tuple(ends) for peer, ends in plan.links.items()})
    for link in links.values():
        stack.enter_context(link)
    executors = {
        name: ScheduleExecutor(ALGORITHMS[name], plan.rank, plan.world, links, plan.timeout_s)
        for name in plan.schedules
    }
    stack.enter_context(harness.joined_gloo(plan.store, plan.rank, plan.world, plan.timeout_s))
    plain = torch.empty(most // _ITEM_BYTES)

    def contenders(count: int) -> list[_Contender]:
        bucket, buffer = group.bucket(0, count, torch.float32), plain[:count]
        by_schedule = [
            _Contender(name, buffer, lambda executor=executor: executor.all_reduce(buffer))  # type: ignore[misc]
            for name, executor in executors.items()
        ]
        return [
            _Contender("bucket", bucket.tensor, lambda: group.all_reduce(bucket)),
            *by_schedule,
            _Contender(_GLOO, buffer, lambda: dist.all_reduce(buffer)),
        ]

    return contenders, group.barrier


def _of_backend(plan: _Plan, stack: ExitStack) -> tuple[_Contenders, Callable[[], None]]:
    from manyhands.interop.c10d import new_group  # which makes torch know the backend

    stack.enter_context(harness.joined_gloo(plan.store, plan.rank, plan.world, plan.timeout_s))
    ours = new_group()
    plain = torch.empty(max(plan.sizes_bytes, default=0) // _ITEM_BYTES)

    def contenders(count: int) -> list[_Contender]:
        buffer = plain[:count]
        return [
            _Contender("manyhands", buffer, lambda: dist.all_reduce(buffer, group=ours)),
            _Contender(
                "manyhands async", buffer, lambda: dist.all_reduce(buffer, group=ours, async_op=True).wait()
            ),
            _Contender(_GLOO, buffer, lambda: dist.all_reduce(buffer)),
        ]

    return contenders, lambda: dist.barrier(group=ours)


def _main(plan: _Plan) -> None:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if plan.group is None:
            contenders, meet = _of_backend(plan, stack)
        else:
            contenders, meet = _of_schedules(plan, plan.group, stack)
        print(json.dumps(_measure(plan, contenders, meet)))
        meet()  # nobody leaves while another may still need it


if __name__ == "__main__":
    harness.be_worker(_Plan, _main)
