"""Parameter-server runs in virtual time: the cores of a live run, modelled times, and faults drawn from a seed.

`simulate(SimulationSpec(...))` runs a whole training on one core, the same for the same seed. See `docs/simulator.md`.
"""

from __future__ import annotations

from manyhands.simulate.driver import Observer, simulate
from manyhands.simulate.faults import (
    AddWorker,
    Fault,
    Kill,
    Pause,
    RemoveWorker,
    Role,
    SlowLink,
    draw_faults,
    draw_storm,
)
from manyhands.simulate.models import Ledger, Model, Store, Trained
from manyhands.simulate.network import NetworkModel
from manyhands.simulate.run import SimulatedRun
from manyhands.simulate.spec import ComputeModel, SimulationSpec, Timing
from manyhands.simulate.witness import Promise, Witness

__all__ = [
    "AddWorker",
    "ComputeModel",
    "Fault",
    "Kill",
    "Ledger",
    "Model",
    "NetworkModel",
    "Observer",
    "Pause",
    "Promise",
    "RemoveWorker",
    "Role",
    "SimulatedRun",
    "SimulationSpec",
    "SlowLink",
    "Store",
    "Timing",
    "Trained",
    "Witness",
    "draw_faults",
    "draw_storm",
    "simulate",
]
