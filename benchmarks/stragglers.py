"""Stragglers, live and simulated side by side: `python benchmarks/stragglers.py`.

Four workers whose computation is a sleep, so that the figures are of the protocol and not of this machine's cores: one
is 5 times as slow for good, or every computation is 5 times as long one time in ten. The same model of compute times
runs in the simulator, through the same cores.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from consistency import BOUNDS
from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.simulated_spec import ComputeModel, SimulationSpec
from manyhands.lab.bench.harness import host_facts

WORKERS, ROUNDS = 4, {"permanent": 60, "passing": 150}
STEP_S, FACTOR, PROBABILITY = 0.02, 5.0, 0.1
RESULT = Path(__file__).parent / "results" / "stragglers.json"


def sleeping_task(*, passing: bool) -> mh.Task:
    """A model of one number whose loss takes a while."""

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        late = (
            passing and float(torch.rand(())) < PROBABILITY
        )  # seeded by the batch: the same delays everywhere
        time.sleep(STEP_S * (FACTOR if late else 1.0))
        return model(batch).square().mean()

    return mh.Task(
        model=lambda: torch.nn.Linear(1, 1),
        loss=loss,
        data=torch.ones(64, 1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        batch_size=8,
    )


def live(scenario: str, consistency: str) -> dict[str, float]:
    """One run of real processes."""
    slow = mh.Slowdown(worker=0, factor=FACTOR) if scenario == "permanent" else None
    batches = ROUNDS[scenario] * (1 if consistency == "bounded:0" else WORKERS)  # sync splits each batch
    run = mh.fit(
        sleeping_task(passing=scenario == "passing"),
        f"ps consistency={consistency}",
        workers=WORKERS,
        steps=batches,
        options=mh.Options(slow=slow),
    )
    workers = run.summary["per_worker"]
    waiting = sum(worker["wait_s"] + worker["exchange_s"] for worker in workers)
    working = sum(worker["compute_s"] for worker in workers)
    updates = WORKERS * ROUNDS[scenario]  # a worker's gradient is one, of a part of a batch or of all of it
    return {"waiting": waiting / (waiting + working), "updates_per_s": updates / run.summary["seconds"]}


def simulated(scenario: str, consistency: str) -> dict[str, float]:
    """The same in virtual time."""
    compute = (
        ComputeModel(step_s=STEP_S, factors={0: FACTOR})
        if scenario == "permanent"
        else ComputeModel(step_s=STEP_S, delay_probability=PROBABILITY, delay_factor=FACTOR)
    )
    batches = ROUNDS[scenario] * (1 if consistency == "bounded:0" else WORKERS)
    run = simulate(SimulationSpec(workers=WORKERS, steps=batches, consistency=consistency, compute=compute))
    return {"waiting": run.waiting_share, "updates_per_s": run.updates_per_s}


def main() -> None:
    """Measure, print and keep."""
    result: dict[str, Any] = {
        "benchmark": "stragglers",
        **host_facts(),
        "workers": WORKERS,
        "step_s": STEP_S,
        "factor": FACTOR,
        "probability": PROBABILITY,
        "scenarios": {},
    }
    for scenario in ROUNDS:
        rows = [
            {"consistency": name, "live": live(scenario, name), "simulated": simulated(scenario, name)}
            for name in BOUNDS
        ]
        result["scenarios"][scenario] = rows
        print(f"{scenario}: waiting and updates/s, live | simulated")
        for row in rows:
            cells = " | ".join(
                f"{row[how]['waiting']:6.1%} {row[how]['updates_per_s']:7.1f}"
                for how in ("live", "simulated")
            )
            print(f"  {row['consistency']:<11} {cells}")
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
