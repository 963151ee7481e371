"""What a server process keeps: parameters, optimizer state, and per worker no more than a gradient or two.

Measured by the kernel, after every worker has pushed and pulled: the resident memory of a server with a large model,
less that of one with a model of next to nothing. Private memory is the server's own; shared memory is the workers',
which the server maps to read and write in place.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from manyhands.lab.bench.server_ours import OurServer
from manyhands.lab.bench.server_work import Flat
from manyhands.strategies.common.consistency import Async
from manyhands.strategies.ps.strategy import Ps

__all__ = ["WORKERS", "measure_memory"]

WORKERS = (2, 4)
_EXCHANGES = 3
_LEAST_BYTES = 1024
_STATE_TENSORS = 2  # of Adam, each as large as the parameters


def measure_memory(num_bytes: int, timeout_s: float) -> list[dict[str, Any]]:
    """One row for each link and number of workers, in bytes."""
    rows = []
    small = _resident(_LEAST_BYTES, "shared", timeout_s)
    for link in ("shared", "tcp"):
        large = _resident(num_bytes, link, timeout_s)
        first, last = WORKERS[0], WORKERS[-1]
        per_worker = (large[last][0] - large[first][0]) / (last - first)
        for workers in WORKERS:
            private, shared = (
                after - before for after, before in zip(large[workers], small[workers], strict=True)
            )
            rows.append(
                {
                    "link": link,
                    "workers": workers,
                    "parameters_bytes": num_bytes,
                    "state_bytes": _STATE_TENSORS * num_bytes,
                    "private_bytes": private,
                    "shared_bytes": shared,
                    "private_per_worker_bytes": per_worker,
                }
            )
    return rows


def _resident(num_bytes: int, link: str, timeout_s: float) -> dict[int, tuple[int, int]]:
    """Private and shared memory of a server that so many workers have used."""
    flat = Flat(name="memory", num_bytes=num_bytes)
    task = replace(flat.task(), optimizer=partial(torch.optim.Adam, lr=flat.rate))
    resident = {}
    with OurServer(task, Ps(consistency=Async(), link=link), max(WORKERS), timeout_s) as server:
        for workers in WORKERS:
            while len(server.ends) < workers:
                server.add_worker()
            for end in server.ends * _EXCHANGES:
                end.exchange()
            resident[workers] = _of_process(server.pid)
    return resident


def _of_process(pid: int) -> tuple[int, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    private, shared = (1024 * int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return private, shared
