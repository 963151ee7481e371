"""`fit_again`: train a kept run again, with actors that act for what its logs say, and compare the weights.

Everything else of such a run follows from its seed: who computes what, and in which order it is summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from manyhands.data.experience import Experience
from manyhands.data.store.checkpoint import NoCheckpoint
from manyhands.data.store.rundir import RunDirectory, fingerprint, parameter_shapes
from manyhands.engine.fitting import fit
from manyhands.engine.options import Options
from manyhands.engine.run import Run
from manyhands.errors import UserError
from manyhands.observe.record.checked_values import final_loss, number, whole
from manyhands.strategy import Strategy
from manyhands.task import Task

__all__ = ["FittedAgain", "fit_again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedAgain:
    """The run that was trained again, beside what the first one kept."""

    run: Run
    metrics: dict[str, float] | None
    run_loss: float | None
    run_metrics: dict[str, float]
    same_bytes: bool | None
    """Whether the weights are those of the checkpoint after the same step; None where there is none."""


def fit_again(path: Path, task: Task, directory: RunDirectory, until: int | None) -> FittedAgain:
    """Train the run of `directory` again, to step `until` if given.

    UserError for a run of another task, one that needs no record to be repeated, and one that no record repeats.
    """
    config = directory.config
    strategy, workers = Strategy.parse(str(config.get("strategy"))), whole(config.get("workers")) or 1
    if not strategy.facts.splits_batches:
        raise UserError(
            f"{path} is a run of {strategy}, which nobody can replay: the order of its steps is not recorded; ps "
            "consistency=async records it"
        )
    acted = task.data.replayed_from(path.absolute()) if isinstance(task.data, Experience) else None
    if acted is None:
        raise UserError(
            f"{path} is a run of {strategy} without actors: it has no record, and needs none, as fit repeats it with "
            f"seed={config.get('seed')}"
        )
    _require_same_task(path, task, config)
    kept = _kept(directory, until)
    steps = until or kept[0]
    run = fit(
        replace(task, data=acted),
        strategy,
        workers=workers,
        steps=steps,
        seed=config["seed"],
        device=str(config.get("device", "cpu")),
        options=Options(evaluate_every=steps, progress="none", resume_command=""),
    )
    summary = directory.read_summary() or {}
    final = summary.get("final") if summary.get("steps") == steps else None
    history = (row for row in directory.metrics.read() if row["step"] == steps)
    return FittedAgain(
        run=run,
        metrics={name: one for name, one in run.summary["final"].items() if name != "loss"},
        run_loss=final_loss(row for row in history if number(row.get("loss")) is not None),
        run_metrics={
            name: float(value)
            for name, value in (final.items() if isinstance(final, dict) else ())
            if name != "loss" and type(value) in (int, float)
        },
        same_bytes=_same(run.model.state_dict(), kept[1]) if kept[0] == steps else None,
    )


def _kept(directory: RunDirectory, step: int | None) -> tuple[int, Mapping[str, Tensor]]:
    """A checkpoint: its step, and the model."""
    try:
        found = directory.checkpoints().load(step)
    except NoCheckpoint:
        if step is None:
            raise UserError(f"{directory.path} kept no checkpoint, so there is nothing to repeat") from None
        return -1, {}
    return found.step, found.model


def _require_same_task(path: Path, task: Task, config: Mapping[str, object]) -> None:
    now = {
        "task": task.name,
        "seed": config.get("seed"),
        "batch_size": task.batch_size,
        "samples": task.samples,
        "parameters": parameter_shapes(task.model().named_parameters()),
    }
    conflict = fingerprint(config).conflict(fingerprint(now))
    if conflict is not None:
        raise UserError(f"{path} is not a run of this task: {conflict.partition(';')[0]}")


def _same(found: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> bool:
    return found.keys() == kept.keys() and all(
        one.dtype == kept[name].dtype and torch.equal(_bytes(one), _bytes(kept[name]))
        for name, one in found.items()
    )


def _bytes(values: Tensor) -> Tensor:
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8)
