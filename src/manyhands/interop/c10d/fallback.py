"""The fallback backends of torch: NCCL for CUDA tensors, Gloo for what shared memory cannot take.

NCCL is made when the first CUDA tensor comes, and connects ranks as they need it. Gloo connects all ranks when it is
made, so it is made with the group where it will be needed (ranks on several hosts, or GPUs without NCCL), and else when
all ranks first bring something that shared memory does not take, such as sparse tensors.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from manyhands.errors import UserError
from manyhands.transport.link.torch_p2p import gloo_backend, nccl_backend

__all__ = ["FallbackGroup"]

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")
_Type = dist.ProcessGroup.BackendType


class FallbackGroup:
    """A plain process group of torch, with a backend for each device that needs one."""

    def __init__(self, store: c10d.Store, rank: int, world: int, timeout: timedelta) -> None:
        self._store = store
        self._place = (rank, world)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._group: dist.ProcessGroup | None = None
        self._made: set[str] = set()
        self.has_cuda = torch.cuda.is_available()

    def open(self, *, several_hosts: bool) -> None:
        """Collective: create the backends that must exist before they are used."""
        if several_hosts:
            self.for_device(_CPU)
        if self.has_cuda and not dist.is_nccl_available():
            self.for_device(_CUDA)

    def for_device(self, device: torch.device) -> dist.ProcessGroup:
        """The group, with a backend for `device`; collective when Gloo is needed for the first time."""
        if device.type not in ("cpu", "cuda"):
            raise UserError(f"device={device}: the manyhands backend takes tensors on cpu and cuda")
        with self._lock:
            if self._group is None:
                self._group = dist.ProcessGroup(self._store, *self._place)
                self._group._set_default_backend(_Type.GLOO)
            if device.type not in self._made:
                nccl = device.type == "cuda" and dist.is_nccl_available()
                kind, make = (_Type.NCCL, nccl_backend) if nccl else (_Type.GLOO, gloo_backend)
                backend = make(self._store, *self._place, self._timeout)
                self._group._register_backend(torch.device(device.type), kind, backend)
                self._made.add(device.type)
            return self._group

    def close(self) -> None:
        """Shut down the backends that were created; idempotent."""
        with self._lock:
            group, self._group = self._group, None
            self._made.clear()
        if group is not None:
            group.shutdown()
