"""Simulates parameter-server runs in virtual time: real protocol cores, modelled durations, and seeded faults.

`simulate(SimulationSpec(...))` runs a whole training on one core, the same for the same seed. See
`docs/simulator.md`.
"""

from __future__ import annotations

from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.faults import (
    Fault,
    FaultRole,
    Kill,
    Pause,
    SlowLink,
    WorkerComes,
    WorkerGoes,
    draw_faults,
    draw_storm,
)
from manyhands.foresight.simulate.models import Ledger, Model, SimulatedTrained, Store
from manyhands.foresight.simulate.network import NetworkModel
from manyhands.foresight.simulate.simulated_run import Observer, SimulatedRun
from manyhands.foresight.simulate.simulated_spec import ComputeModel, SimulationSpec, Timing
from manyhands.foresight.simulate.witness import Witness, WitnessedPromise

__all__ = [
    "ComputeModel",
    "Fault",
    "FaultRole",
    "Kill",
    "Ledger",
    "Model",
    "NetworkModel",
    "Observer",
    "Pause",
    "SimulatedRun",
    "SimulatedTrained",
    "SimulationSpec",
    "SlowLink",
    "Store",
    "Timing",
    "Witness",
    "WitnessedPromise",
    "WorkerComes",
    "WorkerGoes",
    "draw_faults",
    "draw_storm",
    "simulate",
]
