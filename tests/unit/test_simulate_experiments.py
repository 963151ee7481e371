"""What the consistencies are for, shown in simulated time: stragglers, and rates that follow staleness."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.simulated_spec import ComputeModel, SimulationSpec

EXPERIMENTS = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "consistency.py"))
BOUNDS, LEARNERS, PASSING, PERMANENT = map(EXPERIMENTS.get, ("BOUNDS", "LEARNERS", "PASSING", "PERMANENT"))
learn_digits, straggler_table = EXPERIMENTS["learn_digits"], EXPERIMENTS["straggler_table"]
render_stragglers = EXPERIMENTS["render_stragglers"]


def test_a_permanent_straggler_drags_every_bound_to_its_speed_and_not_async() -> None:
    """Eight workers of which one takes 0.5 s a batch and the others 0.1 s: 8 batches each 0.5 s, or 7.2 each 0.1 s."""
    rows = {row.consistency: row for row in straggler_table(PERMANENT)}
    for bound in BOUNDS[:-1]:
        assert rows[bound].updates_per_s == pytest.approx(8 / 0.5, rel=0.02)
        assert rows[bound].waiting_share > 0.6
    assert rows["async"].updates_per_s == pytest.approx(7.2 / 0.1, rel=0.03)
    assert rows["async"].waiting_share < 0.01
    assert render_stragglers(list(rows.values())).count("\n") == len(BOUNDS)


def test_a_bound_hides_delays_that_pass() -> None:
    """Each computation 0.1 s, or 0.5 s one time in ten: 0.14 s on average, and that is all that async waits for."""
    rows = straggler_table(PASSING)
    rates = [row.updates_per_s for row in rows]
    assert rates == sorted(rates)
    assert [row.waiting_share for row in rows] == sorted((row.waiting_share for row in rows), reverse=True)
    by_name = {row.consistency: row.updates_per_s for row in rows}
    assert by_name["async"] == pytest.approx(8 / 0.14, rel=0.05)
    assert by_name["bounded:8"] >= 0.8 * by_name["async"]
    assert by_name["bounded:0"] < 0.6 * by_name["async"]


@pytest.mark.parametrize("splits", [1, 4, 30])
def test_staleness_centres_on_the_splitting_parameter(splits: int) -> None:
    spec = SimulationSpec(
        workers=30, steps=3000, consistency=f"softsync:{splits}", compute=ComputeModel(spread=0.2)
    )
    staleness = simulate(spec).staleness()
    total = staleness.total()
    mean = sum(tau * count for tau, count in staleness.items()) / total
    assert mean == pytest.approx(splits, rel=0.1)
    assert sum(count for tau, count in staleness.items() if tau > 2 * splits) <= 1e-3 * total


@pytest.mark.parametrize(
    ("seed", "epochs"), [(0, 20), *(pytest.param(seed, 20, marks=pytest.mark.soak) for seed in (1, 2))]
)
def test_thirty_stale_learners_need_a_rate_that_follows_their_staleness(seed: int, epochs: int) -> None:
    """The synchronous steps are those of one learner: `sync` splits each batch, and its parts add up to the same."""
    synchronous = learn_digits("sync", learners=1, seed=seed, epochs=epochs)
    fixed = learn_digits("softsync:30", seed=seed, epochs=epochs)
    aware = learn_digits("aware:softsync:30", seed=seed, epochs=epochs)
    assert synchronous.accuracy > 0.94
    assert fixed.accuracy < 0.3, "ten digits: guessing gets 0.1"
    assert aware.accuracy >= synchronous.accuracy - 0.02
    for row in (fixed, aware):
        mean = sum(tau * count for tau, count in row.staleness.items()) / row.staleness.total()
        assert mean == pytest.approx(LEARNERS, rel=0.1)
