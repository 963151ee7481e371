"""One rank of a process group under test: `python -m processes.c10d_worker MODULE RANK WORLD STORE FILE`.

Runs every function `check_...` of the module on all ranks, each with a group of our backend and one of Gloo at hand,
and writes to FILE what became of each: nothing, or the traceback of what it raised.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from manyhands.c10d import BACKEND

TIMEOUT = timedelta(seconds=40)


@dataclass(frozen=True)
class Ranks:
    """What a check gets: its place, our group (the default one) and Gloo's."""

    rank: int
    world: int
    ours: Any
    gloo: Any

    def values(self, count: int, dtype: torch.dtype, rank: int | None = None, most: int = 4) -> torch.Tensor:
        """Small integers of one rank, so that sums and products are exact in every dtype."""
        generator = torch.Generator().manual_seed(1000 * count + (self.rank if rank is None else rank))
        return torch.randint(1, most, (count,), generator=generator).to(dtype)


def checks_of(module: ModuleType) -> dict[str, Callable[[Ranks], None]]:
    return {name: check for name, check in inspect.getmembers(module) if name.startswith("check_")}


def main() -> None:
    module, rank, world, store, results = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        BACKEND, init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT
    )
    ranks = Ranks(rank, world, dist.group.WORLD, dist.new_group(backend="gloo", timeout=TIMEOUT))
    outcomes: dict[str, str] = {}
    for name, check in checks_of(importlib.import_module(module)).items():
        try:
            check(ranks)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
            break  # the others may now be anywhere
        dist.barrier()
    dist.destroy_process_group()
    outcomes["descriptors"] = " ".join(
        target
        for target in (os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists())
        if "manyhands:" in target
    )
    Path(results).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
