"""The wait marker of a process: two words that show which role it waits for, once a wait is long.

    | since_ns | role waited for + 1, or 0 for nobody |

A wait of less than `LONG_WAIT_S` never touches the sign, so it costs the fast path nothing. A role of a launcher
puts its marker in the launcher's status table, where the watchdog reads it; elsewhere it is in plain memory, unread.
"""

from __future__ import annotations

import time
from typing import Final, Self

import numpy as np

from manyhands.native.atomics import store_i64
from manyhands.native.decorators import njit

LONG_WAIT_S: Final = 1.0
LONG_WAIT_NS: Final = 1_000_000_000
_PEER = 8

_unseen = np.zeros(2, np.int64)
_hangs_at = _unseen.ctypes.data


def hang_at(address: int) -> None:
    """Publish from now on whom this process waits for in the words at `address`, which must stay mapped."""
    global _hangs_at
    _hangs_at = address


def sign_address() -> int:
    return _hangs_at


class LongWait:
    """A wait in Python that polls; it is published once it is long. A context manager."""

    def __init__(self) -> None:
        self._sign = _hangs_at
        self._began_ns = time.monotonic_ns()
        self._is_shown = False

    @property
    def is_long(self) -> bool:
        return time.monotonic_ns() - self._began_ns >= LONG_WAIT_NS

    def goes_on(self, peer: int) -> None:
        """Report that nothing has come from role `peer` yet; called at least every `LONG_WAIT_S`."""
        if self.is_long:
            put_up(self._sign, peer, self._began_ns)
            self._is_shown = True

    def begin_again(self) -> None:
        self._began_ns = time.monotonic_ns()
        if self._is_shown:
            take_down(self._sign)
            self._is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.begin_again()


@njit("void(int64, int64, int64)", nogil=True, cache=True)
def put_up(sign: int, peer: int, since_ns: int) -> None:
    store_i64(sign, since_ns)
    store_i64(sign + _PEER, peer + 1)


@njit("void(int64)", nogil=True, cache=True)
def take_down(sign: int) -> None:
    store_i64(sign + _PEER, 0)
