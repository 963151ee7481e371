"""One slow worker: what it costs synchronous training, and what an asynchronous parameter server makes of it.

    python straggler.py
    python straggler.py --workers 4 --factor 8

Worker 1 computes several times as long as the others. Under `sync` everyone waits for it in every step; under `async`
the others go on, and take over its share of the batches. The price is staleness: gradients of parameters that have
moved since they were read.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import manyhands as mh


def make_task(batch_size: int = 64) -> mh.Task:
    """A regression whose answer is known, wide enough that computing takes a while."""
    torch.manual_seed(0)
    x = torch.randn(4096, 32)
    y = (x @ torch.randn(32, 1)).tanh()
    return mh.Task(
        model=lambda: nn.Sequential(
            nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        ),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        data=(x, y),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch_size=batch_size,
    )


def main() -> None:
    """Train twice, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--factor", type=float, default=10.0, help="how many times as long worker 1 computes")
    asked = parser.parse_args()

    options = mh.Options(slow=mh.Slowdown(worker=1, factor=asked.factor))
    print(f"{'strategy':24}{'seconds':>9}{'loss':>9}{'staleness':>11}   steps of each worker")
    for strategy in ("ps consistency=sync", "ps consistency=async"):
        run = mh.fit(make_task(), strategy, workers=asked.workers, steps=asked.steps, options=options)
        stale = run.summary["staleness"]["max"]
        steps = " ".join(str(worker["steps"]) for worker in run.summary["per_worker"])
        loss = sum(run.history.loss[-20:]) / len(run.history.loss[-20:])
        print(f"{strategy:24}{run.summary['seconds']:9.1f}{loss:9.4f}{stale:11}   {steps}")


if __name__ == "__main__":
    main()
