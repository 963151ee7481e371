"""Scaling: Amdahl's fit in closed form and by numpy, the knee by hand, and the simulator where it has to be exact."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.errors import ManyhandsError, UserError
from manyhands.foresight.simulate.simulated_spec import NetworkModel
from manyhands.lab.scaling.scaling_curve import (
    ScalingSettings,
    amdahl_speedup,
    find_knee,
    fit_amdahl,
    forecast_speedups,
    measure_scaling,
    require_counts,
    scaling_cells,
    scaling_curve,
    scaling_page,
    scaling_sentences,
)
from manyhands.strategy import Strategy
from manyhands.workloads.tasks import build

COUNTS = (1, 2, 4, 8, 16)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0])
def test_the_fit_finds_the_share_that_made_the_speeds(share: float) -> None:
    speeds = {n: amdahl_speedup(share, n) for n in COUNTS}
    assert fit_amdahl(speeds) == pytest.approx(share, abs=1e-12)
    curve = scaling_curve({n: [100 * speed] for n, speed in speeds.items()}, speeds, {}, 16)
    assert curve.limit == (pytest.approx(1 / share) if share else math.inf)
    assert [point.amdahl for point in curve.points] == pytest.approx(list(speeds.values()))


def test_amdahls_law_in_numbers_of_his_own() -> None:
    assert amdahl_speedup(0.05, 20) == pytest.approx(1 / (0.05 + 0.95 / 20))  # the usual example: 10.26 times
    assert amdahl_speedup(0.05, 20) == pytest.approx(10.26, abs=0.005)


def test_the_fit_of_noisy_speeds_is_numpys_least_squares() -> None:
    draw = np.random.default_rng(0)
    speeds = {n: amdahl_speedup(0.2, n) * draw.uniform(0.9, 1.1) for n in COUNTS[1:]}
    n, speed = np.array(list(speeds)), np.array(list(speeds.values()))
    (expected,) = np.linalg.lstsq((1 - 1 / n)[:, None], 1 / speed - 1 / n, rcond=None)[0]
    assert fit_amdahl(speeds) == pytest.approx(expected, rel=1e-12)


def test_speeds_beyond_any_law_stay_a_share() -> None:
    assert fit_amdahl({1: 1.0, 2: 2.5}) == 0.0
    assert fit_amdahl({1: 1.0, 2: 0.5}) == 1.0
    assert fit_amdahl({1: 1.0}) is None


@pytest.mark.parametrize(
    ("speeds", "knee"),
    [
        ({1: 1.0, 2: 2.0, 4: 4.0}, (4, False)),
        ({1: 1.0, 2: 1.9, 4: 2.4, 8: 2.5}, (2, True)),
        ({1: 1.0, 2: 1.4}, (1, True)),
        ({1: 1.0, 2: 1.5, 4: 2.25}, (4, False)),  # exactly half of what they would bring
        ({1: 1.0, 3: 2.0, 4: 2.1}, (3, True)),
    ],
)
def test_the_knee_is_where_more_workers_bring_less_than_half(
    speeds: dict[int, float], knee: tuple[int, bool]
) -> None:
    assert find_knee(speeds) == knee


def test_a_curve_has_medians_and_their_range() -> None:
    curve = scaling_curve({1: [90, 110, 100], 2: [150, 190, 170]}, {1: 1.0, 2: 2.0}, {2: 0.25}, 2)
    first, second = curve.points
    assert (first.speedup, second.speedup) == (1.0, 1.7)
    assert (second.low, second.samples_per_s, second.high) == (150, 170, 190)
    assert second.efficiency == 0.85
    assert scaling_cells(curve)[1] == ["2", "170", "150", "190", "1.70", "85 %", "1.70", "2.00", "25 %"]
    report = " ".join(scaling_sentences(curve))
    assert "There is no knee up to 2 workers" in report
    assert "18 % of a step does not get shorter" in report  # 2 / 1.7 - 1
    assert "would be at most 5.7 times as fast" in report
    assert "forecasts more for 2 workers: 2.00 times" in report
    assert "take turns" not in report
    page = scaling_page("<t>", curve, [report], "manyhands scaling", {"cores": "2"})
    assert "&lt;t&gt;" in page
    assert page.count("<polyline") + page.count('class="curve') >= 4


def test_workers_that_share_cores_are_no_part_of_the_fit() -> None:
    speeds = {1: 1.0, 2: amdahl_speedup(0.25, 2), 4: 0.8, 8: 0.5}
    curve = scaling_curve({n: [speed] for n, speed in speeds.items()}, speeds, {}, cores=2)
    assert curve.serial_share == pytest.approx(0.25)
    assert curve.limit == pytest.approx(4)
    assert curve.points[-1].amdahl == pytest.approx(amdahl_speedup(0.25, 8))
    report = " ".join(scaling_sentences(curve))
    assert "The knee is at 2 workers" in report
    assert "4 workers bring less than half" in report
    assert "This machine has 2 cores; more workers than that share them." in report


def test_on_one_core_amdahls_law_is_not_fitted() -> None:
    curve = scaling_curve({1: [100.0], 2: [90.0]}, {1: 1.0, 2: 1.0}, {}, cores=1)
    assert curve.serial_share is None
    assert curve.to_dict()["limit"] is None
    assert scaling_cells(curve)[1][6] == ""
    report = " ".join(scaling_sentences(curve))
    assert "1 worker is the fastest." in report
    assert (
        "Amdahl's law is not fitted: only one of these numbers of workers has a core each on 1 core."
        in report
    )
    assert "Amdahl's fit" not in scaling_page("t", curve, [], "c", {}).split("How this was made")[0]


def test_where_only_one_number_of_workers_has_a_core_each_it_is_said_on_how_many_cores() -> None:
    curve = scaling_curve({1: [100.0], 8: [150.0]}, {1: 1.0, 8: 2.0}, {}, cores=2)
    report = " ".join(scaling_sentences(curve))
    assert "not fitted: only one of these numbers of workers has a core each on 2 cores." in report


def test_a_fit_without_a_serial_part_has_no_limit() -> None:
    curve = scaling_curve({1: [100.0], 2: [210.0]}, {1: 1.0, 2: 2.0}, {}, cores=2)
    report = " ".join(scaling_sentences(curve))
    assert "all of a step gets shorter with more workers, so there is no limit" in report


def test_where_every_run_is_slower_nothing_gets_shorter() -> None:
    curve = scaling_curve({1: [100.0], 2: [60.0]}, {1: 1.0, 2: 1.0}, {}, cores=2)
    assert "nothing of a step gets shorter" in " ".join(scaling_sentences(curve))


def test_the_forecast_is_exact_where_nothing_lies_between_the_workers() -> None:
    settings = ScalingSettings(steps=1, cores=range(4), network=NetworkModel(latency_s=0.0))
    found = forecast_speedups(build("line"), Strategy.parse("mirrored"), (1, 2, 4, 8), 0.1, settings)
    assert found == pytest.approx({1: 1.0, 2: 2.0, 4: 4.0, 8: 4.0})  # eight share the four cores


def test_the_forecast_knows_that_messages_take_time() -> None:
    settings = ScalingSettings(steps=1, cores=range(8), network=NetworkModel(latency_s=0.01))
    found = forecast_speedups(build("line"), Strategy.parse("ps"), (1, 2, 8), 0.1, settings)
    # a step is 0.1 / n of computing, and a push and an answer of 0.01 s each
    expected = {n: 0.12 / (0.1 / n + 0.02) for n in (1, 2, 8)}
    assert found == pytest.approx(expected, rel=0.02)


def test_one_worker_is_always_among_them() -> None:
    assert require_counts([4, 2, 2], Strategy.parse("mirrored")) == [1, 2, 4]
    for counts, strategy, sentence in (
        ([1], "mirrored", "--workers 1 has nothing to compare"),
        ([0, 2], "mirrored", "--workers 0 must be at least 1"),
        ([2], "single", "strategy=single has at most 1 worker; use mirrored"),
        ([2], "federated", "counts rounds"),
    ):
        with pytest.raises(UserError, match=sentence):
            require_counts(counts, Strategy.parse(strategy))


def test_a_run_that_fails_ends_it_with_what_it_said(tmp_path: Path) -> None:
    import sys

    def launch(cores: object, words: object) -> list[str]:
        return [sys.executable, "-c", "print('manyhands: no room'); raise SystemExit(3)"]

    settings = ScalingSettings(steps=1, cores=(0,))
    with pytest.raises(ManyhandsError, match="the run with 1 worker ended with status 3: no room"):
        measure_scaling(
            ["train", "line"], Strategy.parse("mirrored"), [1, 2], tmp_path / "s", settings, launch
        )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--workers", "1,x"], "--workers 'x' is not an integer"),
        (["--steps", "0"], "steps=0 must be an integer of at least 1"),
        (["--latency", "5"], "--latency '5' is not a time"),
    ],
)
def test_what_makes_no_sense_gets_a_sentence(words: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["scaling", "digits", *words])
    assert isinstance(done.exception, UserError)
    assert sentence in str(done.exception)


@pytest.mark.parametrize("below", [".", "below"])
@pytest.mark.parametrize("words", [["scaling", "line", "--workers", "2"], ["compare", "sparse"]])
def test_a_file_in_the_place_of_the_directory_gets_a_sentence(
    words: list[str], below: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "file" / below)])
    assert isinstance(done.exception, UserError), done.exception
    assert "cannot be used: Not a directory" in str(done.exception)


@pytest.mark.parametrize("words", [["scaling", "line", "--workers", "2"], ["compare", "sparse"]])
def test_a_directory_that_holds_something_is_left_alone(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert isinstance(done.exception, UserError), done.exception
    assert "is not empty (it contains 'mine.txt'); choose another" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
