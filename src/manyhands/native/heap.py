"""Keep the memory that a training step frees: the next step takes it again.

Every backward allocates the model's gradients and frees them once they lie in their buckets. glibc gives large blocks
back to the kernel as soon as they are freed, so every step would fault all of them in again, page by page, and the
kernel would zero each: for a perceptron of 25 million weights, forward and backward took about twice as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # from malloc.h
_NEVER = -1
# Once told anything, malloc does not learn from the sizes that are freed any more. These are what it would have learned
# from large ones; with what it begins with (128 KiB), every large tensor would be faulted in afresh from then on.
_LEARNED_MMAP, _LEARNED_TRIM, _USUAL_MMAPS = 32 << 20, 64 << 20, 65_536


def keep_freed_memory() -> bool:
    """From now on, have this process keep what it frees for its own next use; whether malloc is one that can be told.

    Call it when memory of an earlier stage has been let go of: that goes back to the kernel, what comes later stays.
    """
    # Nothing above the heap is returned, and large blocks too come from the heap instead of fresh pages.
    return _tell({_M_TRIM_THRESHOLD: _NEVER, _M_MMAP_MAX: 0})


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory inside; after this, large blocks go back to the kernel: the process has other uses too."""
    keep_freed_memory()
    try:
        yield
    finally:
        learned = {_M_MMAP_THRESHOLD: _LEARNED_MMAP, _M_TRIM_THRESHOLD: _LEARNED_TRIM}
        if _tell({**learned, _M_MMAP_MAX: _USUAL_MMAPS}):
            give_back_freed_memory()


def give_back_freed_memory() -> None:
    """What is free now goes back to the kernel, also where later memory is kept."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _tell(settings: Mapping[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library, with habits of its own
        return False
    return all(mallopt(name, value) for name, value in settings.items())
