"""Batch k holds the same samples for everyone: shares partition it, epochs partition the data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.batches import MAX_SEED, BatchPlan, permutation, split
from manyhands.errors import UserError

SIZES = st.integers(1, 60)
unhurried = settings(deadline=None, max_examples=60)


@unhurried
@given(
    num_samples=SIZES, batch_size=st.integers(1, 80), seed=st.integers(0, MAX_SEED), epoch=st.integers(0, 5)
)
def test_an_epoch_visits_each_sample_exactly_once(
    num_samples: int, batch_size: int, seed: int, epoch: int
) -> None:
    plan = BatchPlan(num_samples, batch_size, seed)
    first = epoch * plan.batches_per_epoch
    batches = [plan.indices(first + k) for k in range(plan.batches_per_epoch)]
    assert sorted(np.concatenate(batches).tolist()) == list(range(num_samples))
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert len(batches[-1]) == num_samples - batch_size * (len(batches) - 1)
    assert [plan.size(first + k) for k in range(len(batches))] == [len(batch) for batch in batches]
    assert {plan.epoch(first + k) for k in range(len(batches))} == {epoch}


@unhurried
@given(num_samples=SIZES, batch_size=st.integers(1, 80), step=st.integers(0, 200), workers=st.integers(1, 70))
def test_shares_are_the_batch_cut_in_order(
    num_samples: int, batch_size: int, step: int, workers: int
) -> None:
    plan = BatchPlan(num_samples, batch_size, seed=3)
    batch = plan.indices(step)
    shares = [plan.share(step, rank, workers) for rank in range(workers)]
    for share, expected in zip(shares, np.array_split(batch, workers), strict=True):
        np.testing.assert_array_equal(share, expected)


@unhurried
@given(count=st.integers(0, 500), workers=st.integers(1, 40))
def test_split_is_contiguous_even_and_complete(count: int, workers: int) -> None:
    parts = [split(count, rank, workers) for rank in range(workers)]
    assert [index for part in parts for index in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_fewer_samples_than_workers_leaves_the_last_shares_empty() -> None:
    plan = BatchPlan(num_samples=3, batch_size=8, seed=0)
    assert [len(plan.share(0, rank, 5)) for rank in range(5)] == [1, 1, 1, 0, 0]


def test_steps_may_be_asked_in_any_order_and_by_any_plan() -> None:
    plan = BatchPlan(50, 7, seed=11)
    forward = [plan.indices(step).copy() for step in range(30)]
    for step in reversed(range(30)):
        np.testing.assert_array_equal(plan.indices(step), forward[step])
        np.testing.assert_array_equal(BatchPlan(50, 7, seed=11).indices(step), forward[step])


def test_the_order_does_not_depend_on_the_batch_size() -> None:
    small, large = BatchPlan(40, 5, seed=2), BatchPlan(40, 20, seed=2)
    for k in range(8):
        pieces = [small.indices(4 * k + part) for part in range(4)]
        np.testing.assert_array_equal(np.concatenate(pieces), large.indices(k))


def test_the_order_is_the_documented_one_for_ever() -> None:
    """These orders are part of what a checkpoint means: a change here breaks every resumed run."""
    assert permutation(8, seed=0, epoch=0).tolist() == [1, 4, 5, 6, 2, 0, 3, 7]
    assert permutation(8, seed=0, epoch=1).tolist() == [7, 6, 2, 3, 1, 0, 4, 5]
    assert permutation(8, seed=MAX_SEED, epoch=0).tolist() == [7, 6, 4, 0, 3, 5, 2, 1]


def test_seeds_and_epochs_do_not_meet() -> None:
    """A seed beyond 32 bits must not spill into the epoch: (5 + 2**32, 0) is not (5, 1)."""
    seeds = (0, 1, 5, 5 + 2**32, 2**32, 2**63)
    orders = {tuple(permutation(30, seed, epoch)) for seed in seeds for epoch in range(4)}
    assert len(orders) == len(seeds) * 4


def test_every_place_is_equally_likely() -> None:
    """Chi-square over 2,000 epochs: where sample 0 lands, against the uniform distribution."""
    places = np.zeros(10)
    for epoch in range(2000):
        places[np.flatnonzero(permutation(10, seed=1, epoch=epoch) == 0)] += 1
    chi_square = float(((places - 200) ** 2 / 200).sum())
    assert chi_square < 27.9  # the 99.9 % point for 9 degrees of freedom


def test_batches_can_not_be_written_into_the_cached_order() -> None:
    with pytest.raises(ValueError, match="read-only"):
        BatchPlan(10, 4, seed=0).indices(0)[0] = 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 0), "num_samples is 0; it must be at least 1"),
        ((4, 0, 0), "batch_size is 0; it must be at least 1"),
        ((4, 4, -1), "seed is -1; it must be in 0"),
        ((4, 4, 2**64), "seed is 18446744073709551616"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        BatchPlan(*arguments)


@pytest.mark.parametrize(("rank", "workers"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_group_is_refused(rank: int, workers: int) -> None:
    with pytest.raises(UserError, match="worker"):
        BatchPlan(10, 4, seed=0).share(0, rank, workers)


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(UserError, match="step is -1"):
        BatchPlan(10, 4, seed=0).indices(-1)
