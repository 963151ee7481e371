"""Whole training steps on one host: torch's DDP on Gloo, `mirrored`, `central`, and one process for reference.

All contenders live in the same worker processes, start from the same weights and train on the same batches, in turn
and in blocks of a few steps, so that a busy minute of the machine hits all of them. All ranks meet before a block,
which takes as long as its slowest rank. The losses must agree, step by step over the first 50: whoever exchanges
gradients wrongly is found out here.

Two references run on rank 0 while the others sleep: `single`, one process with all cores and the whole batch, which is
what a user without this library has; and `alone`, one worker with its own share and its own threads, whose time is that
of a step without any exchange. The efficiency of a contender is the time of `alone` divided by its own (weak scaling:
samples per second of N workers, over N times those of one).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyhands.errors import ManyhandsError, UserError, nearest
from manyhands.lab.bench.harness import Workers, host_facts, percentiles
from manyhands.lab.bench.step_worker import (
    ALONE,
    DDP,
    SINGLE,
    STRATEGIES,
    WORKLOADS,
    BenchWorkload,
    StepMeasured,
    StepPlan,
)
from manyhands.native.group.shared_group import SharedGroupFiles, warm
from manyhands.places.local.host import check_capacity, of_processes, threads_per_role

DEFAULT_STEPS = 40
_BLOCK = 4  # measured steps in a turn
_COMPARED_STEPS = 50  # later ones drift apart: training enlarges float32's rounding
_TOLERANCE = 5e-3  # of the first loss


def named_workloads(text: str) -> list[BenchWorkload]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in WORKLOADS:
            raise UserError(f"workload: there is no {word!r}; {nearest(word, WORKLOADS)}")
    return [WORKLOADS[word] for word in words]


def run_bench(
    workers: int,
    workloads: Sequence[BenchWorkload] = tuple(WORKLOADS.values()),
    steps: int = DEFAULT_STEPS,
    timeout_s: float = 300.0,
    allow_overload: bool = False,
) -> dict[str, Any]:
    """Measure `steps` steps of each contender, and return a dictionary ready for JSON.

    Raises if a worker fails, if a workload takes longer than `timeout_s`, or if losses disagree.
    """
    check_capacity(of_processes(), workers, allow_overload=allow_overload)
    if workers < 2:
        raise UserError(f"workers={workers}: exchanging gradients takes at least 2")
    if steps < 1:
        raise UserError(f"steps={steps}: must be at least 1")
    facts = {"benchmark": "step", "workers": workers, **host_facts()}
    warm({torch.float32, torch.float64})
    return {
        **facts,
        "threads_per_worker": threads_per_role(workers),
        "results": [_measure(workers, workload, steps, timeout_s) for workload in workloads],
    }


def format_table(result: dict[str, Any]) -> str:
    """The dictionary of `run_bench` as text: one block of lines per workload."""
    lines = [
        f"training steps of {result['workers']} workers on {result['cores']} cores, "
        f"torch threads per worker: {result['threads_per_worker']}"
    ]
    for row in result["results"]:
        lines += [
            "",
            f"{row['workload']}: {row['parameters'] / 1e6:.1f} M parameters, {row['optimizer']}, "
            f"{row['batch_per_worker']} samples per worker; losses agree to {row['loss_difference']:.0e}",
            f"{'':<10}{'median':>12}{'10th to 90th':>22}{'samples/s':>12}{'to DDP':>9}{'efficiency':>12}",
        ]
        for name, cell in row["contenders"].items():
            spread = f"{cell['p10_ms']:.1f} to {cell['p90_ms']:.1f} ms"
            efficiency = f"{100 * cell['efficiency']:.0f} %" if "efficiency" in cell else ""
            lines.append(
                f"{name:<10}{cell['median_ms']:>9.1f} ms{spread:>22}{cell['samples_per_s']:>12.0f}"
                f"{cell['times_ddp']:>8.2f}×{efficiency:>12}"
            )
    return "\n".join(lines)


def _measure(workers: int, workload: BenchWorkload, steps: int, timeout_s: float) -> dict[str, Any]:
    rounds, block = -(-steps // _BLOCK), min(steps, _BLOCK)
    ranks = _run_workers(workers, workload, rounds, block, timeout_s)
    losses, difference = agreed_losses(ranks)
    return {
        "workload": workload.word,
        "parameters": ranks[0].parameters,
        "optimizer": workload.optimizer,
        "batch_per_worker": workload.batch,
        "rounds": rounds,
        "steps_per_round": block,
        "compared_steps": len(losses),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "loss_difference": difference,
        "contenders": _summaries(ranks, workload.batch, block),
    }


def agreed_losses(ranks: Sequence[StepMeasured]) -> tuple[list[float], float]:
    """DDP's losses over the global batch, step by step, and how far anyone else's are off, as a part of the first."""
    of_shares = {name: [rank.losses[name] for rank in ranks] for name in (DDP, *STRATEGIES)}
    by_name = {name: np.mean(losses, axis=0)[:_COMPARED_STEPS] for name, losses in of_shares.items()}
    by_name[SINGLE] = np.array(ranks[0].losses[SINGLE][:_COMPARED_STEPS])
    expected = by_name[DDP]
    differences = {name: np.abs(losses - expected) / expected[0] for name, losses in by_name.items()}
    for name, difference in differences.items():
        if not (difference <= _TOLERANCE).all():
            step = int(np.argmax(~(difference <= _TOLERANCE)))
            raise ManyhandsError(
                f"{name} has a loss of {by_name[name][step]:.6g} in step {step} and {DDP} one of "
                f"{expected[step]:.6g}: they do not train the same"
            )
    return expected.tolist(), float(max(difference.max() for difference in differences.values()))


def _summaries(ranks: Sequence[StepMeasured], batch: int, block: int) -> dict[str, dict[str, float]]:
    """Each contender's times; ratios are medians over the rounds, each of two blocks of the same round."""
    milliseconds = {
        name: 1e3 * np.max([rank.seconds[name] for rank in ranks if name in rank.seconds], axis=0) / block
        for name in ranks[0].seconds
    }
    summaries = {}
    for name, times in milliseconds.items():
        cell = percentiles(times, "ms")
        shares = 1 if name == ALONE else len(ranks)
        cell["samples_per_s"] = 1e3 * batch * shares / cell["median_ms"]
        cell["times_ddp"] = float(np.median(milliseconds[DDP] / times))
        if name not in (SINGLE, ALONE):
            cell["efficiency"] = float(np.median(milliseconds[ALONE] / times))
        summaries[name] = cell
    return summaries


def _run_workers(
    workers: int, workload: BenchWorkload, rounds: int, block: int, timeout_s: float
) -> list[StepMeasured]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="manyhands-bench-"))
        rendezvous, *groups = [
            stack.enter_context(SharedGroupFiles.create(workers)).descriptors
            for _ in range(1 + len(STRATEGIES))
        ]
        processes = stack.enter_context(Workers("manyhands.lab.bench.step_worker"))
        for rank in range(workers):
            plan = StepPlan(
                rank=rank,
                world=workers,
                rendezvous=rendezvous,
                groups=dict(zip(STRATEGIES, groups, strict=True)),
                store=str(Path(folder) / "store"),
                workload=workload.to_json(),
                rounds=rounds,
                block=block,
                threads=threads_per_role(workers),
                cores=len(os.sched_getaffinity(0)),
                timeout_s=timeout_s,
            )
            processes.start(plan, [*rendezvous, *(one for pair in groups for one in pair)])
        return [StepMeasured(**printed) for printed in processes.results(timeout_s)]
