"""Waiting for what other processes write into a store, by polling at growing intervals."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["comes_true"]

_FIRST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.1


def comes_true(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until `is_done` holds (True) or the timeout is over (False).

    A blocking wait in the store would lock out all other threads of this process meanwhile.
    """
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not is_done():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True
