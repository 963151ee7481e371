"""What files a process has open."""

from __future__ import annotations

import gc
import os

import warm
from manyhands.places.local import template


def open_descriptors() -> set[str]:
    """The descriptors of this process that something still needs.

    Garbage goes first: memory that tensors of an earlier test lie in is let go with the last of them, which may be in a
    cycle and so go at any time. The ways to templates, which are kept for the next run, do not count.
    """
    gc.collect()
    kept = str(template._kept._control.fileno()) if template._kept is not None else ""
    listed = os.listdir("/proc/self/fd")  # with its own, which is closed by now
    still_open = {number for number in listed if os.path.lexists(f"/proc/self/fd/{number}")}
    return still_open - {kept, str(warm.descriptor())}
