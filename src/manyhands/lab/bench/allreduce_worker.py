"""One worker process of the benchmarks of all-reduce: `python -m manyhands.lab.bench.allreduce_worker PLAN`.

The worker prints one JSON object: for every contender, for every size, the seconds of each repetition as this rank saw
them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from manyhands.errors import ManyhandsError
from manyhands.lab.bench.harness import WARM_UP, WorkerPlan, be_worker, in_turn, joined_gloo
from manyhands.native.group.shared_group import SharedGroup
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.transport.link.mesh import SharedMesh

__all__ = ["GLOO", "ITEM_BYTES", "AllReducePlan"]

GLOO = "gloo"
ITEM_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReducePlan(WorkerPlan):
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


@dataclass(slots=True)
class AllReduceContender:
    """One way to all-reduce a buffer in place: the tensor to fill, and the call."""

    name: str
    buffer: torch.Tensor
    reduce: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    def run(self, source: torch.Tensor, meet: Callable[[], None]) -> float:
        """Fill the buffer, meet the other ranks, and time the call."""
        self.buffer.copy_(source)
        meet()
        began = time.perf_counter()
        self.reduce()
        return time.perf_counter() - began


Contenders = Callable[[int], list[AllReduceContender]]  # all of them, for so many items


def measure(
    plan: AllReducePlan, contenders: Contenders, meet: Callable[[], None]
) -> dict[str, list[list[float]]]:
    seconds: dict[str, list[list[float]]] = {}
    for size_bytes, repeats in zip(plan.sizes_bytes, plan.repeats, strict=True):
        count = size_bytes // ITEM_BYTES
        pattern = torch.arange(count, dtype=torch.float32).remainder_(13).add_(1)
        source = pattern * (plan.rank + 1)
        total = pattern * (plan.world * (plan.world + 1) // 2)  # small integers: exact
        made = contenders(count)
        for _ in range(WARM_UP):
            for contender in made:
                contender.run(source, meet)
                if not torch.equal(contender.buffer, total):
                    raise ManyhandsError(f"{contender.name} gave a wrong sum of {count} items")
        for contender in in_turn(made, repeats):
            contender.seconds.append(contender.run(source, meet))
        for contender in made:
            seconds.setdefault(contender.name, []).append(contender.seconds)
    return seconds


def _of_schedules(
    plan: AllReducePlan, descriptors: tuple[int, int], stack: ExitStack
) -> tuple[Contenders, Callable[[], None]]:
    """In a shared bucket, by each schedule over links, and by Gloo."""
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
    stack.enter_context(joined_gloo(plan.store, plan.rank, plan.world, plan.timeout_s))
    plain = torch.empty(most // ITEM_BYTES)

    def contenders(count: int) -> list[AllReduceContender]:
        bucket, buffer = group.bucket(0, count, torch.float32), plain[:count]
        by_schedule = [
            AllReduceContender(name, buffer, lambda executor=executor: executor.all_reduce(buffer))  # type: ignore[misc]
            for name, executor in executors.items()
        ]
        return [
            AllReduceContender("bucket", bucket.tensor, lambda: group.all_reduce(bucket)),
            *by_schedule,
            AllReduceContender(GLOO, buffer, lambda: dist.all_reduce(buffer)),
        ]

    return contenders, group.barrier


def _of_backend(plan: AllReducePlan, stack: ExitStack) -> tuple[Contenders, Callable[[], None]]:
    """`dist.all_reduce` in a group of our backend, and in the default group, which is Gloo's."""
    from manyhands.interop.c10d import new_group  # which makes torch know the backend

    stack.enter_context(joined_gloo(plan.store, plan.rank, plan.world, plan.timeout_s))
    ours = new_group()
    plain = torch.empty(max(plan.sizes_bytes, default=0) // ITEM_BYTES)

    def contenders(count: int) -> list[AllReduceContender]:
        buffer = plain[:count]
        return [
            AllReduceContender("manyhands", buffer, lambda: dist.all_reduce(buffer, group=ours)),
            AllReduceContender(
                "manyhands async", buffer, lambda: dist.all_reduce(buffer, group=ours, async_op=True).wait()
            ),
            AllReduceContender(GLOO, buffer, lambda: dist.all_reduce(buffer)),
        ]

    return contenders, lambda: dist.barrier(group=ours)


def main(plan: AllReducePlan) -> None:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if plan.group is None:
            contenders, meet = _of_backend(plan, stack)
        else:
            contenders, meet = _of_schedules(plan, plan.group, stack)
        print(json.dumps(measure(plan, contenders, meet)))
        meet()  # nobody leaves while another may still need it


if __name__ == "__main__":
    be_worker(AllReducePlan, main)
