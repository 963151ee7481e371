"""Differential privacy, part by part: clipping, noise, the accountant and the budget, beside published numbers."""

from __future__ import annotations

import logging
import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from manyhands.errors import UserError
from manyhands.strategies.federated import privacy_noise, private_rounds
from manyhands.strategies.federated.privacy_noise import (
    FIRST_BOUND,
    LEAST_STEPS,
    ClipRule,
    RoundNoise,
    UniformDraws,
    add_gaussian,
    clipped,
    discrete_gaussian,
    next_bound,
    seeded_draws,
    system_draws,
)
from manyhands.strategies.federated.private_rounds import (
    RoundKind,
    Spending,
    epsilon_of,
    least_noise,
    most_rounds,
)

DRAWN = 100_000


def assert_variance(values: np.ndarray, variance: float) -> None:
    """A chi-square bound at one in a million on each side, and a mean within five of its own deviations."""
    count = len(values)
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], count - 1) / (count - 1)
    assert low < values.var(ddof=1) / variance < high
    assert abs(values.mean()) < 5 * math.sqrt(variance / count)


def test_an_update_is_shortened_to_its_bound_over_all_tensors_together() -> None:
    change = [torch.full((3, 4), 3.0), torch.full((4,), -2.0, dtype=torch.float64)]
    norm = math.sqrt(12 * 9 + 4 * 4)
    whole = torch.cat([one.double().flatten() for one in change])
    short, within = clipped(change, 1.5)
    assert not within
    assert float(short.norm()) == pytest.approx(1.5, rel=1e-14)
    torch.testing.assert_close(short, whole * (1.5 / norm))
    kept, within = clipped(change, norm + 1e-9)
    assert within
    assert torch.equal(kept, whole)
    for bad in (math.nan, math.inf):
        nought, within = clipped([torch.tensor([1.0, bad])], 1.0)
        assert not within
        assert nought.tolist() == [0.0, 0.0]


def sum_of(noise: RoundNoise, norms: np.ndarray) -> torch.Tensor:
    """Of vectors whose updates have these norms: by their two forms, which is quicker than one by one."""
    within = norms <= noise.bound
    assert noise.vector(*clipped([torch.tensor([norms[0]])], noise.bound))[-1] == (
        0.5 if within[0] else -0.5
    ) * float(noise.bit_scale)
    bits = noise.bit_scale * (within.sum() - 0.5 * len(norms))
    return torch.tensor([float(np.minimum(norms, noise.bound).sum()), float(bits)], dtype=torch.float64)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_an_adaptive_bound_converges_to_the_quantile_of_the_norms(quantile: float) -> None:
    """Of a log-normal distribution, from the noisy share of 100 updates a round."""
    rng, drawn = np.random.default_rng(3), seeded_draws(3)
    bound, seen = FIRST_BOUND, []
    for _ in range(400):
        noise = RoundNoise.of(0.5, 100, bound=bound, adapts=True)
        norms = rng.lognormal(0.7, 0.6, 100)
        total = sum_of(noise, norms)
        noise.add(total, drawn)
        bound = next_bound(bound, quantile, noise.share_within(float(total[-1]), 100))
        seen.append(bound)
    true = float(stats.lognorm(s=0.6, scale=math.exp(0.7)).ppf(quantile))
    assert math.exp(np.mean(np.log(seen[150:]))) == pytest.approx(true, rel=0.05)
    assert seen[0] < 0.2 * true, "it came from far away"


class Drawn:
    """In the place of the operating system, with bytes that are the same in every run of these tests."""

    urandom = staticmethod(random.Random(7).randbytes)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> UniformDraws:
    """The system's draws; where its bytes were new in every run, one in a million would fail a test."""
    monkeypatch.setattr(privacy_noise, "os", Drawn)
    return system_draws


def test_the_systems_words_are_multiples_of_two_to_the_minus_53(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.array([0, (1 << 11) - 1, 1 << 11, 1 << 63, (1 << 64) - 1], dtype=np.uint64)
    asked: list[int] = []
    monkeypatch.setattr(privacy_noise.os, "urandom", lambda count: asked.append(count) or words.tobytes())
    found = system_draws(5)
    assert found.tolist() == [2.0**-53, 2.0**-53, 2.0**-52, 0.5 + 2.0**-53, 1.0]
    assert asked == [40]


@pytest.mark.parametrize("kind", ["seeded", "system"])
def test_the_servers_noise_is_gaussian(kind: str, system: UniformDraws) -> None:
    drawn: UniformDraws = seeded_draws(1, 2) if kind == "seeded" else system
    sums = np.zeros(DRAWN + 1)
    add_gaussian(sums, 2.5, drawn)
    assert_variance(sums, 2.5**2)
    assert stats.kstest(sums / 2.5, "norm").pvalue > 1e-6
    assert np.abs(sums / (2.5 * 2.0**-24) - np.rint(sums / (2.5 * 2.0**-24))).max() < 1e-6, "on its grid"
    again = np.zeros(DRAWN + 1)
    add_gaussian(again, 2.5, drawn)
    assert not np.array_equal(again, sums)


@pytest.mark.parametrize("deviation", [1.0, 2.7, 400.0])
def test_the_clients_noise_is_the_discrete_gaussian(deviation: float, system: UniformDraws) -> None:
    values = discrete_gaussian(DRAWN, deviation, system)
    assert values.dtype == np.int64
    assert_variance(values.astype(float), deviation**2)  # which the discrete one has from about 1 on
    numbers = np.arange(-math.ceil(3 * deviation), math.ceil(3 * deviation) + 1)
    some = numbers[:: max(1, len(numbers) // 25)]
    whole = np.exp(-(np.arange(-20 * deviation, 20 * deviation + 1).round() ** 2) / (2 * deviation**2)).sum()
    chances = np.exp(-(some**2) / (2 * deviation**2)) / whole
    counted = np.array([(values == one).sum() for one in some])
    rest = np.append(counted, DRAWN - counted.sum()), np.append(chances, 1 - chances.sum()) * DRAWN
    assert stats.chisquare(*rest).pvalue > 1e-6


def test_the_sum_of_the_clients_noise_has_the_variance_of_the_servers(system: UniformDraws) -> None:
    """With all that the secure sum needs; and with more clients, more."""
    step, fewest = 1e-4, 7
    noise = RoundNoise.of(1.3, 10, bound=0.8, adapts=False)
    nothing = torch.zeros(DRAWN, dtype=torch.float64)
    shares = [noise.in_steps(nothing, step, fewest, system) for _ in range(10)]
    assert_variance(sum(shares[:fewest]) * step, (1.3 * 0.8) ** 2)
    assert_variance(sum(shares) * step, (1.3 * 0.8) ** 2 * 10 / 7)
    servers = nothing.clone()
    noise.add(servers, system)
    assert_variance(servers.numpy(), (1.3 * 0.8) ** 2)


def test_steps_make_no_vector_longer() -> None:
    noise = RoundNoise.of(1.0, 10, bound=1.0, adapts=False)
    vector, _ = clipped([torch.randn(1000, generator=torch.Generator().manual_seed(0))], 1.0)
    whole = noise.in_steps(vector, 1e-3, 7, None)
    assert np.linalg.norm(whole * 1e-3) <= 1.0
    assert np.abs(whole * 1e-3 - vector.numpy()).max() < 1e-3


def test_noise_is_shared_as_in_the_paper_on_adaptive_clipping() -> None:
    """z_u = (z⁻² - (2s)⁻²)^(-1/2); a vector's noise by its largest norm is z, whatever the bound."""
    share = RoundNoise.of(1.0, 100, bound=1.0, adapts=True)
    assert (share.bit, share.update) == (5.0, pytest.approx((1 - 0.1**2) ** -0.5, rel=1e-12))
    assert RoundNoise.of(2.0, 10, bound=1.0, adapts=True).bit == 2.0, (
        "or there would be none left for the update"
    )
    for noise, cohort, bound in ((1.0, 100, 0.3), (2.0, 10, 7.0), (0.4, 3, 1e-3)):
        made = RoundNoise.of(noise, cohort, bound=bound, adapts=True)
        longest = math.hypot(bound, 0.5 * made.bit_scale)
        assert made.deviation / longest == pytest.approx(noise, rel=1e-12)


def test_a_sum_of_discrete_gaussians_is_one_from_the_least_steps_on() -> None:
    """τ = 10 Σₖ exp(-2π² v k/(k+1)) of the paper on the distributed discrete Gaussian, for a thousand clients."""
    tau = 10 * sum(math.exp(-2 * math.pi**2 * LEAST_STEPS**2 * k / (k + 1)) for k in range(1, 1000))
    assert tau < 1e-270


def classic(kind: RoundKind, rounds: int, delta: float) -> float:
    """By the conversion that the tables below were made with (Mironov 2017, Proposition 3); ours is tighter."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(PoissonSampledDpEvent(kind.probability, GaussianDpEvent(kind.noise)), rounds)
    pairs = zip(accountant.orders, accountant.rdp, strict=True)
    return float(min(cost - math.log(delta) / (order - 1) for order, cost in pairs))


@pytest.mark.parametrize(
    ("noise", "probability", "rounds", "published"),
    [
        (4.0, 0.01, 10_000, 1.26),  # Abadi et al., "Deep Learning with Differential Privacy", Section 3
        (1.12, 256 / 60_000, 60 * 60_000 // 256, 2.92),  # TensorFlow Privacy's tutorial on MNIST
        (1.2, 256 / 60_000, 10 * 60_000 // 256, 1.20),
    ],
)
def test_epsilon_of_published_settings(
    noise: float, probability: float, rounds: int, published: float
) -> None:
    kind = RoundKind(noise=noise, probability=probability)
    assert classic(kind, rounds, 1e-5) == pytest.approx(published, abs=0.0051)
    assert epsilon_of({kind: rounds}, 1e-5) < published


def test_epsilon_is_that_of_other_accountants() -> None:
    """Opacus's tests have 7.32911 by the same bound at fewer orders, and 6.7774 exactly, which no bound goes below."""
    kind = RoundKind(noise=1.5, probability=0.04)
    found = epsilon_of({kind: 2250}, 1e-5)
    assert found == pytest.approx(7.32911117143, rel=1e-4)
    assert found > 6.7773957


def test_epsilon_without_sampling_is_at_least_the_exact_one_of_a_gaussian() -> None:
    """k rounds of noise z are one of z/√k, whose epsilon is known exactly (Balle and Wang 2018)."""
    from dp_accounting import get_epsilon_gaussian

    for noise, rounds in ((1.0, 1), (4.0, 50), (10.0, 3)):
        exact = get_epsilon_gaussian(noise / math.sqrt(rounds), 1e-6)
        assert (
            exact <= epsilon_of({RoundKind(noise=noise, probability=1.0): rounds}, 1e-6) < 1.15 * exact + 0.02
        )


def test_the_accountant_leaves_the_logging_of_the_process_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logger gives a process that has no handler one that prints all."""
    monkeypatch.setattr(logging.root, "handlers", [])
    private_rounds._one_round.cache_clear()
    assert epsilon_of({RoundKind(noise=0.62, probability=0.1): 3}, 1e-6) > 7
    assert logging.root.handlers == []


def test_kinds_of_rounds_add_up() -> None:
    one, other = RoundKind(noise=2.0, probability=1.0), RoundKind(noise=4.0, probability=1.0)
    assert epsilon_of({one: 3}, 1e-5) == pytest.approx(epsilon_of({other: 12}, 1e-5), rel=1e-12)
    assert epsilon_of({one: 2, other: 4}, 1e-5) == pytest.approx(epsilon_of({one: 3}, 1e-5), rel=1e-12)
    assert epsilon_of({one: 0}, 1e-5) == epsilon_of({}, 1e-5) == 0.0


@pytest.mark.parametrize(("noise", "probability"), [(1.0, 0.1), (0.6, 0.02), (5.0, 1.0)])
def test_a_budget_ends_at_the_last_round_that_it_allows(noise: float, probability: float) -> None:
    kind, budget = RoundKind(noise=noise, probability=probability), {"epsilon": 4.0, "delta": 1e-5}
    spending = Spending(kind, **budget)
    count = 0
    while spending.affords(()):
        spending.take(())
        count += 1
    assert count == spending.most_rounds == most_rounds(kind, 4.0, 1e-5) > 2
    assert epsilon_of({kind: count}, 1e-5) <= 4.0 < epsilon_of({kind: count + 1}, 1e-5)
    assert spending.epsilon_after(0) == epsilon_of({kind: count}, 1e-5)
    words = spending.why_over()
    assert (
        f"epsilon=4 at delta=1e-05 is spent: epsilon is {spending.epsilon_after(0):.4g} after {count} rounds"
        in words
    )


def test_noise_that_never_ends_a_budget_is_no_endless_search() -> None:
    assert 10**10 < most_rounds(RoundKind(noise=1e6, probability=1.0), 1.0, 1e-5) < 10**11
    assert most_rounds(RoundKind(noise=1e6, probability=1e-4), 1.0, 1e-5) > 10**11
    assert most_rounds(RoundKind(noise=0.1, probability=1.0), 1.0, 1e-5) == 0


@pytest.mark.parametrize(
    ("rounds", "probability", "epsilon", "delta"),
    [(100, 0.1, 8.0, 1e-5), (1000, 0.01, 2.0, 1e-6), (50, 1.0, 4.0, 1e-5)],
)
def test_the_noise_of_an_epsilon_is_that_of_the_accountants_own_calibration(
    rounds: int, probability: float, epsilon: float, delta: float
) -> None:
    """dp-accounting searches by itself, to a part in a thousand here; a step less noise would cost too much."""
    import dp_accounting

    def event(noise: float) -> dp_accounting.DpEvent:
        one = dp_accounting.GaussianDpEvent(noise)
        sampled = dp_accounting.PoissonSampledDpEvent(probability, one) if probability < 1 else one
        return dp_accounting.SelfComposedDpEvent(sampled, rounds)

    found = least_noise(rounds, probability, epsilon, delta)
    assert found is not None
    calibrated = dp_accounting.calibrate_dp_mechanism(
        dp_accounting.rdp.RdpAccountant, event, epsilon, delta, tol=1e-3 * found
    )
    assert found == pytest.approx(calibrated, rel=2e-3)
    less = found - 10 ** (math.floor(math.log10(found)) - 3)
    spent, more = (
        epsilon_of({RoundKind(noise=noise, probability=probability): rounds}, delta)
        for noise in (found, less)
    )
    assert 0.99 * epsilon < spent <= epsilon < more


def test_an_epsilon_that_no_noise_keeps_and_one_that_any_keeps() -> None:
    assert least_noise(10**9, 1.0, 1e-9, 1e-5) is None
    assert least_noise(1, 1.0, 1e12, 1e-5) == 1e-3


def test_a_client_is_counted_by_its_own_rounds() -> None:
    kind = RoundKind(noise=6.0, probability=1.0)
    spending = Spending(kind, epsilon=2.0, delta=1e-5, clients=4)
    most = spending.most_rounds
    assert most is not None
    for _ in range(most):
        spending.take([0, 2])
    assert not spending.affords([1, 2])
    assert spending.affords([1, 3])
    assert spending.rounds == most
    assert spending.epsilon_after(0) == epsilon_of({kind: most}, 1e-5)


def test_what_was_spent_is_spent_after_a_resume() -> None:
    kind, budget = RoundKind(noise=1.0, probability=0.1), {"epsilon": 4.0, "delta": 1e-5}
    whole, first = Spending(kind, **budget), Spending(kind, **budget)
    for spending in (whole, first):
        for _ in range(7):
            spending.take(())
    second = Spending(kind, **budget)
    second.restore(first.state())
    assert (second.rounds, second.epsilon_after(0), second.most_rounds) == (
        7,
        whole.epsilon_after(0),
        whole.most_rounds,
    )

    quieter = Spending(RoundKind(noise=2.0, probability=0.1), **budget)
    quieter.restore(first.state())
    assert quieter.epsilon_after(0) == whole.epsilon_after(0), "rounds with other noise cost what they cost"
    assert (quieter.noises, quieter.rounds) == ("noise=1", 7)
    fresh = Spending(RoundKind(noise=2.0, probability=0.1), **budget)
    assert quieter.most_rounds is not None
    assert fresh.most_rounds is not None
    assert quieter.most_rounds < fresh.most_rounds
    third = Spending(kind, **budget)
    third.restore(quieter.state())
    assert third.epsilon_after(0) == pytest.approx(whole.epsilon_after(0), rel=1e-12)
    quieter.take(())
    assert (quieter.noises, fresh.noises) == ("noise=1 and noise=2", "noise=2")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "adaptive:0", "adaptive:1", "adaptive:x", "much"])
def test_a_clip_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"clip={text}: "):
        ClipRule.parse(text)


def test_a_noisy_share_moves_a_bound_by_no_more_than_a_number_holds() -> None:
    assert next_bound(0.1, 0.5, 0.5) == 0.1
    assert next_bound(1.0, 0.5, 1e9) == pytest.approx(math.exp(-5))
    assert next_bound(1.0, 0.5, -1e9) == pytest.approx(math.exp(5))


def test_clips_are_read() -> None:
    assert ClipRule.parse("no") is None
    assert ClipRule.parse("1.5") == ClipRule(bound=1.5)
    assert ClipRule.parse("adaptive:0.8") == ClipRule(bound=FIRST_BOUND, quantile=0.8)
    assert ClipRule.parse("adaptive") == ClipRule(bound=FIRST_BOUND, quantile=0.5)
