"""The sign of a process: two words of memory where it shows whom it waits for, once a wait has lasted a while.

    | since_ns | role waited for + 1, or 0 for nobody |

A wait of less than `LONG_WAIT_S` never touches the sign, so it costs the fast path nothing. A role of a launcher hangs
its sign on the launcher's board, where the watchdog reads it; elsewhere nobody looks, and it hangs in plain memory.
"""

from __future__ import annotations

import time
from typing import Final, Self

import numpy as np

from manyhands.native.atomics import store_i64
from manyhands.native.decorators import njit

__all__ = ["LONG_WAIT_NS", "LONG_WAIT_S", "LongWait", "hang_at", "put_up", "sign_address", "take_down"]

LONG_WAIT_S: Final = 1.0
LONG_WAIT_NS: Final = 1_000_000_000
_PEER = 8

_unseen = np.zeros(2, np.int64)
_hangs_at = _unseen.ctypes.data


def hang_at(address: int) -> None:
    """Show from now on whom this process waits for in the two words at `address`, which must stay mapped."""
    global _hangs_at
    _hangs_at = address


def sign_address() -> int:
    """Where the sign hangs, for compiled code."""
    return _hangs_at


class LongWait:
    """A wait that looks up now and then, in Python: it shows itself once it is long. A context manager."""

    def __init__(self) -> None:
        self._sign = _hangs_at
        self._began_ns = time.monotonic_ns()
        self._is_shown = False

    @property
    def is_long(self) -> bool:
        """Whether it is time to show it."""
        return time.monotonic_ns() - self._began_ns >= LONG_WAIT_NS

    def goes_on(self, peer: int) -> None:
        """Nothing yet of role `peer`; called at least every `LONG_WAIT_S`."""
        if self.is_long:
            put_up(self._sign, peer, self._began_ns)
            self._is_shown = True

    def begin_again(self) -> None:
        """What was waited for is here; from now on it is the next wait."""
        self._began_ns = time.monotonic_ns()
        self._hide()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hide()

    def _hide(self) -> None:
        if self._is_shown:
            take_down(self._sign)
            self._is_shown = False


@njit("void(int64, int64, int64)", nogil=True, cache=True)
def put_up(sign: int, peer: int, since_ns: int) -> None:
    """Show that role `peer` is waited for since `since_ns`."""
    store_i64(sign, since_ns)
    store_i64(sign + _PEER, peer + 1)


@njit("void(int64)", nogil=True, cache=True)
def take_down(sign: int) -> None:
    """Nobody is waited for any longer."""
    store_i64(sign + _PEER, 0)
