import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

from descriptors import open_descriptors
from manyhands.errors import OutOfSharedMemory
from manyhands.native import atomics
from manyhands.native.segment import CACHE_LINE, PAGE, Segment, available_bytes, round_up


@njit(nogil=True)
def add_many(address, times):  # type: ignore[no-untyped-def]
    for _ in range(times):
        atomics.add_u32(address, 1)
        atomics.add_i64(address + 8, 3)


@njit(nogil=True)
def take_lock_and_count(lock, counter, times):  # type: ignore[no-untyped-def]
    cell = atomics.array_at(counter, 1, np.int64)
    for _ in range(times):
        while not atomics.compare_swap_u32(lock, 0, 1):
            atomics.pause()
        cell[0] += 1
        atomics.store_u32(lock, 0)


@njit(nogil=True)
def set_word(address, value):  # type: ignore[no-untyped-def]
    atomics.store_u32(address, value)
    return atomics.futex_wake(address)


@njit(nogil=True)
def read_word(address):  # type: ignore[no-untyped-def]
    return atomics.load_u32(address)


def run_threads(count: int, target, *args: int) -> None:  # type: ignore[no-untyped-def]
    threads = [threading.Thread(target=target, args=args) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_adds_of_four_threads_are_all_counted() -> None:
    with Segment.create(PAGE, "test") as segment:
        run_threads(4, add_many, segment.address, 50_000)
        assert segment.array(0, 1, np.uint32)[0] == 200_000
        assert segment.array(8, 1, np.int64)[0] == 600_000


def test_compare_swap_makes_a_lock() -> None:
    with Segment.create(PAGE, "test") as segment:
        run_threads(3, take_lock_and_count, segment.address, segment.address + CACHE_LINE, 20_000)
        assert segment.array(CACHE_LINE, 1, np.int64)[0] == 60_000


def test_the_clock_is_monotonic_ns() -> None:
    before = time.monotonic_ns()
    now = atomics.clock_ns()
    assert before <= now <= time.monotonic_ns()


def test_a_futex_wakes_its_sleeper_and_minds_its_timeout() -> None:
    with Segment.create(PAGE, "test") as segment:
        began = time.monotonic()
        atomics.futex_wait(segment.address, 0, 50_000_000)
        assert time.monotonic() - began >= 0.05
        woken: list[float] = []

        def sleep() -> None:
            while read_word(segment.address) == 0:
                atomics.futex_wait(segment.address, 0, 10_000_000_000)
            woken.append(time.monotonic())

        sleeper = threading.Thread(target=sleep)
        sleeper.start()
        set_word(segment.address, 7)
        sleeper.join(timeout=240)
        assert woken, "the sleeper was not woken"


def test_a_segment_is_zeroed_shared_by_descriptor_and_gone_when_closed() -> None:
    first = Segment.create(3 * PAGE, "two ends")
    second = Segment.attach(os.dup(first.descriptor))
    tensor = first.tensor(PAGE, 5, torch.float32)
    assert not tensor.any()
    tensor.copy_(torch.arange(5.0))
    assert second.array(PAGE, 5, np.float32).tolist() == [0, 1, 2, 3, 4]
    assert bytes(second.memory(PAGE, 4)) == bytes(4)
    del tensor
    first.close()
    first.close()
    second.close()
    assert "manyhands:two ends" not in Path("/proc/self/maps").read_text()
    with pytest.raises(ValueError, match="closed"):
        _ = first.address


def test_a_view_outlives_close() -> None:
    segment = Segment.create(PAGE, "kept")
    tensor = segment.tensor(0, 3, torch.float64)
    segment.close()
    tensor += 1
    assert tensor.tolist() == [1, 1, 1]


def test_an_empty_segment_works() -> None:
    with Segment.create(0, "nothing") as segment:
        assert segment.tensor(0, 0, torch.float32).shape == (0,)
        assert len(segment.memory()) == 0


def test_a_shortage_says_the_need_and_the_room() -> None:
    descriptors = len(open_descriptors())
    need = available_bytes() + (1 << 40)
    with pytest.raises(
        OutOfSharedMemory, match=r"gradients needs \d+\.\d GiB, but only \d+\.\d GiB is available"
    ) as caught:
        Segment.create(need, "gradients")
    assert caught.value.needed_bytes == need
    assert len(open_descriptors()) == descriptors


@pytest.mark.parametrize(
    ("num_bytes", "multiple", "rounded"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128)]
)
def test_round_up(num_bytes: int, multiple: int, rounded: int) -> None:
    assert round_up(num_bytes, multiple) == rounded
