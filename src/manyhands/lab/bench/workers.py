"""The worker processes of a benchmark: started with a plan, waited for, never left behind.

A worker is `python -m MODULE PLAN`; it inherits the descriptors that its plan names and prints one JSON value.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist

from manyhands.errors import ManyhandsError

__all__ = ["Workers", "joined_gloo"]


class Workers:
    """The workers of one run, in rank order; a context manager that kills whoever still runs at its end."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, plan: str, descriptors: Sequence[int]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", self._module, plan],
            pass_fds=descriptors,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        self._processes.append(process)

    def results(self, timeout_s: float) -> list[Any]:
        """What each rank printed; a ManyhandsError names the first that failed, or did not end in time."""
        outputs: dict[int, str] = {}
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(len(self._processes)))
            for process in self._processes:
                stack.callback(process.kill)  # whatever happened: else the pool would wait for them to end
            ranks = {
                pool.submit(_output_of, rank, process, timeout_s): rank
                for rank, process in enumerate(self._processes)
            }
            for future in as_completed(ranks):
                outputs[ranks[future]] = future.result()
        return [json.loads(outputs[rank]) for rank in range(len(self._processes))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextmanager
def joined_gloo(store: str, rank: int, world: int, timeout_s: float) -> Iterator[None]:
    """In a worker: torch's default group on Gloo, its ranks found through the file `store`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # its fastest way on one host
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _output_of(rank: int, process: subprocess.Popen[str], timeout_s: float) -> str:
    try:
        output, complaints = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ManyhandsError(f"rank {rank} of the benchmark did not end within {timeout_s:g} s") from None
    if process.returncode != 0:
        raise ManyhandsError(
            f"rank {rank} of the benchmark ended with status {process.returncode}:\n{complaints.strip()}"
        )
    return output
