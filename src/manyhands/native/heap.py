"""Keep the memory that a training step frees: the next step takes it again.

Every backward allocates the model's gradients and frees them once they lie in their buckets. glibc gives large blocks
back to the kernel as soon as they are freed, so every step would fault all of them in again, page by page, and the
kernel would zero each: for a perceptron of 25 million weights, forward and backward took about twice as long.
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h
_NEVER = -1


def keep_freed_memory() -> bool:
    """From now on, have this process keep what it frees for its own next use; whether malloc is one that can be told.

    Call it when memory of an earlier stage has been let go of: that goes back to the kernel, what comes later stays.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library, with habits of its own
        return False
    # Nothing above the heap is returned, and large blocks too come from the heap instead of fresh pages.
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_M_MMAP_MAX, 0))
