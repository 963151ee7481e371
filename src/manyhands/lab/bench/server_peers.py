"""What a user would write instead of a parameter server: a Ray actor, and a function called by torch.distributed.rpc.

One call pushes and brings the parameters back, and everything is warm; Ray passes large arrays through its shared
memory. Its actor comes twice: as its documentation writes a parameter server, which is the measure, and in place, as
somebody would who knows that SGD is one line. Torch's rpc gets the latter.
"""

from __future__ import annotations

import importlib
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.rpc as rpc
from numpy.typing import NDArray
from torch import Tensor

from manyhands.lab.bench.harness import WorkerPlan, Workers, be_worker, from_text, to_text
from manyhands.lab.bench.server_work import Array, Flat, PushPull, RowWork, TimedExchange, by_module

RAY, RAY_IN_PLACE = "ray actor", "ray actor, by hand in place"
_RAY_STORE_BYTES = 1 << 30
_RPC_THREADS = 4
_SERVER = "server"
_RPC_NAMES = ("worker", _SERVER)


@contextmanager
def ray_running() -> Iterator[None]:
    """Ray on this host alone, with as many of its processors as there are cores; nothing is left behind."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray = importlib.import_module("ray")
    # short: a Unix socket's path has 107 characters
    with tempfile.TemporaryDirectory(prefix="mh-ray-") as folder:
        ray.init(
            num_cpus=max(2, len(os.sched_getaffinity(0))),
            include_dashboard=False,
            object_store_memory=_RAY_STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()


class _Actor:
    """The server as a user of Ray writes it."""

    def __init__(self, exchange: str, in_place: bool) -> None:
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is only read
        described = from_text(exchange, Flat, RowWork)
        self._push_pull = described.in_place() if in_place else by_module(described)

    def push_pull(self, *pushed: NDArray[Any]) -> NDArray[Any]:
        answer: NDArray[Any] = self._push_pull(*map(torch.from_numpy, pushed)).numpy()
        return answer


class RayPeer:
    """One actor: with a module and an optimizer, or by hand and in place."""

    def __init__(self, exchange: TimedExchange, *, in_place: bool) -> None:
        self.name = RAY_IN_PLACE if in_place else RAY
        self._ray: Any = importlib.import_module("ray")
        self._actor = self._ray.remote(_Actor).remote(to_text(exchange), in_place)
        self._pushed: Sequence[NDArray[Any]] = ()
        self.pulled: Array = np.empty(0, np.float32)

    def give(self, pushed: Sequence[NDArray[Any]]) -> None:
        self._pushed = [array.copy() for array in pushed]

    def exchange(self) -> None:
        self.pulled = self._ray.get(self._actor.push_pull.remote(*self._pushed))

    def close(self) -> None:
        self.pulled = np.empty(0, np.float32)
        self._ray.kill(self._actor)


# ── torch.distributed.rpc ─────────────────────────────────────────────────────────────────────────────────────────────

_served: dict[str, PushPull] = {}
"""In the server's process: what it holds; the next three functions are called there."""


def begin_serving(exchange: str) -> None:
    torch.set_num_threads(1)
    _served[exchange] = from_text(exchange, Flat, RowWork).in_place()


def end_serving(exchange: str) -> None:
    del _served[exchange]


def push_pull(exchange: str, *pushed: Tensor) -> Tensor:
    return _served[exchange](*pushed)


def _join_rpc(store: str, rank: int, timeout_s: float) -> None:
    """Be one of the two processes, which find each other through a file; the transport is what TensorPipe chooses."""
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_RPC_THREADS, init_method=f"file://{store}", rpc_timeout=timeout_s
    )
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        _RPC_NAMES[rank], rank=rank, world_size=len(_RPC_NAMES), rpc_backend_options=options
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RpcPlan(WorkerPlan):
    """What the server's process does: it joins, and is killed when the other one is done."""

    store: str


def _serve(plan: _RpcPlan) -> None:
    _join_rpc(plan.store, 1, plan.timeout_s)
    signal.pause()


@contextmanager
def rpc_running(folder: str, timeout_s: float) -> Iterator[None]:
    store = str(Path(folder) / "rpc")
    with Workers("manyhands.lab.bench.server_peers") as workers:
        workers.start(_RpcPlan(store=store, timeout_s=timeout_s))
        _join_rpc(store, 0, timeout_s)
        try:
            yield
        finally:
            rpc.shutdown(graceful=False)


class RpcPeer:
    """What the server holds for one exchange."""

    name = "torch rpc"

    def __init__(self, exchange: TimedExchange) -> None:
        self._exchange = to_text(exchange)
        self._pushed: Sequence[Tensor] = ()
        self.pulled: Array = np.empty(0, np.float32)
        rpc.rpc_sync(_SERVER, begin_serving, args=(self._exchange,))

    def give(self, pushed: Sequence[NDArray[Any]]) -> None:
        self._pushed = [torch.from_numpy(array.copy()) for array in pushed]

    def exchange(self) -> None:
        self.pulled = rpc.rpc_sync(_SERVER, push_pull, args=(self._exchange, *self._pushed)).numpy()

    def close(self) -> None:
        rpc.rpc_sync(_SERVER, end_serving, args=(self._exchange,))


if __name__ == "__main__":
    be_worker(_RpcPlan, _serve)
