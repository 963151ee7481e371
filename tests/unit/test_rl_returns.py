"""Returns against closed forms: fixed points of small chains, sums written out, and an episode by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from manyhands.workloads.rl.returns import (
    _summed_backwards,
    _summed_by_doubling,
    gae,
    n_step,
    transitions,
    v_trace,
)
from manyhands.workloads.rl.rollouts import Rollouts, RolloutSpec

GAMMA = 0.9


def batch(*, rows: int = 7, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    discounts = GAMMA * (torch.rand((3, rows), generator=generator) > 0.2).double()
    return {
        "discounts": discounts, "rewards": normal(3, rows), "values": normal(3, rows), "bootstrap": normal(3),
    }  # fmt: skip


def close(found: Tensor, expected: Tensor | list, error: float = 1e-12) -> None:
    torch.testing.assert_close(
        found, torch.as_tensor(expected, dtype=found.dtype), rtol=0, atol=error, check_stride=False
    )


# ------------------------------------------------------------------------------------------------ identities


def test_v_trace_of_the_acting_policy_gives_n_step_returns() -> None:
    given = batch()
    found = v_trace(torch.zeros(3, 7, dtype=torch.float64), **given)
    returns = n_step(given["rewards"], given["discounts"], given["bootstrap"])
    close(found.targets, returns)
    close(found.advantages, returns - given["values"])


def test_v_trace_is_the_sum_of_the_paper() -> None:
    given = batch(seed=1)
    log_ratios = torch.randn((3, 7), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = v_trace(log_ratios, **given, rho=1.5, c=1.2, rho_policy=0.9, trace=0.8)
    discounts, rewards, values, bootstrap = (one.tolist() for one in given.values())
    for b in range(3):
        ratios = [math.exp(one) for one in log_ratios[b].tolist()]
        after = [*values[b][1:], bootstrap[b]]
        targets = []
        for s in range(7):
            total, product = values[b][s], 1.0
            for t in range(s, 7):
                delta = rewards[b][t] + discounts[b][t] * after[t] - values[b][t]
                total += product * min(1.5, ratios[t]) * delta
                product *= discounts[b][t] * 0.8 * min(1.2, ratios[t])
            targets.append(total)
        close(found.targets[b], targets)
        of_next = [*targets[1:], bootstrap[b]]
        close(
            found.advantages[b],
            [
                min(0.9, ratios[s]) * (rewards[b][s] + discounts[b][s] * of_next[s] - values[b][s])
                for s in range(7)
            ],
        )


def test_gae_of_trace_1_is_the_return_less_the_value() -> None:
    given = batch(seed=3)
    returns = n_step(given["rewards"], given["discounts"], given["bootstrap"])
    close(gae(traces=1.0, **given), returns - given["values"])


def test_gae_of_trace_0_is_the_temporal_difference() -> None:
    given = batch(seed=4)
    after = torch.cat([given["values"][:, 1:], given["bootstrap"][:, None]], 1)
    close(gae(traces=0.0, **given), given["rewards"] + given["discounts"] * after - given["values"])


@pytest.mark.parametrize("trace", [0.3, 0.95])
def test_gae_averages_the_returns_of_every_length(trace: float) -> None:
    """(1 − λ) Σ λ^(n−1) (n-step return − V), the last of which has all the weight that is left."""
    given = batch(rows=6, seed=5)
    found = gae(traces=trace, **given)
    close(found, gae(traces=torch.full((3, 6), trace, dtype=torch.float64), **given))
    for start in range(6):
        expected = torch.zeros(3, dtype=torch.float64)
        for n in range(1, 7 - start):
            rows = slice(start, start + n)
            worth = given["values"][:, start + n] if start + n < 6 else given["bootstrap"]
            returns = n_step(given["rewards"][:, rows], given["discounts"][:, rows], worth)[:, 0]
            weight = trace ** (n - 1) * (1 if start + n == 6 else 1 - trace)
            expected += weight * (returns - given["values"][:, start])
        close(found[:, start], expected)


def test_v_trace_with_a_trace_of_the_acting_policy_is_td_lambda() -> None:
    given = batch(seed=6)
    found = v_trace(torch.zeros(3, 7, dtype=torch.float64), **given, trace=0.7)
    close(found.targets, gae(traces=0.7, **given) + given["values"])


def test_what_is_given_stays_and_gets_no_gradient() -> None:
    given = batch(seed=7)
    before = {name: one.clone() for name, one in given.items()}
    watched = {name: one.requires_grad_() for name, one in given.items()}
    log_ratios = torch.zeros(3, 7, dtype=torch.float64, requires_grad=True)
    found = [*v_trace(log_ratios, **watched), gae(traces=0.5, **watched)]
    found.append(n_step(watched["rewards"], watched["discounts"], watched["bootstrap"]))
    assert not any(one.requires_grad for one in found)
    for name, one in watched.items():
        close(one.detach(), before[name], 0)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 20, 33])
def test_other_devices_sum_as_the_kernel_does(rows: int, precision: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    terms = torch.randn((4, rows), generator=generator, dtype=precision)
    factors = torch.rand((4, rows), generator=generator, dtype=precision)
    expected = torch.zeros((4, rows + 1), dtype=torch.float64)
    for row in range(rows - 1, -1, -1):
        expected[:, row] = terms[:, row] + factors[:, row] * expected[:, row + 1]
    error = 1e-5 if precision == torch.float32 else 1e-12
    close(_summed_by_doubling(terms, factors), expected[:, :rows], error)
    close(_summed_backwards(terms, factors), expected[:, :rows], error)


def test_sums_of_a_transposed_batch_are_the_same() -> None:
    """Whose memory is not in the order of its rows."""
    terms, factors = batch(seed=8)["rewards"], batch(seed=9)["rewards"]
    turned = _summed_backwards(terms.T.contiguous().T, factors.T.contiguous().T)
    close(turned, _summed_backwards(terms.clone(), factors), 0)


# ---------------------------------------------------------------------------------- fixed points of small chains


class Chain:
    """A Markov decision process small enough that all that can happen within n rows is written down."""

    def __init__(self, moves: list, rewards: list, acting: list, target: list) -> None:
        self.moves, self.rewards = (
            np.array(moves),
            np.array(rewards),
        )  # (state, action, next), (state, action)
        self.acting, self.target = np.array(acting), np.array(target)  # (state, action)

    def swept(self, values: np.ndarray, *, rows: int, **limits: float) -> np.ndarray:
        """The expected targets of `values`: over every way through the chain, each with its probability."""
        states, actions = self.acting.shape
        found = np.zeros(states)
        for start in range(states):
            ways = []
            for steps in itertools.product(itertools.product(range(actions), range(states)), repeat=rows):
                seen, probability = [start], 1.0
                for action, after in steps:
                    probability *= self.acting[seen[-1], action] * self.moves[seen[-1], action, after]
                    seen.append(after)
                if probability > 0:
                    ways.append((probability, seen, [action for action, _after in steps]))
            seen = np.array([way[1] for way in ways])
            chosen = np.array([way[2] for way in ways])
            at = seen[:, :-1], chosen
            targets = v_trace(
                torch.from_numpy(np.log(self.target[at] / self.acting[at])),
                torch.full(chosen.shape, GAMMA, dtype=torch.float64),
                torch.from_numpy(self.rewards[at]),
                torch.from_numpy(values[seen[:, :-1]]),
                torch.from_numpy(values[seen[:, -1]]),
                **limits,
            ).targets
            found[start] = np.array([way[0] for way in ways]) @ targets[:, 0].numpy()
        return found

    def fixed_point(self, **how: float) -> np.ndarray:
        values = np.zeros(len(self.acting))
        for _sweep in range(600):
            before, values = values, self.swept(values, **how)
            if np.abs(values - before).max() < 1e-13:
                break
        return values

    def true_values(self, rho: float) -> np.ndarray:
        """Of the policy that V-trace judges: min(ρ̄ μ, π), normalised (theorem 1 of the paper)."""
        policy = np.minimum(rho * self.acting, self.target)
        policy /= policy.sum(1, keepdims=True)
        moves = np.einsum("sa,san->sn", policy, self.moves)
        return np.linalg.solve(np.eye(len(moves)) - GAMMA * moves, (policy * self.rewards).sum(1))


ONE = Chain(moves=[[[1.0], [1.0]]], rewards=[[1.0, 0.0]], acting=[[0.5, 0.5]], target=[[0.9, 0.1]])
TWO = Chain(
    moves=[[[0.8, 0.2], [0.1, 0.9]], [[0.5, 0.5], [0.9, 0.1]]],
    rewards=[[1.0, 0.0], [-1.0, 2.0]],
    acting=[[0.5, 0.5], [0.7, 0.3]],
    target=[[0.9, 0.1], [0.2, 0.8]],
)


@pytest.mark.parametrize(("rho", "expected"), [(1.0, 25 / 3), (1.5, 150 / 17), (1.8, 9.0), (50.0, 9.0)])
def test_the_fixed_point_of_one_state(rho: float, expected: float) -> None:
    np.testing.assert_allclose(ONE.fixed_point(rows=2, rho=rho), [expected], rtol=1e-12)


@pytest.mark.parametrize(("rows", "c"), [(1, 1.0), (3, 1.0), (3, 0.5)])
@pytest.mark.parametrize(
    ("rho", "expected"),
    [(1.0, (8.242943, 8.211227)), (2.0, (9.800094, 10.129351)), (9.0, (10.123959, 10.586494))],
)
def test_the_fixed_point_of_two_states_depends_on_rho_alone(
    rho: float, expected: tuple[float, float], rows: int, c: float
) -> None:
    found = TWO.fixed_point(rows=rows, rho=rho, c=c)
    np.testing.assert_allclose(found, expected, atol=5e-7)
    np.testing.assert_allclose(found, TWO.true_values(rho), rtol=1e-11)


def test_each_sweep_contracts_as_the_paper_says() -> None:
    expected_rho = (TWO.acting * np.minimum(1, TWO.target / TWO.acting)).sum(1).min()
    most = 1 - (1 - GAMMA) * expected_rho
    truth, values = TWO.true_values(1.0), np.array([30.0, -20.0])
    for _sweep in range(20):
        swept = TWO.swept(values, rows=2)
        assert np.abs(swept - truth).max() <= most * np.abs(values - truth).max() + 1e-12
        values = swept


# ---------------------------------------------------------------------------------- the ends of episodes


def rollout(**rows: list) -> Rollouts:
    length = len(rows["rewards"])
    spec = RolloutSpec(
        length=length, observation_shape=(1,), observation_dtype=torch.float64, precision=torch.float64
    )
    empty = spec.empty(1)._replace(valid=torch.ones(1, length, dtype=torch.bool))
    given = {name: torch.tensor([row], dtype=getattr(empty, name).dtype) for name, row in rows.items()}
    return empty._replace(**given)


def test_a_time_limit_does_not_change_what_a_state_is_worth() -> None:
    """One state that always pays 1, cut every 5 steps: 10, where the end of an episode would give at most 4.1."""
    cut, value = [False] * 4 + [True], 0.0
    for _sweep in range(100):
        rewards, discounts = transitions(
            rollout(rewards=[1.0] * 5, truncated=cut, final_values=[0.0] * 4 + [value]), GAMMA
        )
        value = float(n_step(rewards, discounts, torch.tensor([value], dtype=torch.float64))[0, 0])
    assert value == pytest.approx(10, rel=1e-10)
    rewards, discounts = transitions(rollout(rewards=[1.0] * 5, terminated=cut), GAMMA)
    assert float(n_step(rewards, discounts, torch.tensor([10.0]).double())[0, 0]) == pytest.approx(4.0951)


def test_an_episode_by_hand_in_both_ways_of_beginning_anew() -> None:
    """Three rows of an episode that is truncated, two of one that is terminated, and one that goes on.

    In the first way the next observation already begins the next episode; in the second a row without a transition
    comes between, of which nothing may reach the others.
    """
    at_once = rollout(
        rewards=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        truncated=[False, False, True, False, False, False],
        terminated=[False, False, False, False, True, False],
        final_values=[0.0, 0.0, 7.0, 0.0, 0.0, 0.0],
    )
    row_between = rollout(
        rewards=[1.0, 2.0, 3.0, 99.0, 4.0, 5.0, -99.0, 6.0],
        truncated=[False, False, True, False, False, False, False, False],
        terminated=[False, False, False, False, False, True, False, False],
        valid=[True, True, True, False, True, True, False, True],
        final_values=[0.0, 0.0, 7.0, 55.0, 0.0, 0.0, 55.0, 0.0],
    )
    third = 3 + GAMMA * 7
    second = 2 + GAMMA * third
    expected = [1 + GAMMA * second, second, third, 4 + GAMMA * 5, 5.0, 6 + GAMMA * 8]
    worth = torch.tensor([8.0], dtype=torch.float64)
    values = torch.arange(1.0, 7.0, dtype=torch.float64)[None]
    with_gaps = torch.tensor([[1.0, 2.0, 3.0, -33.0, 4.0, 5.0, 44.0, 6.0]], dtype=torch.float64)
    kept = row_between.valid[0]
    close(n_step(*transitions(at_once, GAMMA), worth)[0], expected)
    close(n_step(*transitions(row_between, GAMMA), worth)[0, kept], expected)
    # of values, too: those of rows without a transition reach no other row
    (rewards, discounts), (rewards_2, discounts_2) = (
        transitions(one, GAMMA) for one in (at_once, row_between)
    )
    advantages = gae(rewards, discounts, 0.8, values, worth)
    close(gae(rewards_2, discounts_2, 0.8, with_gaps, worth)[0, kept], advantages[0])
    last = 6 + GAMMA * 8 - 6
    ended = 5.0 - 5
    fourth = 4 + GAMMA * 5 - 4 + GAMMA * 0.8 * ended
    cut = third - 3
    close(advantages[0, 2:], [cut, fourth, ended, last])
    for log_ratio in (-0.4, 0.3):
        found = v_trace(torch.full((1, 6), log_ratio).double(), discounts, rewards, values, worth)
        gaps = v_trace(torch.full((1, 8), log_ratio).double(), discounts_2, rewards_2, with_gaps, worth)
        close(gaps.targets[0, kept], found.targets[0])
        close(gaps.advantages[0, kept], found.advantages[0])


def test_an_end_that_is_both_is_terminated() -> None:
    both = rollout(rewards=[1.0], truncated=[True], terminated=[True], final_values=[50.0])
    rewards, discounts = transitions(both, GAMMA)
    assert (float(rewards), float(discounts)) == (1.0, 0.0)
