"""What every process of a run does whose workers seem to have a GPU each: Gloo on the CPU stands for NCCL.

gpu_sums_script.py equal DIRECTORY      prints `<name> <digest> <who sums>`
gpu_sums_script.py refused DIRECTORY    workers that share a GPU: prints the summary's sentence
gpu_sums_script.py killed DIRECTORY     worker 2 is killed in its third step; prints `killed: <error>` and the seconds
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.strategies.allreduce import gpu_sums
from manyhands.strategies.allreduce.gpu_sums import GpuSeat
from placed_script import RANK, STEPS, at_third, digest, expect, loss, options, say, task

GPUS = {"equal": 10**9, "refused": 2, "killed": 10**9}


def pretend(gpus: int) -> None:
    """Workers have `gpus` GPUs between them."""

    def seat(device: torch.device) -> GpuSeat:
        del device
        return GpuSeat(host="here", gpu=f"GPU-{RANK % gpus}", nccl="0.0")

    gpu_sums.seat_of = seat


class LossOfOwnGpu:
    """A loss that makes every process that it is sent to seem to have a GPU of its own; `deadly` kills worker 2."""

    def __init__(self, deadly: bool = False) -> None:
        self.deadly = deadly
        self.calls = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        gpu_sums.seat_of = lambda _: GpuSeat(host="here", gpu=f"GPU-{os.getpid()}", nccl="0.0")

    def __call__(self, of: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += torch.is_grad_enabled()
        if (
            self.deadly and self.calls == 3 and len(batch[0]) == 2
        ):  # of 8 samples, the last of three workers has 2
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(of, batch)


def equal(directory: Path) -> None:
    for strategy in ("mirrored", "allreduce buckets=64"):
        run = mh.fit(task(), strategy, steps=STEPS, options=options())
        say(strategy.replace(" ", "-"), digest(run), run.summary["sums"]["by"])
    pieces = replace(task(), clip_norm=0.1, microbatches=2)
    run = mh.fit(pieces, "mirrored", steps=STEPS, options=options())
    say("pieces", digest(run), run.summary["sums"]["by"])
    if RANK == 0:
        torch.save(run.model.state_dict(), directory / "pieces")
    out = directory / f"rank-{RANK}"
    mh.fit(task(), "mirrored", steps=STEPS // 2, out=out, options=options())
    run = mh.fit(task(), "mirrored", steps=STEPS, out=out, resume=True, options=options())
    say("resumed", digest(run), run.summary["sums"]["by"])
    if RANK == 0:
        torch.save(run.model.state_dict(), directory / "weights")


def refused(_: Path) -> None:
    run = mh.fit(task(), "mirrored", steps=STEPS, options=options())
    say("told:", digest(run), run.summary["sums"]["by"], *run.summary["notes"])


def killed(_: Path) -> None:
    broken = task(at_third(lambda: os.kill(os.getpid(), signal.SIGKILL), 2))
    expect("killed", lambda: mh.fit(broken, "mirrored", steps=100, options=options()))


if __name__ == "__main__":
    pretend(GPUS[sys.argv[1]])
    {"equal": equal, "refused": refused, "killed": killed}[sys.argv[1]](Path(sys.argv[2]))
