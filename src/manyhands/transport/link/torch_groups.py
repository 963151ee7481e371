"""Process groups of torch's own engines, made on a store without touching the program's default group.

NCCL connects GPUs when the first tensor comes; Gloo connects all ranks when it is made. Neither of them encrypts what
it sends, nor asks who is there: several hosts need a network that is trusted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

__all__ = ["SumGroup", "gloo_backend", "nccl_backend", "nccl_version"]

_CALM = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # what takes too long is ended, and this process is not
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # of threads that would end this process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class SumGroup:
    """Torch's NCCL where `device` is a GPU, elsewhere Gloo: made on `store`, which lives as long as this does.

    Calls begin something and return torch's work that is under way. On a GPU the first one connects all ranks.
    """

    def __init__(
        self, device: torch.device, store: c10d.Store, rank: int, world: int, timeout_s: float
    ) -> None:
        """Collective where it is Gloo."""
        self._store = store  # which torch would not keep alive, if it is one of Python's
        self._on_gpu = device.type == "cuda"
        timeout = timedelta(seconds=timeout_s)
        if self._on_gpu:
            with _environment(_CALM):
                self._backend = nccl_backend(store, rank, world, timeout)
        else:
            self._backend = gloo_backend(store, rank, world, timeout)

    def allreduce(self, tensor: torch.Tensor) -> Any:
        """Sum it over ranks, in place, after what is queued on this thread's stream."""
        return self._backend.allreduce([tensor])

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        """Make it that of rank `root`."""
        return self._backend.broadcast(tensor, root)

    def abort(self) -> None:
        """From any thread: end what is under way, whatever the others do. Gloo's connections end with the group."""
        if self._on_gpu:
            self._backend.abort()


@contextmanager
def _environment(usual: Mapping[str, str]) -> Iterator[None]:
    """Set variables that the user has not set, while something is made that reads them."""
    added = [name for name in usual if name not in os.environ]
    os.environ.update({name: usual[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def nccl_version() -> str:
    """`2.27.5`; empty where this torch has no NCCL."""
    if not dist.is_available() or not dist.is_nccl_available():
        return ""
    import torch.cuda.nccl

    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def nccl_backend(store: c10d.Store, rank: int, world: int, timeout: timedelta) -> Any:
    """One rank's end of NCCL; it connects with the first collective."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(c10d.PrefixStore("nccl/", store), rank, world, options)


def gloo_backend(store: c10d.Store, rank: int, world: int, timeout: timedelta) -> Any:
    """Collective: one rank's end of Gloo."""
    return c10d.ProcessGroupGloo(c10d.PrefixStore("gloo/", store), rank, world, timeout=timeout)
