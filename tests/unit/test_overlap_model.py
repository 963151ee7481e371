"""The model of a step beside its sums, by closed forms: what holds for every order, and what an order is worth."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LAYERS, FORWARD_S, BACKWARD_S, END_S = 16, 0.020, 0.040, 0.008


@pytest.fixture(scope="module")
def overlap() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    import overlap_model

    yield overlap_model
    sys.path.remove(str(BENCHMARKS))


def step_s(overlap: Any, cable_s: float, share: float = 0.0, **order: Any) -> float:
    model = overlap.Model(LAYERS, FORWARD_S, BACKWARD_S, cable_s, END_S, share)
    found: float = model.step_s(overlap.Order(**order))
    return found


@pytest.mark.parametrize("layers", [1, 4])
def test_without_bytes_a_step_is_computing(overlap: Any, layers: int) -> None:
    for released in (False, True):
        found = step_s(overlap, 0.0, layers=layers, released=released)
        assert found == pytest.approx(FORWARD_S + BACKWARD_S + END_S)


@pytest.mark.parametrize("layers", [1, 2, 4, 16])
@pytest.mark.parametrize("cable_s", [0.005, 0.03, 0.1, 0.5])
def test_by_arrival_a_step_is_as_pipes_of_two_stages_are(overlap: Any, layers: int, cable_s: float) -> None:
    """Equal jobs in two stages: the first stage's job, the longer of both for all others, the second's job."""
    buckets = LAYERS // layers
    first, second = BACKWARD_S / buckets, cable_s / buckets
    expected = FORWARD_S + first + max(first, second) * (buckets - 1) + second + END_S
    assert step_s(overlap, cable_s, layers=layers) == pytest.approx(expected)


@pytest.mark.parametrize("cable_s", [0.05, 0.1, 0.5])
def test_what_leaves_by_arrival_has_its_first_layers_last(overlap: Any, cable_s: float) -> None:
    waits = step_s(overlap, cable_s, layers=1)
    assert step_s(overlap, cable_s, layers=1, released=True) == pytest.approx(waits)


@pytest.mark.parametrize("cable_s", [0.005, 0.05, 0.068, 0.1, 0.5])
def test_by_need_a_step_comes_near_the_longer_of_both(overlap: Any, cable_s: float) -> None:
    bound = max(FORWARD_S + BACKWARD_S + END_S, cable_s)
    found = step_s(overlap, cable_s, layers=1, by_need=True, released=True)
    a_layer = (FORWARD_S + END_S + BACKWARD_S + cable_s) / LAYERS
    assert bound <= found + 1e-9
    assert found <= bound + 3 * a_layer


def test_the_cable_takes_its_share_of_the_core(overlap: Any) -> None:
    """With bytes for longer than a step computes, computing takes 1 / (1 - share) of its time while they travel."""
    found = step_s(overlap, 10.0, share=0.2, layers=1)
    first = BACKWARD_S / LAYERS
    assert found == pytest.approx(FORWARD_S + first + 10.0 + END_S)
    hidden = step_s(overlap, 0.016, share=0.5, layers=1)  # a millisecond of each backward layer's 2.5
    slowed = (LAYERS - 1) * 0.001 * 0.5
    assert hidden == pytest.approx(FORWARD_S + BACKWARD_S + slowed + 0.001 + END_S)


def test_messages_take_back_what_their_order_gains(overlap: Any) -> None:
    gains = step_s(overlap, 0.14, layers=1, by_need=True, released=True)
    taken = step_s(overlap, 0.14, layers=1, by_need=True, released=True, message_s=0.0027)
    assert gains < 0.92 * step_s(overlap, 0.14, layers=1) < taken
    assert taken == pytest.approx(gains + LAYERS * 0.0027, rel=0.02)
