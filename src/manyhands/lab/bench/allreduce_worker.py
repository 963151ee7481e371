"""One worker process of the all-reduce benchmark: `python -m manyhands.lab.bench.allreduce_worker PLAN`.

PLAN is a `WorkerPlan` as JSON. The worker prints one JSON object: for every contender, for every size, the
seconds of each repetition as this rank saw them.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from manyhands.errors import ManyhandsError
from manyhands.lab.bench.workers import joined_gloo
from manyhands.native.group.shared_group import SharedGroup
from manyhands.places.local.parent import die_with_parent
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.transport.link.mesh import SharedMesh

__all__ = ["BUCKET", "GLOO", "ITEM_BYTES", "AllReduceContender", "WorkerPlan"]

BUCKET, GLOO = "bucket", "gloo"
ITEM_BYTES = torch.float32.itemsize
_WARM_UP = 3  # runs of each contender and size that are not measured; the first is checked


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """What one worker does."""

    rank: int
    world: int
    control: int  # the shared group's descriptors
    arena: int
    links: dict[int, tuple[int, ...]]  # to each other rank
    store: str  # the file through which Gloo's ranks find each other
    parent_pid: int
    sizes_bytes: tuple[int, ...]
    repeats: tuple[int, ...]  # one number per size
    schedules: tuple[str, ...]
    timeout_s: float

    @classmethod
    def from_json(cls, text: str) -> WorkerPlan:
        fields = json.loads(text)
        fields["links"] = {int(peer): tuple(ends) for peer, ends in fields["links"].items()}
        for name in ("sizes_bytes", "repeats", "schedules"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class AllReduceContender:
    """One way to all-reduce a buffer in place: the tensor to fill, and the call."""

    def __init__(self, name: str, buffer: torch.Tensor, reduce: Callable[[], object]) -> None:
        self.name = name
        self.buffer = buffer
        self.reduce = reduce
        self.seconds: list[float] = []

    def run(self, source: torch.Tensor, meet: Callable[[], None]) -> float:
        """Fill the buffer, meet the other ranks, and time the call."""
        self.buffer.copy_(source)
        meet()
        began = time.perf_counter()
        self.reduce()
        return time.perf_counter() - began


class AllReduceWorker:
    """One rank of the benchmark, with all contenders at hand."""

    def __init__(self, plan: WorkerPlan, group: SharedGroup, executors: dict[str, ScheduleExecutor]) -> None:
        self._plan = plan
        self._group = group
        self._executors = executors
        self._plain = torch.empty(max(plan.sizes_bytes, default=0) // ITEM_BYTES)

    def measure(self) -> dict[str, list[list[float]]]:
        names = (BUCKET, *self._executors, GLOO)
        seconds: dict[str, list[list[float]]] = {name: [] for name in names}
        for size_bytes, repeats in zip(self._plan.sizes_bytes, self._plan.repeats, strict=True):
            for contender in self._measure_size(size_bytes // ITEM_BYTES, repeats):
                seconds[contender.name].append(contender.seconds)
        return seconds

    def _measure_size(self, count: int, repeats: int) -> list[AllReduceContender]:
        pattern = torch.arange(count, dtype=torch.float32).remainder_(13).add_(1)
        source = pattern * (self._plan.rank + 1)
        total = pattern * (self._plan.world * (self._plan.world + 1) // 2)  # small integers: exact
        contenders = self._contenders(count)
        for _ in range(_WARM_UP):
            for contender in contenders:
                contender.run(source, self._group.barrier)
                if not torch.equal(contender.buffer, total):
                    raise ManyhandsError(f"{contender.name} gave a wrong sum of {count} items")
        for turn in range(repeats):
            first = turn % len(contenders)  # nobody always runs after the same other
            for contender in contenders[first:] + contenders[:first]:
                contender.seconds.append(contender.run(source, self._group.barrier))
        return contenders

    def _contenders(self, count: int) -> list[AllReduceContender]:
        group, plain = self._group, self._plain[:count]
        bucket = group.bucket(0, count, torch.float32)
        by_schedule = [
            AllReduceContender(name, plain, lambda executor=executor: executor.all_reduce(plain))  # type: ignore[misc]
            for name, executor in self._executors.items()
        ]
        return [
            AllReduceContender(BUCKET, bucket.tensor, lambda: group.all_reduce(bucket)),
            *by_schedule,
            AllReduceContender(GLOO, plain, lambda: dist.all_reduce(plain)),
        ]


def main(plan: WorkerPlan) -> None:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        group = stack.enter_context(
            SharedGroup(
                control=plan.control,
                arena=plan.arena,
                rank=plan.rank,
                world=plan.world,
                timeout_s=plan.timeout_s,
            )
        )
        group.allocate(max(plan.sizes_bytes, default=0), "the benchmark")
        links = SharedMesh.attach(plan.rank, plan.links)
        for link in links.values():
            stack.enter_context(link)
        executors = {
            name: ScheduleExecutor(ALGORITHMS[name], plan.rank, plan.world, links, plan.timeout_s)
            for name in plan.schedules
        }
        stack.enter_context(joined_gloo(plan.store, plan.rank, plan.world, plan.timeout_s))
        print(json.dumps(AllReduceWorker(plan, group, executors).measure()))
        group.barrier()  # nobody leaves while another may still need it


if __name__ == "__main__":
    worker_plan = WorkerPlan.from_json(sys.argv[1])
    die_with_parent(worker_plan.parent_pid, signal.SIGKILL)
    main(worker_plan)
