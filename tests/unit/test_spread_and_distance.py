"""The studies of consistency and of distance: their pure parts against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from manyhands.errors import UserError
from manyhands.facts import ComputeTime, LayerTimes, LinkRate, ModelFootprint, TaskProfile
from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.simulated_spec import ComputeModel, NetworkModel, SimulationSpec
from manyhands.lab.studies.consistency_study import (
    ConsistencyOptions,
    LiveCheck,
    SpreadTime,
    consistency_answer,
    slowdowns,
)
from manyhands.lab.studies.geo_model import GeoRow, link_seconds, plain_of
from manyhands.lab.studies.geo_study import GeoOptions, geo_answer
from manyhands.lab.studies.reached_target import LossCurve, common_target, crossing, mean_step_s
from manyhands.strategy import Strategy


def history(losses: list[float], step_s: float = 0.5) -> list[dict[str, float]]:
    return [{"step": n, "at_s": n * step_s, "loss": loss} for n, loss in enumerate(losses, 1)]


def test_a_curve_is_a_moving_mean_and_knows_when_it_was_low() -> None:
    losses = np.random.default_rng(0).uniform(size=80) + np.linspace(3, 0, 80)
    curve = LossCurve.of([*history(losses.tolist()), {"step": 80, "at_s": 40.0, "metrics": {}}])
    assert curve.losses == pytest.approx(np.convolve(losses, np.full(8, 1 / 8), "valid"))
    first = next(n for n, loss in zip(curve.steps, curve.losses, strict=True) if loss <= 1.0)
    assert curve.reached(1.0) == (first, first * 0.5)
    assert curve.reached(-1.0) is None
    other = LossCurve.of(history([5.0] * 40))
    assert common_target([curve, other]) == pytest.approx(5.1)


def test_a_step_that_is_long_once_in_a_while_counts_for_all() -> None:
    """Every eighth step takes 9 s more, like an average of `local`: 2 s on average."""
    ends = np.cumsum([10.0 if n % 8 == 0 else 1.0 for n in range(1, 125)])
    rows = [{"at_s": float(at), "loss": 0.0} for at in ends]
    assert mean_step_s(rows) == pytest.approx(17 / 8, rel=0.05)
    assert mean_step_s(rows[:6]) is None


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ([1, 2, 3], [2, 2.5, 2.5], 1.5),
        ([1, 2, 3], [4, 4, 4], None),
        ([3, 3, 3], [1, 1, 1], 0),
        ([1, 2, None], [3, 3, 3], 2),
        ([1, 2, 3], [None, None, 2], 2),
        ([1, 2, 3], [None, None, None], None),
        ([None, 2, 3], [None, 1, 1], 1),
    ],
)
def test_where_one_curve_rises_above_another(
    one: list[float | None], other: list[float | None], where: float | None
) -> None:
    assert crossing([0, 1, 2], one, other) == where


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_sync_goes_at_the_pace_of_the_slowest_and_async_at_the_sum_of_all(spread: float) -> None:
    """Four workers of 0.1 s a batch: 4 / (0.1 (1 + x)) batches a second in step, and else the sum of 1 / (0.1 f)."""
    factors = [1 + spread * one / 3 for one in range(4)]
    rates = {}
    for consistency in ("sync", "async"):
        run = simulate(
            SimulationSpec(
                workers=4,
                steps=400,
                consistency=consistency,
                compute=ComputeModel(step_s=0.1, slow=slowdowns(4, spread, "lasting")),
                network=NetworkModel(latency_s=0.0),
            )
        )
        rates[consistency] = run.num_batches / (run.seconds - run.began_s)
    assert rates["sync"] == pytest.approx(40 / (1 + spread), rel=0.01)
    assert rates["async"] == pytest.approx(sum(10 / one for one in factors), rel=0.02)


def test_delays_that_pass_strike_all_workers_alike() -> None:
    assert slowdowns(3, 0.0, "passing") == ()
    assert [(one.worker, one.factor, one.probability) for one in slowdowns(2, 2.0, "passing")] == [
        (0, 3.0, 0.25),
        (1, 3.0, 0.25),
    ]


def test_the_crossover_of_consistencies_is_said() -> None:
    options = ConsistencyOptions(spreads="0,2")
    seconds = {"sync": (1.0, 3.0), "bounded": (2.0, 4.0), "async": (2.0, 2.0), "aware": (None, None)}
    times = [
        SpreadTime(
            spread=spread,
            consistency=name,
            steps=None if of[at] is None else 100,
            seconds=of[at],
            batches_per_s=10.0,
            staleness=0.0,
        )
        for name, of in seconds.items()
        for at, spread in enumerate((0.0, 2.0))
    ]
    check = LiveCheck(spread=2.0, seen=[1.8, 2.0, 2.2], simulated=1.9)
    found = consistency_answer(options, times, 0.5, 0.01, check)
    said = " ".join(found.sentences)
    assert found.figures["crossovers"] == {"bounded": None, "async": 1.0, "aware": None}
    assert (
        "From a spread of about 1 on, async is sooner at the target than sync: the slowest worker then"
        in said
    )
    assert "Up to a spread of 2, aware:async is nowhere sooner" in said
    assert (
        "async did 2.00 times the batches of sync (from 1.80 to 2.20); the simulator says 1.90 (-5 %)" in said
    )
    assert found.tables[0].rows[-1][:4] == ("2", "aware:async", "–", "–")


def profile(num_bytes: int = 4 * 10**6) -> TaskProfile:
    """Nothing computes, so nothing of the exchange can hide."""
    layer = LayerTimes(name="all", forward=ComputeTime(), backward=ComputeTime(), gradient_bytes=num_bytes)
    size = ModelFootprint(parameters=num_bytes, gradients=num_bytes, state=2 * num_bytes, batch_size=64)
    return TaskProfile(layers=(layer,), model=size)


LINK = LinkRate(latency_s=0.04, bytes_per_s=12.5e6)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_ring_has_two_rounds_for_each_other_worker(workers: int) -> None:
    """2 (n - 1) (latency + W / (n B)) for a gradient of 4 MB in one bucket."""
    expected = 2 * (workers - 1) * (0.04 + 4e6 / workers / 12.5e6)
    ring = Strategy.parse("allreduce algorithm=ring buckets=64MiB")
    assert link_seconds(ring, profile(), workers, LINK) == pytest.approx(expected)
    # A codec that halves the bytes halves their time, and no latency.
    coded = Strategy.parse("allreduce algorithm=ring link=tcp buckets=64MiB codec=bf16")
    half = 2 * (workers - 1) * (0.04 + 2e6 / workers / 12.5e6)
    assert link_seconds(coded, profile(), workers, LINK, ratio=0.5) == pytest.approx(half)
    # An average every 8 steps carries parameters and twice as much of an optimizer's state.
    local = Strategy.parse("local steps=8 link=tcp")
    averaged = 2 * (workers - 1) * (0.04 + 12e6 / workers / 12.5e6) / 8
    assert link_seconds(local, profile(), workers, LINK) == pytest.approx(averaged)


def test_a_strategy_without_its_codec() -> None:
    text = "allreduce link=tcp codec=topk:0.01+int8"
    assert str(plain_of(Strategy.parse(text))) == "allreduce link=tcp"
    assert plain_of(Strategy.parse("local steps=4")) == Strategy.parse("local steps=4")
    with pytest.raises(UserError, match="no cost model predicts its steps over a link; leave it out"):
        link_seconds(Strategy.parse("local gossip=yes"), profile(), 2, LINK)


def test_what_was_measured_and_what_was_modelled_is_told() -> None:
    rows = [
        GeoRow(
            strategy="allreduce link=tcp",
            here_s=0.02,
            link_s=0.08,
            step_bytes=1000,
            steps=50,
            shaped_s=0.05,
            shaped_predicted_s=0.04,
        ),
        GeoRow(strategy="local link=tcp", here_s=0.02, link_s=0.005, step_bytes=400, steps=100),
        GeoRow(strategy="local link=tcp steps=99", here_s=0.02, link_s=0.0, step_bytes=4, steps=None),
    ]
    curves = {row.strategy: LossCurve.of(history([3.0, 2.0, 1.0, 0.5])) for row in rows}
    found = geo_answer(GeoOptions(), rows, curves, 1.0, "")
    said = " ".join(found.sentences)
    assert (
        "local link=tcp is at a loss of 1 first, after 2.5 s; local link=tcp sends the least for it" in said
    )
    assert "allreduce link=tcp takes 2.0 times as long: 80 % of its step waits for the link" in said
    assert "20 % longer or shorter than modelled on average" in said
    assert found.figures["rows"][0]["seconds"] == pytest.approx(5.0)
    assert found.tables[0].rows[2][4] == "–"
    assert "never" in found.charts[1].picture
    unchecked = geo_answer(GeoOptions(), rows[1:], curves, 1.0, "no root")
    assert "No run on a shaped link checked the model: no root." in unchecked.sentences
    assert len(unchecked.tables) == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategies": "ps consistency=async"}, "its workers do not share a batch"),
        ({"strategies": " ; "}, "--strategies"),
        ({"strategies": "allreduse"}, "allreduse"),
        ({"bandwidth": "0Mbit"}, "--bandwidth"),
        ({"latency": "soon"}, "--latency: 'soon' is not a time"),
        ({"check_steps": 5}, "--check-steps 5 is too few"),
    ],
)
def test_a_study_of_distance_names_what_is_wrong(options: dict[str, object], named: str) -> None:
    with pytest.raises(UserError) as error:
        GeoOptions(**options)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"spreads": "-1"}, "--spreads '-1' is not a number of at least 0; write several as 0,0.5,2"),
        ({"delays": "some"}, "delays is 'some'"),
        ({"steps": 3}, "steps is 3"),
        ({"target": math.nan}, "target"),
    ],
)
def test_a_study_of_consistency_names_what_is_wrong(options: dict[str, object], named: str) -> None:
    with pytest.raises(UserError) as error:
        ConsistencyOptions(**options)
    assert named in str(error.value)
