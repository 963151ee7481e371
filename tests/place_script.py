"""What a process does in the contract of places: a run that must come out like any other, and one that must fail.

place_script.py FOLDER CLUSTER      CLUSTER is `cluster=` of `fit`, or `-`; prints one line of JSON
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.errors import UserError, WorkerFailed

STEPS, WORKERS, POISONED = 5, 2, 17


def loss(of: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    samples, wanted = batch
    return nn.functional.mse_loss(of(samples), wanted)


def poisoned(of: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    if torch.is_grad_enabled() and bool(
        (batch[0] == 99.0).any()
    ):  # in a step, and not in the trial of the loss
        raise ZeroDivisionError("a defect of the task")
    return loss(of, batch)


def task(*, fails: bool = False) -> mh.Task:
    chance = torch.Generator().manual_seed(3)
    samples, wanted = (torch.randn(40, wide, generator=chance).double() for wide in (8, 2))
    if fails:
        samples[POISONED] = 99.0
    return mh.Task(
        name="toy",
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double(),
        loss=poisoned if fails else loss,
        data=TensorDataset(samples, wanted),
        batch_size=8,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )


def options() -> mh.Options:
    return mh.Options(timeout_s=60.0, progress="none", resume_command="")


def main(folder: Path, cluster: str) -> None:
    place = {"cluster": cluster, "workers": WORKERS} if cluster != "-" else {}
    run = mh.fit(task(), "allreduce", steps=STEPS, options=options(), **place)
    weights = folder / f"weights-{os.getpid()}.pt"
    torch.save(run.model.state_dict(), weights)
    said = {"weights": str(weights), "loss": run.history.loss, "workers": run.summary["workers"]}
    try:
        mh.fit(task(fails=True), "allreduce", steps=STEPS, options=options(), **place)
    except (
        WorkerFailed,
        ZeroDivisionError,
    ) as error:  # a process that calls `fit` itself raises its own error
        said["failed"] = f"{type(error).__name__}: {error}"
    try:
        mh.fit(task(), "allreduce", steps=STEPS, options=options(), **{**place, "workers": 0})
    except UserError as error:
        said["refused"] = str(error)
    os.write(1, f"{json.dumps(said)}\n".encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
