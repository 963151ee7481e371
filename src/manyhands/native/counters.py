"""Numbers that all workers of a run count together, each on a cache line of its own in shared memory."""

from __future__ import annotations

from manyhands.native.atomics import add_i64, load_i64, store_i64
from manyhands.native.decorators import njit
from manyhands.native.segment import CACHE_LINE, Segment


class Counter:
    """One 64-bit number at an address, zero at first; every operation is atomic.

    `holder` is what keeps the memory there, such as a Segment: the mapping could go while the address is still used.
    """

    NUM_BYTES = CACHE_LINE

    def __init__(self, address: int, holder: object) -> None:
        self._holder = holder
        self.address = address

    @classmethod
    def within(cls, segment: Segment, offset: int) -> Counter:
        return cls(segment.address + offset, segment)

    def get(self) -> int:  # with acquire order: all that was written before it was set is visible
        return int(load(self.address))

    def set(self, value: int) -> None:
        store(self.address, value)

    def add(self, value: int = 1) -> int:
        """Add to the number; returns what it was before."""
        return int(_add(self.address, value))


@njit("int64(int64)", nogil=True, cache=True)
def load(address: int) -> int:
    return load_i64(address)  # type: ignore[no-any-return]


@njit("void(int64, int64)", nogil=True, cache=True)
def store(address: int, value: int) -> None:
    store_i64(address, value)


@njit("int64(int64, int64)", nogil=True, cache=True)
def _add(address: int, value: int) -> int:
    return add_i64(address, value)  # type: ignore[no-any-return]
