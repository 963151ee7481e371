"""`fit_simulated`: trains one task under parameter servers in virtual time, with more workers than cores."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from manyhands.engine.device import check_device
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.options import Options
from manyhands.engine.request import Length, Request
from manyhands.engine.run import Run
from manyhands.engine.session import run_session
from manyhands.errors import UserError
from manyhands.foresight.simulate.conditions import SimulatedConditions
from manyhands.foresight.simulate.simulated_training import (
    SimulatedRequest,
    SimulatedTraining,
    require_simulated,
)
from manyhands.strategy import Strategy

__all__ = ["fit_simulated"]


def fit_simulated(
    task: AnyTask,
    strategy: str | Strategy = "ps",
    *,
    workers: int,
    length: Length | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    conditions: SimulatedConditions | None = None,
    options: Options | None = None,
) -> Run:
    """Train `task` under parameter servers on `workers` simulated workers, and return what came out, as `fit` does.

    Gradients, steps and metrics are real; times are virtual, and as `conditions` say. The run has the events, the
    history, the records of updates, the summary and the checkpoint of a live one. UserError where it has no servers.
    """
    chosen, conditions = Strategy.parse(strategy), conditions or SimulatedConditions()
    require_simulated(chosen, task)
    options = replace(options or Options(), allow_overload=True)  # no worker takes room
    if options.slow is not None:
        raise UserError("options.slow slows live workers; give conditions=SimulatedConditions(slow=…)")
    asked = Request.make(task, chosen, workers, length or Length(), seed, options, check_device("cpu"))
    conditions.require_workers(workers)
    request = SimulatedRequest(
        conditions=conditions, **{one.name: getattr(asked, one.name) for one in fields(asked)}
    )
    return run_session(request, out, False, train=SimulatedTraining)
