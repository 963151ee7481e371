"""The compiled ring alone: bytes in, the same bytes out, across its end and the wrap of its counters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from manyhands.native.segment import CACHE_LINE, PAGE, Segment
from manyhands.transport.link import byte_ring

CAPACITY = PAGE - byte_ring.CONTROL_BYTES


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(PAGE, "a test") as segment:
        byte_ring.prepare(segment.address, CAPACITY)
        yield segment


def write(segment: Segment, header: np.ndarray, payload: np.ndarray, done: int = 0) -> int:
    address = segment.address
    return int(
        byte_ring.write(
            address, header.ctypes.data, len(header), payload.ctypes.data, len(payload), done, 0, 0
        )
    )


def read(segment: Segment, target: np.ndarray, done: int = 0) -> int:
    return int(byte_ring.read(segment.address, target.ctypes.data, len(target), done, 0, 0))


def start_at(segment: Segment, cursor: int) -> None:
    """As if `cursor` bytes had gone through already."""
    for line in (0, CACHE_LINE):
        segment.array(line, 1, np.uint32)[0] = cursor % 2**32
        segment.array(line + 64, 1, np.int64)[0] = cursor


@pytest.mark.parametrize("start", [0, CAPACITY - 1, 2**32 - 5000, 2**32 - 1, 5 * 2**32 + 17])
def test_bytes_arrive_in_order_whatever_the_pieces(segment: Segment, start: int) -> None:
    start_at(segment, start)
    random = np.random.default_rng(start)
    header = random.integers(0, 256, 64, dtype=np.uint8)
    payload = random.integers(0, 256, 7 * CAPACITY + 3, dtype=np.uint8)
    target = np.zeros(64 + len(payload), np.uint8)
    written = taken = 0
    while taken < len(target):
        written = write(segment, header, payload, written)
        wish = min(len(target), taken + int(random.integers(1, CAPACITY)))
        taken = read(segment, target[:wish], taken)
    assert written == len(target)
    np.testing.assert_array_equal(target, np.concatenate([header, payload]))


def test_a_full_ring_takes_no_more_and_an_empty_one_gives_nothing(segment: Segment) -> None:
    header, payload = np.ones(64, np.uint8), np.ones(CAPACITY, np.uint8)
    assert read(segment, np.zeros(1, np.uint8)) == 0
    assert write(segment, header, payload) == CAPACITY
    assert write(segment, header, payload, CAPACITY) == CAPACITY
    assert read(segment, np.zeros(10, np.uint8)) == 10
    assert write(segment, header, payload, CAPACITY) == CAPACITY + 10


def test_who_left_is_seen_and_what_it_wrote_is_still_there(segment: Segment) -> None:
    write(segment, np.arange(8, dtype=np.uint8), np.zeros(0, np.uint8))
    assert byte_ring.state(segment.address) == byte_ring.OPEN
    byte_ring.end(segment.address, segment.address, byte_ring.CUT)
    assert byte_ring.state(segment.address) == byte_ring.CUT
    target = np.zeros(9, np.uint8)
    one_hour_ahead = 2**62  # nobody waits for a side that has left
    assert byte_ring.read(segment.address, target.ctypes.data, 9, 0, one_hour_ahead, 10) == 8
    np.testing.assert_array_equal(target[:8], np.arange(8))
