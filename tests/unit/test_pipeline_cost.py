"""What a schedule costs equals the closed forms for equal stages, and hand-computed times for uneven ones."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

import pytest

from manyhands.errors import UserError
from manyhands.strategies.pipeline.schedule_cost import Boundary, PartTimes, cost, equal_times
from manyhands.strategies.pipeline.schedules import SCHEDULES, Schedule, interleaved

SIZES = [(1, 1), (1, 5), (2, 2), (3, 7), (4, 8), (4, 3), (8, 8), (8, 32), (16, 64)]
TIMES = [(1, 1, 1), (6, 6, 0), (12, 18, 6), (6, 18, 30)]
"""(f, b, w), whole multiples of what stages are cut into: sums are exact in floating point."""


def bubble(schedule: Schedule, forward: float, backward: float, weights: float) -> float:
    times = equal_times(schedule, forward=forward, backward=backward, weights=weights)
    return cost(schedule, times).bubble


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "wavefront"])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_of_gpipe_and_1f1b_and_the_wavefront(name: str, p: int, m: int) -> None:
    for f, b, w in TIMES:
        assert bubble(SCHEDULES[name](p, m), f, b, w) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_of_the_naive_split(p: int, m: int) -> None:
    for f, b, w in TIMES:
        assert bubble(SCHEDULES["naive"](p, m), f, b, w) == pytest.approx((p - 1) / p, abs=1e-12)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("p", "rounds"), [(1, 4), (2, 1), (2, 4), (4, 1), (4, 2), (8, 3)])
def test_bubble_of_interleaved(v: int, p: int, rounds: int) -> None:
    m = p * rounds
    for f, b, w in TIMES:
        found = bubble(interleaved(p, m, v), f, b, w)
        assert found == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


def test_bubble_of_zb_h1_is_the_derived_one_for_any_times() -> None:
    rng = random.Random(20)
    for _ in range(150):
        f, b, w = (rng.randint(1, 9) for _ in range(3))
        p = rng.randint(1, 8)
        m = rng.randint(p, 20)
        extra = (p - 1) * max(f + b - w, f, b)
        schedule = SCHEDULES["zb-h1"](p, m)
        found = cost(schedule, equal_times(schedule, forward=f, backward=b, weights=w))
        assert found.time == m * (f + b + w) + extra
        assert found.bubble == pytest.approx(extra / found.time, abs=1e-12)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 32)])
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b_in_the_same_memory(p: int, m: int) -> None:
    both = [SCHEDULES[name](p, m) for name in ("zb-h1", "1f1b")]
    zero, plain = (cost(schedule, equal_times(schedule)) for schedule in both)
    work = 3 * m
    assert (zero.time - work) * 3 == plain.time - work
    assert max(zero.peaks) == max(plain.peaks)


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 64), (16, 64), (8, 3)])
def test_1f1b_holds_at_most_p_of_m_of_what_gpipe_holds(p: int, m: int) -> None:
    plain, gpipe = (cost(s, equal_times(s)) for s in (SCHEDULES["1f1b"](p, m), SCHEDULES["gpipe"](p, m)))
    assert set(gpipe.peaks) == {m}
    assert max(plain.peaks) == min(p, m)
    assert all(
        Fraction(ours, theirs) <= Fraction(min(p, m), m)
        for ours, theirs in zip(plain.peaks, gpipe.peaks, strict=True)
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_beats_the_lower_bounds(name: str) -> None:
    """Neither the busiest stage's own work, nor one micro-batch's way there and back."""
    rng = random.Random(3)
    for p, m in product((1, 2, 4), (4, 8)):
        schedule = SCHEDULES[name](p, m)
        forward, backward, weights, send = (
            tuple(rng.randint(1, 9) for _ in range(schedule.parts)) for _ in range(4)
        )
        times = PartTimes(forward=forward, backward=backward, weights=weights, send=send)
        found = cost(schedule, times)
        assert found.time >= max(found.busy)
        assert found.time >= sum(times.forward) + sum(times.backward) + (p > 1) * (
            sum(times.send[:-1]) + sum(times.send[1:])
        )
        assert sum(found.busy) == m * (sum(times.forward) + sum(times.backward) + sum(times.weights))


def test_uneven_stages_and_slow_links_by_hand() -> None:
    """gpipe, 2 stages, 2 micro-batches: F 2 and 3, backward 1 and 4, a message takes 5.

    stage 0: F0 0-2, F1 2-4; outputs arrive at 7 and, behind it on the wire, at 12.
    stage 1: F0 7-10, F1 12-15, B0 15-19, B1 19-23; gradients arrive at 24 and 29.
    stage 0: B0 24-25, B1 29-30.
    """
    schedule = SCHEDULES["gpipe"](2, 2)
    times = PartTimes(forward=(2, 3), backward=(1, 1), weights=(0, 3), send=(5, 5))
    found = cost(schedule, times)
    assert found.time == 30
    assert found.busy == (6, 14)
    assert found.bubbles == (1 - 6 / 30, 1 - 14 / 30)
    assert found.bubble == pytest.approx(1 - 20 / 60)


def test_what_crosses_each_border() -> None:
    schedule = SCHEDULES["1f1b"](3, 4)
    found = cost(schedule, equal_times(schedule), message_bytes=(100, 7))
    assert found.boundaries == (
        Boundary(source=0, to=1, messages=4, num_bytes=400),
        Boundary(source=1, to=0, messages=4, num_bytes=400),
        Boundary(source=1, to=2, messages=4, num_bytes=28),
        Boundary(source=2, to=1, messages=4, num_bytes=28),
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_border_of_two_parts_is_crossed_twice_by_each_micro_batch(name: str) -> None:
    for p, m in ((2, 6), (3, 6), (4, 8)):
        schedule = SCHEDULES[name](p, m)
        found = cost(schedule, equal_times(schedule))
        assert sum(one.messages for one in found.boundaries) == 2 * m * (schedule.chunks * p - 1)


def test_chunks_send_around_the_ring_of_stages() -> None:
    schedule = interleaved(3, 3)
    found = cost(schedule, equal_times(schedule), message_bytes=(1,) * 5)
    sent = {(one.source, one.to): one.messages for one in found.boundaries}
    assert sent == {(0, 1): 6, (1, 0): 6, (1, 2): 6, (2, 1): 6, (2, 0): 3, (0, 2): 3}
    assert sum(one.num_bytes for one in found.boundaries) == 2 * 5 * 3


def test_a_stage_alone_sends_nothing_and_never_waits() -> None:
    schedule = interleaved(1, 4)
    found = cost(schedule, equal_times(schedule, send=100), message_bytes=(8,))
    assert (found.boundaries, found.bubble, found.time) == ((), 0.0, 12.0)


def test_numbers_that_do_not_fit_the_parts_are_refused() -> None:
    schedule = interleaved(2, 2)
    good = equal_times(schedule)
    with pytest.raises(
        UserError, match=r"send=\[1\]: interleaved of 2 stages needs 4 times, one for each part"
    ):
        cost(
            schedule, PartTimes(forward=good.forward, backward=good.backward, weights=good.weights, send=(1,))
        )
    with pytest.raises(UserError, match=r"forward=\[1, 1, -1, 1\].*all at least 0"):
        cost(
            schedule,
            PartTimes(forward=(1, 1, -1, 1), backward=good.backward, weights=good.weights, send=good.send),
        )
    with pytest.raises(UserError, match=r"message_bytes=\[1, 2\]: 4 parts have 3 borders"):
        cost(schedule, good, message_bytes=(1, 2))
