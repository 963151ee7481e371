"""One worker process of the backend benchmark: `python -m manyhands.lab.bench.backend_worker PLAN`.

PLAN is a `BackendPlan` as JSON. The worker prints one JSON object: for every contender, for every size, the seconds of
each repetition as this rank saw them.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import manyhands.interop.c10d
from manyhands.errors import ManyhandsError
from manyhands.lab.bench.allreduce_worker import GLOO, ITEM_BYTES, AllReduceContender
from manyhands.lab.bench.workers import joined_gloo
from manyhands.places.local.parent import die_with_parent

__all__ = ["BackendPlan"]

_OURS, _OURS_ASYNC = "manyhands", "manyhands async"
_WARM_UP = 3  # runs of each contender and size that are not measured; each is checked


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendPlan:
    """What one worker does."""

    rank: int
    world: int
    store: str  # the file through which the ranks find each other
    parent_pid: int
    sizes_bytes: tuple[int, ...]
    repeats: tuple[int, ...]  # one number per size
    timeout_s: float

    @classmethod
    def from_json(cls, text: str) -> BackendPlan:
        fields = json.loads(text)
        return cls(**{**fields, **{name: tuple(fields[name]) for name in ("sizes_bytes", "repeats")}})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def measure(plan: BackendPlan, ours: Any) -> dict[str, list[list[float]]]:
    """Every contender at every size; `ours` is a group of our backend, the default group is Gloo's."""
    buffer = torch.empty(max(plan.sizes_bytes, default=0) // ITEM_BYTES)
    seconds: dict[str, list[list[float]]] = {}
    for size_bytes, repeats in zip(plan.sizes_bytes, plan.repeats, strict=True):
        for contender in _measure_size(plan, ours, buffer[: size_bytes // ITEM_BYTES], repeats):
            seconds.setdefault(contender.name, []).append(contender.seconds)
    return seconds


def _measure_size(
    plan: BackendPlan, ours: Any, buffer: torch.Tensor, repeats: int
) -> list[AllReduceContender]:
    pattern = torch.arange(buffer.numel(), dtype=torch.float32).remainder_(13).add_(1)
    source = pattern * (plan.rank + 1)
    total = pattern * (plan.world * (plan.world + 1) // 2)  # small integers: exact
    contenders = [
        AllReduceContender(_OURS, buffer, lambda: dist.all_reduce(buffer, group=ours)),
        AllReduceContender(
            _OURS_ASYNC, buffer, lambda: dist.all_reduce(buffer, group=ours, async_op=True).wait()
        ),
        AllReduceContender(GLOO, buffer, lambda: dist.all_reduce(buffer)),
    ]

    def meet() -> None:
        dist.barrier(group=ours)

    for _ in range(_WARM_UP):
        for contender in contenders:
            contender.run(source, meet)
            if not torch.equal(buffer, total):
                raise ManyhandsError(f"{contender.name} gave a wrong sum of {buffer.numel()} items")
    for turn in range(repeats):
        first = turn % len(contenders)  # nobody always runs after the same other
        for contender in contenders[first:] + contenders[:first]:
            contender.seconds.append(contender.run(source, meet))
    return contenders


def main(plan: BackendPlan) -> None:
    torch.set_num_threads(1)
    with joined_gloo(plan.store, plan.rank, plan.world, plan.timeout_s):
        ours = manyhands.interop.c10d.new_group()
        print(json.dumps(measure(plan, ours)))
        dist.barrier(group=ours)  # nobody leaves while another may still need it


if __name__ == "__main__":
    worker_plan = BackendPlan.from_json(sys.argv[1])
    die_with_parent(worker_plan.parent_pid, signal.SIGKILL)
    main(worker_plan)
