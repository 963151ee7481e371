"""The promises of the parameter server on ten thousand simulated runs, and the speed of simulating.

The seeds are others at every run of the soak, and printed; `MANYHANDS_SOAK_SEED=…` repeats those of an earlier one.
What fails goes into the list of `test_simulated_properties.py`, and stays there.
"""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path

import pytest

from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.simulated_spec import ComputeModel, SimulationSpec
from simulated_campaign import CHOSEN_BY_ARRIVAL, campaign, fresh_seed
from simulated_mutants import GUARDS, MUTANTS, runs_until_caught

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
learn_digits = runpy.run_path(str(BENCHMARKS / "consistency.py"))["learn_digits"]
RUNS = 10_000
FIRST_SEED = int(os.environ.get("MANYHANDS_SOAK_SEED", fresh_seed()))


def test_every_promise_is_kept_whatever_goes_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nMANYHANDS_SOAK_SEED={FIRST_SEED}", flush=True)
        done, broken = campaign(FIRST_SEED, RUNS, processes=os.cpu_count() or 1)
    assert [(str(case), found) for case, found in broken] == []
    assert sum(done.values()) == RUNS
    assert sum(done[consistency] for consistency in CHOSEN_BY_ARRIVAL) >= RUNS // 3


def test_elastic_runs_and_federated_rounds_keep_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        done, broken = campaign(FIRST_SEED, RUNS, os.cpu_count() or 1, ("elastic", "rounds"))
    assert [(str(case), found) for case, found in broken] == []
    assert done == {"elastic": RUNS // 2, "rounds": RUNS // 2}


@pytest.mark.parametrize("name", [*MUTANTS, *GUARDS])
def test_a_broken_server_is_caught_within_a_thousand_runs(name: str) -> None:
    mutant = (MUTANTS | GUARDS)[name]
    count, found = runs_until_caught(mutant, FIRST_SEED, limit=1000)
    assert found, f"MANYHANDS_SOAK_SEED={FIRST_SEED}: not within {count} runs: {mutant.what}"


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
