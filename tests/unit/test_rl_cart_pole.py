"""The compiled CartPole: each cart by itself, whatever others run beside it. Beside gymnasium's: test_rl_gymnasium."""

from __future__ import annotations

import numpy as np

from manyhands.workloads.rl.cart_pole import CartPoles


def test_a_cart_moves_as_it_would_alone() -> None:
    actions = np.random.default_rng(3).integers(0, 2, (1000, 8))
    together = CartPoles(8)
    apart = [CartPoles(3), CartPoles(5)]
    first = together.reset(range(8))
    begun = [apart[0].reset(range(3)), apart[1].reset(range(3, 8))]
    np.testing.assert_array_equal(first, np.concatenate(begun))
    ended = 0
    for row in actions:
        whole = together.step(row)
        parts = [apart[0].step(row[:3]), apart[1].step(row[3:])]
        for field in ("observations", "rewards", "terminated", "truncated", "valid"):
            np.testing.assert_array_equal(
                getattr(whole, field), np.concatenate([getattr(part, field) for part in parts])
            )
        ended += len(whole.episodes)
        assert [one[1:] for one in whole.episodes] == [one[1:] for part in parts for one in part.episodes]
    assert ended > 8 * 2 * 16  # starts were drawn anew, and again


def test_a_limit_truncates_and_shows_the_last_observation() -> None:
    carts = CartPoles(2, max_episode_steps=4)
    carts.reset([0, 1])
    for _ in range(3):
        before = carts.step(np.array([0, 1]))
    last = carts.step(np.array([1, 0]))
    assert last.truncated.all()
    assert not last.terminated.any()
    assert sorted(last.finals) == [0, 1]
    for index, final in last.finals.items():
        # a cart moves by its speed before, 0.02 s long; where the next one starts is somewhere else
        assert np.isclose(final[0], before.observations[index, 0] + 0.02 * before.observations[index, 1])
        assert not np.allclose(final, last.observations[index])
        assert (np.abs(last.observations[index]) <= 0.05).all()
