"""The arena for payloads: a writer and a reader over the same memory, against a plain queue."""

from __future__ import annotations

import os
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.native.segment import PAGE, Segment
from manyhands.transport.hub.arenas import Arenas
from manyhands.transport.messages import ProtocolError

CAPACITY = 2 * PAGE


@given(st.lists(st.one_of(st.integers(1, CAPACITY + 1), st.none()), max_size=60))
def test_payloads_lie_untouched_until_they_are_released(actions: list[int | None]) -> None:
    """A number is a payload of that size; None releases the oldest one."""
    with Segment.create(PAGE + 2 * CAPACITY, "a test") as segment:
        here = Arenas(segment, 0)
        there = Arenas(Segment.attach(_duplicate(segment)), 1)
        held: deque[tuple[int, memoryview, bytes]] = deque()
        for number, size in enumerate(actions):
            if size is None:
                if held:
                    there.reader.release(held.popleft()[0])
                continue
            content = bytes([number % 251]) * size
            position = here.writer.put(
                [memoryview(content[: size // 3]), memoryview(content[size // 3 :])], size
            )
            if position < 0:
                assert held or size > CAPACITY
                continue
            assert position % 64 == 0
            held.append((position, there.reader.take(position, size), content))
            assert all(bytes(view) == expected for _, view, expected in held)
        held.clear()
        there.close()
        here.close()


def _duplicate(segment: Segment) -> int:
    return os.dup(segment.descriptor)


@pytest.fixture
def arenas() -> Arenas:
    return Arenas(Arenas.create(CAPACITY), 0)


def test_rooms_are_free_in_order_whatever_the_order_of_release() -> None:
    with Segment.create(PAGE + 2 * CAPACITY, "a test") as segment:
        here, there = Arenas(segment, 0), Arenas(Segment.attach(_duplicate(segment)), 1)
        half = memoryview(bytes(CAPACITY // 2))
        first, second = here.writer.put([half], len(half)), here.writer.put([half], len(half))
        for position in (first, second):
            there.reader.take(position, len(half))
        there.reader.release(second)
        assert here.writer.put([half], len(half)) == -1
        there.reader.release(first)
        there.reader.release(first)  # once more is no harm
        assert here.writer.put([half], len(half)) == 2 * len(half)
        there.close()
        here.close()


def test_a_payload_that_was_not_announced_leaves_no_gap() -> None:
    with Segment.create(PAGE + 2 * CAPACITY, "a test") as segment:
        here, there = Arenas(segment, 0), Arenas(Segment.attach(_duplicate(segment)), 1)
        most = memoryview(bytes(CAPACITY - 64))
        there.reader.take(here.writer.put([most], len(most)), len(most))
        there.reader.release(0)
        assert here.writer.put([most], len(most)) == CAPACITY  # begins anew
        here.writer.take_back()
        position = here.writer.put([memoryview(b"small")], 5)
        assert bytes(there.reader.take(position, 5)) == b"small"
        there.close()
        here.close()


@pytest.mark.parametrize(
    ("position", "num_bytes"), [(64, 8), (0, 0), (0, CAPACITY + 1), (1 << 62, 8), (CAPACITY, 8)]
)
def test_a_position_that_can_not_be_is_refused(position: int, num_bytes: int, arenas: Arenas) -> None:
    with pytest.raises(ProtocolError, match="position"):
        arenas.reader.take(position, num_bytes)
    arenas.close()


def test_a_payload_over_one_that_is_still_held_is_refused(arenas: Arenas) -> None:
    arenas.reader.take(0, CAPACITY)
    with pytest.raises(ProtocolError, match="position"):
        arenas.reader.take(CAPACITY, 64)
    arenas.close()


@pytest.mark.parametrize("num_bytes", [0, PAGE, 2 * PAGE, 4 * PAGE])
def test_a_segment_of_another_shape_is_refused(num_bytes: int) -> None:
    with pytest.raises(ProtocolError, match="arena"):
        Arenas(Segment.create(num_bytes, "a test"), 0)
