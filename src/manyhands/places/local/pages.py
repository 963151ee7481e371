"""Memory in large pages, so that a process that forks often has less to copy each time.

A fork copies the table of all pages, and its end takes that copy apart: for the 200 MB that torch and the modules
around it fill, 20 milliseconds in small pages and 7 in large ones. What a fork writes to is still copied in small ones.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["LARGE_BYTES", "use_large_pages"]

LARGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25


def use_large_pages() -> int:
    """Put the memory of this process that belongs to no file into large pages; how many there are.

    0 where the kernel has no such order (before Linux 6.1). It copies all of that memory, a quarter of a second for
    200 MB.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return sum(madvise(start, LARGE_BYTES, _MADV_COLLAPSE) == 0 for start in _ranges())


def _ranges() -> list[int]:
    """The addresses of all that could be a large page: aligned, and within one private mapping of no file."""
    found: list[int] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, allowed, _offset, _device, _inode, *name = line.split(maxsplit=5)
        if allowed == "rw-p" and (not name or name == ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            found += range(-(-start // LARGE_BYTES) * LARGE_BYTES, end - LARGE_BYTES + 1, LARGE_BYTES)
    return found
