"""The counters of a model server: percentiles as numpy has them, rates and curves of the last seconds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from manyhands.observe.analyse.serving_view import Answered, ServingTally, percentile


@pytest.mark.parametrize("count", [1, 2, 7, 100, 999])
def test_percentiles_are_numpys(count: int) -> None:
    numbers = sorted(np.random.default_rng(count).random(count).tolist())
    for percent in (50, 95, 99):
        expected = np.percentile(numbers, percent, method="inverted_cdf")
        assert percentile(numbers, percent) == expected
    assert math.isnan(percentile([], 50))


def test_rates_are_those_of_the_last_seconds() -> None:
    tally = ServingTally(100.0)
    for number in range(40):
        tally.answered(Answered(100 + number / 4, 0.001 * number, 200 if number % 4 else 503, 2))
    tally.batch(8)
    tally.batch(4)
    figures = tally.figures(110.0)
    assert figures["requests_per_s"] == pytest.approx(4.0)
    assert figures["inputs_per_s"] == pytest.approx(6.0)
    assert figures["batch_mean"] == 6
    assert figures["lately"] == ((200, 30), (503, 10))
    assert tally.figures(167.6)["lately"] == ((200, 7), (503, 2)), "those before 107.6 s are forgotten"
    assert figures["curve"] == tuple((float(second), 4.0) for second in range(10))
    assert figures["p50_ms"] == pytest.approx(sorted(number for number in range(40) if number % 4)[14])


def test_seconds_without_requests_are_forgotten_as_all_others() -> None:
    tally = ServingTally(0.0)
    for second in range(0, 7000, 7):
        tally.answered(Answered(second + 0.5, 0.001, 200, 1))
    assert len(tally._seconds) <= 300 // 7 + 2
    curve = tally.figures(6994.9)["curve"]
    assert isinstance(curve, tuple)
    assert len(curve) == 300
    assert sum(count for _, count in curve) == len(range(6699, 6994, 7))
