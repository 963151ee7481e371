"""Robust means beside their definitions: scipy and numpy, and Krum by trying every set of neighbours."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from manyhands.strategies.federated.algorithms import FederatedFacts, algorithm_named
from manyhands.strategies.federated.algorithms.averaging import krum_scores
from manyhands.strategies.federated.client_updates import TallySum


def found(rows: Tensor, missing: int = 0) -> TallySum:
    """Updates of two tensors: the parameters, and one buffer that must not decide."""
    updates = [[row[:4].view(2, 2), row[4:]] for row in rows]
    return TallySum(sums=[], weight=len(rows), updates=updates, missing=missing)


def mean_of(algorithm: str, rows: Tensor, missing: int = 0) -> Tensor:
    made = algorithm_named(algorithm)
    made.facts = FederatedFacts(parameters=1)
    return torch.cat([one.flatten() for one in made.mean(found(rows, missing))])


def drawn(count: int, seed: int) -> Tensor:
    return torch.randn(count, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_median_is_numpys(count: int) -> None:
    rows = drawn(count, count)
    np.testing.assert_allclose(mean_of("median", rows), np.median(rows.numpy(), axis=0), rtol=1e-15)


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 6), (0.1, 10), (0.2, 10), (0.3, 10), (0.4, 5)])
def test_the_trimmed_mean_is_scipys_where_nothing_is_rounded(fraction: float, count: int) -> None:
    rows = drawn(count, count)
    exact = stats.trim_mean(rows.numpy(), fraction + 1e-9, axis=0)
    np.testing.assert_allclose(mean_of(f"trimmed:{fraction:g}", rows), exact, rtol=1e-13)


def test_of_a_few_clients_at_least_one_is_left_out_at_either_end() -> None:
    rows = drawn(5, 0)
    np.testing.assert_allclose(mean_of("trimmed:0.1", rows), stats.trim_mean(rows.numpy(), 0.2, axis=0))


def brute_force(rows: list[list[float]], hostile: int) -> list[float]:
    """Blanchard et al.: the sum over the n - f - 2 closest, found as the least sum over all sets of that size."""
    size = len(rows) - hostile - 2
    scores = []
    for at, row in enumerate(rows):
        others = [
            sum((a - b) ** 2 for a, b in zip(row, other, strict=True))
            for number, other in enumerate(rows)
            if number != at
        ]
        scores.append(min(sum(some) for some in itertools.combinations(others, size)))
    return scores


@pytest.mark.parametrize(("count", "hostile"), [(3, 0), (5, 1), (7, 2), (9, 3), (9, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_krum_is_its_definition(count: int, hostile: int, seed: int) -> None:
    rows = drawn(count, 100 * count + seed)
    scores = brute_force(rows[:, :4].tolist(), hostile)
    np.testing.assert_allclose(krum_scores(rows[:, :4], hostile), scores, rtol=1e-12)
    best = int(np.argmin(scores))
    assert torch.equal(mean_of(f"krum:{hostile}", rows), rows[best])
    chosen = sorted(np.argsort(scores)[: count - hostile])
    torch.testing.assert_close(mean_of(f"multikrum:{hostile}", rows), rows[chosen].mean(0))


def test_a_buffer_far_away_does_not_decide_in_krum() -> None:
    rows = drawn(5, 3)
    best = int(np.argmin(brute_force(rows[:, :4].tolist(), 1)))
    rows[best, 4:] = 1e6
    assert torch.equal(mean_of("krum:1", rows), rows[best])


def test_who_sent_nothing_that_counts_was_one_of_the_hostile() -> None:
    rows = drawn(6, 4)
    torch.testing.assert_close(mean_of("multikrum:2", rows, missing=1), mean_of("multikrum:1", rows))
    torch.testing.assert_close(mean_of("multikrum:2", rows, missing=3), rows.mean(0))


def test_hostile_rows_are_not_chosen() -> None:
    honest, far = drawn(7, 5), drawn(2, 6) * 0.01 + 50  # two that stand close together
    both = torch.cat([far[:1], honest, far[1:]])
    for algorithm in ("krum:2", "multikrum:2", "median", "trimmed:0.25"):
        assert mean_of(algorithm, both).abs().max() < 3
    assert both.mean(0).abs().min() > 8
