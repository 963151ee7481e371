"""Keep the memory that a training step frees: the next step takes it again.

Every backward allocates the model's gradients and frees them once they lie in their buckets. glibc gives large blocks
back to the kernel as soon as they are freed, so every step would fault all of them in again, page by page, and the
kernel would zero each: for a perceptron of 25 million weights, forward and backward took about twice as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["freed_memory_kept", "keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h
_NEVER = -1
_USUAL_TRIM, _USUAL_MMAPS = 128 << 10, 65_536  # what malloc begins with


def keep_freed_memory() -> bool:
    """From now on, have this process keep what it frees for its own next use; whether malloc is one that can be told.

    Call it when memory of an earlier stage has been let go of: that goes back to the kernel, what comes later stays.
    """
    # Nothing above the heap is returned, and large blocks too come from the heap instead of fresh pages.
    return _set(_NEVER, 0)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """After this, what is freed goes back to the kernel again, as before: for a process that has other uses too."""
    try:
        yield
    finally:
        if _set(_USUAL_TRIM, _USUAL_MMAPS):
            ctypes.CDLL(None).malloc_trim(0)


def _set(trim_threshold: int, most_mmaps: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library, with habits of its own
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, trim_threshold)) and bool(mallopt(_M_MMAP_MAX, most_mmaps))
