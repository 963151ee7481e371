"""One rank of a group, as a process of its own: `shared_group_worker.py TASK TIMEOUT RANK WORLD CONTROL ARENA`."""

from __future__ import annotations

import sys

import torch

from manyhands.errors import ManyhandsError
from manyhands.native.group.shared_group import SharedGroup

COUNTS = (1, 1000, 100_000, 0)


def check(group: SharedGroup, turns: int) -> None:
    """Mean of rank + turn over all ranks, in buckets of several sizes, overlapped and one by one."""
    offsets = (0, 128, 8192, 0)
    buckets = [group.bucket(o, count, torch.float32) for o, count in zip(offsets, COUNTS, strict=True)]
    for turn in range(turns):
        for bucket in buckets:
            bucket.tensor.fill_(float(group.rank + turn))
            group.launch(bucket, "mean")
            group.poll()
        group.finish()
        wanted = (group.world - 1) / 2 + turn
        assert all(bucket.tensor.sub(wanted).abs().le(1e-4).all() for bucket in buckets), turn
        buckets[0].tensor.fill_(float(group.rank))
        group.all_reduce(buckets[0], "max")
        assert buckets[0].tensor.item() == group.world - 1


def forever(group: SharedGroup) -> None:
    """Until someone is missed."""
    bucket = group.bucket(0, 1000, torch.float32)
    group.barrier()
    print("running", flush=True)
    while True:
        group.all_reduce(bucket)


def main() -> int:
    torch.set_num_threads(1)
    task, timeout_s = sys.argv[1], float(sys.argv[2])
    rank, world, control, arena = map(int, sys.argv[3:])
    with SharedGroup(control=control, arena=arena, rank=rank, world=world, timeout_s=30) as group:
        group.allocate(1 << 20, "a test")  # the ranks start at different times, and this brings them together
        group.timeout_s = timeout_s
        try:
            check(group, turns=50) if task == "check" else forever(group)
        except ManyhandsError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
