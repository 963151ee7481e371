"""Anonymous shared memory: a memfd that lives exactly as long as the processes that hold it.

There is no name in any file system, so nothing is left behind after `kill -9`, and the small /dev/shm of containers
does not matter. Pages are reserved when the segment is sized, so a shortage is an error here, never a SIGBUS later.
A segment travels by its descriptor: inherited by a child, or passed over a Unix socket.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from manyhands.errors import OutOfSharedMemory
from manyhands.native.closeable import Closeable

if TYPE_CHECKING:
    import torch

CACHE_LINE = 128  # two 64-byte lines: adjacent-line prefetch makes neighbours share
PAGE = mmap.PAGESIZE
# Of control groups of version 2, and of version 1.
_CGROUP = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def ask_for_large_pages(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # this kernel has none for such memory: ordinary pages do
            memory.madvise(mmap.MADV_HUGEPAGE)


def available_bytes() -> int:
    """Memory this process could still use: the machine's, or the container's where that is less."""
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    machine = (int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
    room = next(machine, os.sysconf("SC_AVPHYS_PAGES") * PAGE)
    for files in _CGROUP:
        with suppress(OSError, ValueError):  # a limit may be the word max
            limit, usage = (int(Path("/sys/fs/cgroup", file).read_text()) for file in files)
            room = min(room, max(0, limit - usage))
    return room


class Segment(Closeable):
    """Shared memory mapped into this process; a context manager, `close` is idempotent.

    `create` makes a new one, `attach` maps one whose descriptor this process holds. The mapping is readable and
    writable by every holder; who may write which line is the business of the code that lays it out.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Map `num_bytes` of `descriptor`, which this object now owns."""
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        self._map: mmap.mmap | None = mmap.mmap(descriptor, num_bytes) if num_bytes else None
        self._address = 0
        if self._map is not None:
            ask_for_large_pages(self._map)
            anchor = ctypes.c_char.from_buffer(self._map)
            self._address = ctypes.addressof(anchor)
            del anchor

    @classmethod
    def create(cls, num_bytes: int, purpose: str) -> Segment:
        """Reserve a new zeroed segment, or raise OutOfSharedMemory naming the need and the capacity."""
        descriptor = os.memfd_create(f"manyhands:{purpose}", os.MFD_CLOEXEC)
        try:
            reserve(descriptor, num_bytes, purpose)
            return cls(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, descriptor: int) -> Segment:
        return cls(descriptor, os.fstat(descriptor).st_size)

    @property
    def address(self) -> int:
        """Where the segment starts in this process, for compiled code."""
        if self._map is None and self.num_bytes:
            raise ValueError("the segment is closed")
        return self._address

    def memory(self, offset: int = 0, num_bytes: int | None = None) -> memoryview:
        """A writable view of bytes; release it before `close`."""
        if self._map is None:
            return memoryview(bytearray())
        end = self.num_bytes if num_bytes is None else offset + num_bytes
        return memoryview(self._map)[offset:end]

    def array(self, offset: int, count: int, dtype: np.dtype | type) -> np.ndarray:
        if count == 0 or self._map is None:
            return np.empty(0, dtype)
        return np.frombuffer(self._map, dtype, count, offset)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        import torch  # here alone: what compiles kernels over shared memory has no use for it

        if count == 0 or self._map is None:
            return torch.empty(0, dtype=dtype)
        # By way of numpy, which pins the mapping: a tensor of torch.frombuffer would dangle after `close`.
        return torch.from_numpy(self.array(offset, count * dtype.itemsize, np.uint8)).view(dtype)

    def close(self) -> None:
        """Unmap and close the descriptor; a view still in use keeps the mapping alive until it goes."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self._map is not None:
            with suppress(BufferError):  # a tensor still points here: the mapping goes with the last one
                self._map.close()
            self._map = None


def reserve(descriptor: int, num_bytes: int, purpose: str, kept_bytes: int = 0) -> None:
    """Size a memfd and take its pages now, or raise OutOfSharedMemory.

    The first `kept_bytes`, reserved before, stay what they are whatever happens: others may have them mapped.
    """
    needed, room = num_bytes - kept_bytes, available_bytes()
    if needed > room:
        raise OutOfSharedMemory(purpose, needed, room)
    os.ftruncate(descriptor, num_bytes)
    if needed:
        try:
            os.posix_fallocate(descriptor, kept_bytes, needed)
        except OSError as error:
            os.ftruncate(descriptor, kept_bytes)
            raise OutOfSharedMemory(purpose, needed, available_bytes()) from error
