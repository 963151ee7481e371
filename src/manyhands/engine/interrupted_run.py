"""Where a run is kept, and what an interrupted one left there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.data.store.rundir import RunDirectory
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.options import Options
from manyhands.engine.training import training_class
from manyhands.strategy import Strategy

__all__ = ["Keeping", "Kept", "last_kept"]


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Where a workload's run is kept: its directory, and whether to resume from it."""

    out: Path
    resume: bool = False
    # Of `fit`; its view and its ears are the workload's
    options: Options = field(default_factory=lambda: Options(resume_command="", progress="none"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Parameters by name after `steps` steps, and the rows of the history up to there."""

    values: Mapping[str, Tensor]
    steps: int
    rows: list[dict[str, Any]]


def last_kept(folder: Path, task: AnyTask, strategy: Strategy) -> Kept | None:
    """The newest checkpoint in a run's directory; None where there is none yet."""
    directory = RunDirectory.open(folder, lock=False)
    try:
        found = training_class(strategy, compiled=task.compiled).kept(directory, task, strategy)
        if found is None:
            return None
        steps, values = found
        rows = [row for row in directory.metrics.read() if row["step"] <= steps]
    finally:
        directory.close()
    return Kept(values=values, steps=steps, rows=rows)
