"""The promises of the parameter server on more than ten thousand simulated runs, and the speed of simulating."""

from __future__ import annotations

import time

import pytest

from manyhands.simulate import ComputeModel, SimulationSpec, simulate
from manyhands.simulate.experiments import learn_digits
from simulated import PROMISES, complaints, drawn

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

FIRST_SEED, SEEDS_PER_CASE = 1000, 650


def test_there_are_enough_of_them() -> None:
    assert 2 * len(PROMISES) * SEEDS_PER_CASE >= 10_000


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("consistency", PROMISES)
def test_every_promise_is_kept_whatever_goes_wrong(consistency: str, replicas: int) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS_PER_CASE):
        spec = drawn(seed, consistency, replicas)
        assert complaints(spec) == [], f"seed {seed}: {spec}"


@pytest.mark.parametrize("seed", range(3, 10))
def test_thirty_stale_learners_need_a_rate_that_follows_their_staleness(seed: int) -> None:
    """More seeds than `make test` has time for, and as many learners under `sync` as anywhere."""
    synchronous = learn_digits("sync", seed=seed).accuracy
    assert synchronous > 0.94
    assert learn_digits("softsync:30", seed=seed).accuracy < 0.3
    assert learn_digits("aware:softsync:30", seed=seed).accuracy >= synchronous - 0.02


@pytest.mark.parametrize("consistency", ["sync", "bounded:8", "async", "softsync:30"])
def test_a_thousand_workers_take_a_hundred_steps_within_a_minute_of_one_core(consistency: str) -> None:
    workers, rounds = 1000, 100
    steps = rounds if consistency == "sync" else workers * rounds
    spec = SimulationSpec(
        workers=workers, steps=steps, consistency=consistency, compute=ComputeModel(spread=0.3)
    )
    begun_s = time.process_time()
    run = simulate(spec)
    assert time.process_time() - begun_s < 60
    assert sum(times.num_computed for times in run.times.values()) == workers * rounds
