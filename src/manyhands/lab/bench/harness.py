"""What all benchmarks share: worker processes with a plan, contenders in turn, percentiles, and the facts of the host.

A worker is `python -m MODULE PLAN`; it inherits the descriptors that its plan names and prints one JSON value.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from manyhands.errors import ManyhandsError
from manyhands.places.local.forking import die_with_parent

WARM_UP = 3  # runs of each contender that are not measured
Contender = TypeVar("Contender")
Plan = TypeVar("Plan", bound="WorkerPlan")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """What one worker does: a value that travels as JSON."""

    timeout_s: float
    parent_pid: int = field(default_factory=os.getpid)


def be_worker(plan_type: type[Plan], run: Callable[[Plan], object]) -> None:
    """In a worker: print what `run` gives for its plan, and end with the process that started it."""
    plan = plan_type(**json.loads(sys.argv[1]))
    die_with_parent(plan.parent_pid, signal.SIGKILL)
    run(plan)


def to_text(value: Any) -> str:
    """A dataclass with its kind, as a plan carries it; `from_text` reads one of these kinds."""
    return json.dumps({"kind": type(value).__name__, **asdict(value)})


def from_text(text: str, *kinds: type) -> Any:
    fields = json.loads(text)
    return {one.__name__: one for one in kinds}[fields.pop("kind")](**fields)


def interleaved(contenders: Sequence[Contender], rounds: int) -> Iterator[Contender]:
    """All in every round, and another one first each time, so that nobody always runs after the same other."""
    for number in range(rounds):
        first = number % len(contenders)
        yield from [*contenders[first:], *contenders[:first]]


def host_facts() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }


def percentiles(times: Any, unit: str) -> dict[str, float]:
    low, median, high = np.percentile(times, [10, 50, 90]).tolist()
    return {f"median_{unit}": median, f"p10_{unit}": low, f"p90_{unit}": high}


def time_text(microseconds: float) -> str:
    unit, value = ("µs", microseconds) if microseconds < 1000 else ("ms", microseconds / 1000)
    return f"{value:.{0 if value >= 100 else 1}f} {unit}"


def ratio_text(ratio: float) -> str:
    return f"{ratio:.{0 if ratio >= 10 else 2}f}×"


class Workers:
    """The workers of one run, in rank order; a context manager that kills whoever still runs at its end."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, plan: WorkerPlan, descriptors: Sequence[int] = ()) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", self._module, json.dumps(asdict(plan))],
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
