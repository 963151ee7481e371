"""One process of a run on `ps` whose workers push by host: near_script.py DIRECTORY STRATEGY [KILLED_RANK].

Prints `weights DIGEST` where the run ends with a result; the process of the killed rank dies in its third gradient,
once. With a bound on staleness each batch is one worker's, and the model so large that pushes leave in order.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import manyhands as mh
from placed_script import RANK, STEPS, digest, loss, options, say, task

COUNT = [0]


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 20_000), nn.Tanh(), nn.Linear(20_000, 2)).double()


def task_for(strategy: str, measure: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor] = loss) -> mh.Task:
    return replace(task(measure), model=wide) if "bounded" in strategy else task(measure)


def steps_for(strategy: str) -> int:
    return 4 * STEPS if "bounded" in strategy else STEPS


def main(directory: Path, strategy: str, killed: int = -1) -> None:
    died = directory / "died"

    def measure(of: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        COUNT[0] += torch.is_grad_enabled()
        if killed == RANK and COUNT[0] == 3 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(of, batch)

    run = mh.fit(
        task_for(strategy, measure),
        strategy,
        steps=steps_for(strategy),
        out=directory / "run",
        options=options(),
    )
    say("weights", digest(run))
    if RANK == 0:
        torch.save(run.model.state_dict(), directory / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
