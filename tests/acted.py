"""Environments that are quick, draw by chance and fail on request, and a policy for them: for tests of actors."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

import manyhands as mh
from manyhands.workloads.rl.actor_process import ActorJob
from manyhands.workloads.rl.environments import open_environments
from manyhands.workloads.rl.rollouts import Rollouts, RolloutSpec

SPEC = RolloutSpec(length=5, observation_shape=(2,), observation_dtype=torch.float32)


class Walk:
    """A walk whose steps are drawn; it ends by chance, or is cut after 9 steps."""

    observation_space: Any = SimpleNamespace(shape=(2,), dtype=np.dtype(np.float32))
    action_space: Any = SimpleNamespace(n=2)

    def __init__(self, fault: Callable[[int], None] | None = None) -> None:
        self.fault, self.taken = fault, 0

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.chance = np.random.default_rng(seed)
        self.at, self.steps = self.chance.normal(), 0
        return self.observed(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken += 1
        if self.fault is not None:
            self.fault(self.taken)
        self.steps += 1
        self.at += (1 if action else -1) * self.chance.random()
        return self.observed(), self.at, bool(self.chance.random() < 0.1), self.steps == 9, {}

    def observed(self) -> Any:
        return np.array([self.at, self.steps], np.float32)

    def close(self) -> None: ...


class Bold(nn.Module):
    """How likely a walk goes up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.1, 0.2]))

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        up = observations @ self.weight
        return torch.stack([-up, up], 1), up


def job(environments: int, fault: Callable[[int], None] | None = None, seed: int = 3) -> ActorJob:
    return ActorJob(
        make=partial(open_environments, partial(Walk, fault)),
        policy=Bold,
        spec=SPEC,
        environments=range(environments),
        seed=seed,
    )


def learned(state: dict[str, torch.Tensor], rollouts: Rollouts) -> dict[str, torch.Tensor]:
    """New weights, which depend on every number of the rollouts."""
    found = sum(float(one.double().sum()) * (place + 1) for place, one in enumerate(rollouts))
    change = torch.tensor([np.sin(found), np.cos(found)], dtype=torch.float32)
    return {"weight": state["weight"] + 0.1 * change}


@dataclass(frozen=True)
class Once:
    """A fault in the `at`th step of the first environment that gets there: the file `mark` remembers it."""

    mark: Path
    what: str
    at: int = 7

    def __call__(self, taken: int) -> None:
        if taken < self.at:
            return
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        if self.what == "hang":
            time.sleep(1000)
        os._exit(7)


def raises_always(taken: int) -> None:
    if taken == 4:
        raise ZeroDivisionError("the walk fell over")


def in_sight(folder: Path, make: Callable[[], Any]) -> Any:
    """An environment of an actor whose process is known by a file in `folder`."""
    if any(frame.name == "run_actor" for frame in traceback.extract_stack()):
        (folder / str(os.getpid())).touch()
    return make()


class ActorKiller(mh.Callback):
    """Kills so many actors of a run whose environments are `in_sight`: one after every so many steps."""

    def __init__(self, folder: Path, *, every: int, kills: int) -> None:
        folder.mkdir()
        self.folder, self.every, self.kills, self.killed = folder, every, kills, 0

    def on_step(self, row: Any) -> None:
        if row["step"] % self.every or self.killed == self.kills:
            return
        names = sorted(path.name for path in self.folder.iterdir())
        living = [name for name in names if Path(f"/proc/{name}").exists()]  # their learner may have died
        for victim in sorted(living, key=lambda name: hash((name, self.killed)))[-1:]:
            (self.folder / victim).unlink()
            with suppress(ProcessLookupError):
                os.kill(int(victim), signal.SIGKILL)
                self.killed += 1
