"""The model of a layered step against its closed forms; bursts of pushes, and how staggering shortens queues."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import UserError
from manyhands.strategies.allreduce.priority.overlap_model import (
    ORDERS,
    LayeredStep,
    gain_bound,
    step_seconds,
)
from manyhands.strategies.ps.client_core import round_of_shards

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
push_at_once = runpy.run_path(str(BENCHMARKS / "push_bursts.py"))["push_at_once"]
SECONDS = st.floats(0.01, 1.0)


def many_layers(exchange_s: float, layers: int = 200) -> LayeredStep:
    """A forward of 1 s, a backward of 2 s, an exchange of `exchange_s`; so many layers that the first is nothing."""
    return LayeredStep(
        forward_s=[1 / layers] * layers,
        backward_s=[2 / layers] * layers,
        num_bytes=[1000] * layers,
        bytes_per_s=1000 * layers / exchange_s,
        credit_bytes=1000,
    )


@pytest.mark.parametrize("exchange_s", [0.2, 1.0, 2.0, 2.5, 3.0, 4.0, 9.0])
def test_with_many_layers_steps_take_what_the_formulas_say(exchange_s: float) -> None:
    step = many_layers(exchange_s)
    assert step.exchange_s == pytest.approx(exchange_s)
    expected = {
        "after": 1 + 2 + exchange_s,
        "overlapped": 1 + max(2, exchange_s),
        "priority": max(3, exchange_s),
    }
    for order in ORDERS:
        assert step_seconds(step, order) == pytest.approx(expected[order], rel=0.02)


def test_the_gain_reaches_its_bound_where_the_exchange_takes_as_long_as_computing() -> None:
    gains = {
        exchange_s: step_seconds(step, "overlapped") / step_seconds(step, "priority")
        for exchange_s in (0.5, 2.0, 3.0, 6.0)
        for step in [many_layers(exchange_s)]
    }
    assert gain_bound(many_layers(1.0)) == pytest.approx(4 / 3)
    assert gains[3.0] == pytest.approx(4 / 3, rel=0.01)
    assert max(gains, key=gains.__getitem__) == 3.0
    assert gains[0.5] == pytest.approx(1.0, rel=0.01)


@given(
    st.lists(st.tuples(SECONDS, SECONDS, st.integers(1, 5000)), min_size=1, max_size=8),
    st.integers(100, 20_000),
    st.integers(50, 6000),
    st.floats(0, 0.05),
)
def test_priority_gains_at_most_the_bound_and_every_order_costs_at_least_its_work(
    layers: list[tuple[float, float, int]], rate: int, slice_bytes: int, message_s: float
) -> None:
    forward_s, backward_s, num_bytes = zip(*layers, strict=True)
    step = LayeredStep(
        forward_s=forward_s,
        backward_s=backward_s,
        num_bytes=num_bytes,
        bytes_per_s=rate,
        slice_bytes=slice_bytes,
        credit_bytes=slice_bytes,
        message_s=message_s,
    )
    took = {order: step_seconds(step, order) for order in ORDERS}
    computing = sum(forward_s) + sum(backward_s)
    assert took["after"] == pytest.approx(computing + step.exchange_s)
    assert took["priority"] >= max(computing, step.exchange_s) * (1 - 1e-9)
    assert took["overlapped"] <= took["after"] * (1 + 1e-9)
    assert took["overlapped"] / took["priority"] <= gain_bound(step) * (1 + 1e-9)


def test_what_is_no_step_is_refused() -> None:
    with pytest.raises(UserError, match="one entry for each layer"):
        LayeredStep(forward_s=[1.0], backward_s=[1.0, 1.0], num_bytes=[1], bytes_per_s=1.0)
    with pytest.raises(UserError, match="order=fifo"):
        step_seconds(many_layers(1.0, layers=2), "fifo")


@given(st.integers(0, 50), st.integers(1, 20))
def test_a_round_has_every_shard_once(slot: int, shards: int) -> None:
    assert sorted(round_of_shards(slot, shards)) == list(range(shards))
    assert round_of_shards(slot, shards)[0] == slot % shards


def in_order(_worker: int, shards: int) -> range:
    return range(shards)


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_staggered_bursts_queue_less_and_end_sooner(workers: int, shards: int) -> None:
    met, staggered = push_at_once(workers, shards, in_order), push_at_once(workers, shards, round_of_shards)
    assert met.longest_queue == workers
    assert met.messages == workers + shards - 1
    assert staggered.messages == max(workers, shards), (
        "no server's wire is ever idle while one is still to come"
    )
    assert staggered.longest_queue <= -(-workers // shards) * (1 if workers <= shards else shards)
    assert staggered.longest_queue < met.longest_queue
