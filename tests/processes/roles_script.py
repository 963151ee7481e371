"""A script that calls `mh.fit` and is one role of a run: `roles_script.py STRATEGY STEPS [name=value …]`.

    out=DIRECTORY  task=NAME  pause=SECONDS of every step  timeout=SECONDS  resume=yes  insecure=yes
    tls=FOLDER  workers=N  check=STEPS between two comparisons  width=N of the hidden layer
    hold=FILE while which is there a step takes a second longer

Prints a digest of the weights that it got.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import ManyhandsError


def main(strategy: str, steps: str, *asked: str) -> None:
    settings = dict(word.split("=", 1) for word in asked)
    pause_s, hold = float(settings.get("pause", "0")), Path(settings.get("hold", "/nowhere"))
    width, generator = int(settings.get("width", "16")), torch.Generator().manual_seed(7)
    x = torch.randn(256, 8, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(8, 3, generator=generator, dtype=torch.float64)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(pause_s + hold.exists())
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    task = mh.Task(
        model=lambda: nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3)).double(),
        loss=loss,
        data=list(zip(x, y, strict=True)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        batch_size=16,
        name=settings.get("task", "roles"),
    )
    options = mh.Options(
        timeout_s=float(settings.get("timeout", "120")),
        checkpoint_every=20,
        evaluate_every=10**6,
        check_every=int(settings.get("check", "100")),
        insecure="insecure" in settings,
        tls=settings.get("tls"),
        progress="none",
    )
    run = mh.fit(
        task,
        strategy,
        workers=int(settings["workers"]) if "workers" in settings else None,
        steps=int(steps),
        out=settings.get("out"),
        resume="resume" in settings,
        options=options,
    )
    digest = hashlib.sha256()
    for value in run.model.state_dict().values():
        digest.update(value.numpy().tobytes())
    print("weights", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ManyhandsError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
