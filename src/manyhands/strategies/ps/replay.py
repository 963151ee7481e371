"""`replay`: execute a recorded run again to the same bytes; of parameter servers, in one process.

An asynchronous run never happens twice, but what happened can be done again: every gradient is a function of a batch
and of the version that each shard had when it was read, and every shard took its steps in one order. `ReplayOrder` says
what comes when; here it is done, with the parts that the live processes use, the same number of threads and the same
alignment of memory. Each gradient is compared with the hash that its worker recorded, so that the first one that
differs is named, and the weights at the end with what the servers left.

Memory: one model and its optimizer's state, as the shards have it, and for each worker at most one copy of the
parameters and one gradient (`ReplayOrder`); `Replayed.extra_bytes` says how much that came to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.data.experience import Experience
from manyhands.data.randomness import preserved
from manyhands.data.store.rundir import RunDirectory, fingerprint
from manyhands.engine.repeating import fit_again
from manyhands.errors import DataError, UserError, first_line, format_bytes, nearest, printable
from manyhands.native.segment import available_bytes
from manyhands.native.threads import with_threads
from manyhands.observe.record.checked_values import final_loss, number
from manyhands.strategies.ps.digests import layout_digest
from manyhands.strategies.ps.replay_order import ReplayOrder, steps_of
from manyhands.strategies.ps.replay_player import Difference, Player, ReplayStage
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.update_files import RunRecord, ShardLogs, read_computed, read_logs, read_record
from manyhands.strategy import Strategy
from manyhands.task import Task
from manyhands.workloads.registry import TASK_NAMES, find, load

__all__ = ["Difference", "Replayed", "is_same", "replay"]

_MOST_THREADS = 4096
_COPIES = 4  # the model, two numbers of an optimizer's state for each of its own, and the shards' values


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came out of a replay."""

    model: nn.Module
    """The weights at the end, or where `until` stopped; after a difference, those that the update in question read."""
    steps: int
    """Global batches that every shard has applied."""
    updates: int
    """Gradients that were computed."""
    loss: float | None
    """Of the last step, which is the final loss of the run where the replay came to its end."""
    metrics: dict[str, float] | None
    """On the evaluation data, where the task has any."""
    run_loss: float | None
    """What the run itself has in its history for that step."""
    run_metrics: dict[str, float]
    """What the run measured at its end; empty where it did not come there, or the replay stopped before."""
    first_difference: Difference | None
    same_bytes: bool | None
    """Whether the weights are those that the run ended with; None where there is nothing to compare them with."""
    extra_bytes: int
    """The most memory that copies of parameters and waiting gradients took at once."""
    notes: tuple[str, ...]


def replay(run: str | Path, task: Task | None = None, *, until: int | None = None) -> Replayed:
    """Execute the run in directory `run` again; a task of your own has to be given, a built-in one is made again.

    It is one of parameter servers, or one whose actors left a log of their tickets.
    `until` stops every shard when it has applied that many global batches. The replay ends at the first gradient that
    differs. UserError for a run that was not recorded, was of another task, or went back to a snapshot;
    ReplayImpossible where the records contradict each other.
    """
    path = Path(run)
    directory = RunDirectory.open(path, lock=False)
    if not Strategy.parse(str(directory.config.get("strategy"))).facts.logs_updates:
        return _fitted(path, task or _built_in(path, directory.config), directory, until)
    record, logs = read_record(path), read_logs(path)
    strategy = _strategy(path, record, logs)
    if task is None:
        task = _built_in(path, directory.config)
        _check_capacity(path, task, record)
    if isinstance(task.data, Experience):
        dealt = task.data.dealt(strategy.shares(record.workers))
        task = replace(task, data=dealt.replayed_from(path, each_process=True) or dealt)
    if not 1 <= record.threads <= _MOST_THREADS:
        raise UserError(f"{path} is damaged: threads={record.threads} must be between 1 and {_MOST_THREADS}")
    with preserved(), with_threads(record.threads):
        stage = ReplayStage(task, record, strategy)
        _require_same_task(path, task, record, directory.config, stage)
        order = ReplayOrder(
            [steps_of(shard, logs.files[shard]) for shard in range(stage.layout.shards)],
            read_computed(path),
            stateful=stage.has_state,
            until=until,
        )
        with stage:
            player = Player(stage, order)
            difference = player.play()
            whole = until is None and difference is None
            summary = directory.read_summary() or {}
            final = summary.get("final")
            # What the history has for the last step; nothing where it has no row of it, or one that no run writes.
            history = (row for row in directory.metrics.read() if row["step"] == player.last_batch + 1)
            return Replayed(
                model=(model := player.model()),
                steps=min(player.batches),
                updates=player.updates,
                loss=player.loss,
                metrics=None if difference is not None else stage.evaluate(model),
                run_loss=final_loss(row for row in history if number(row.get("loss")) is not None),
                run_metrics={
                    name: float(value)
                    for name, value in (final.items() if isinstance(final, dict) and whole else ())
                    if name != "loss" and type(value) in (int, float)
                },
                first_difference=difference,
                same_bytes=is_same(summary, player.digests()) if whole else None,
                extra_bytes=player.peak_bytes,
                notes=(*logs.notes, *_environment(record)),
            )


def _fitted(path: Path, task: Task, directory: RunDirectory, until: int | None) -> Replayed:
    """A run of another strategy, whose order is fixed but for what actors did."""
    found = fit_again(path, task, directory, until)
    return Replayed(
        model=found.run.model,
        steps=found.run.summary["steps"],
        updates=found.run.summary["steps"],
        loss=found.run.summary["final"].get("loss"),
        metrics=found.metrics,
        run_loss=found.run_loss,
        run_metrics=found.run_metrics,
        first_difference=None,
        same_bytes=found.same_bytes,
        extra_bytes=0,
        notes=(),
    )


def _strategy(path: Path, record: RunRecord, logs: ShardLogs) -> Ps:
    """The strategy of a run that left a log of each of its shards; UserError where it is none or one is missing."""
    strategy = Strategy.parse(record.strategy)
    if not isinstance(strategy, Ps):
        raise DataError(f"{path / 'updates' / 'run.json'}: strategy={record.strategy!r} must be ps")
    if strategy.averages:
        raise UserError(
            f"{path} cannot be replayed: with push={strategy.push} each worker has its own optimizer, whose "
            "state is not logged; use audit"
        )
    missing = next((shard for shard in range(strategy.servers) if shard not in logs.files), None)
    if missing is not None:
        raise UserError(f"{path} has no log of shard {missing}: it took no step, or its file is missing")
    return strategy


# ── is it the same? ───────────────────────────────────────────────────────────────────────────────────────────────────


def _built_in(path: Path, config: Mapping[str, Any]) -> Task:
    if "sha256" in config:
        raise UserError(
            f"{path} is a run of {printable(repr(config.get('task')))}, a loop of your own: start it with "
            "manyhands replay RUN --script SCRIPT"
        )
    options = config.get("task_options")
    if not isinstance(options, dict):
        raise UserError(
            f"{path} is a run of {printable(repr(config.get('task')))}, a task of your own: call "
            "manyhands.replay(run, task) from Python"
        )
    name = config.get("task")
    workload = find(name) if isinstance(name, str) else None
    if workload is None or not workload.task:
        raise UserError(
            f"{path / 'config.json'}: its task is {printable(repr(name))}, which is not a built-in task; "
            f"{nearest(str(name), TASK_NAMES)}"
        )
    task: Task = load(workload.task).build(**options)
    return task


def _check_capacity(path: Path, task: Task, record: RunRecord) -> None:
    """UserError where the model that the configuration asks for does not fit in memory, before any of it is made."""
    try:
        with torch.device("meta"):  # shapes without memory
            tensors = [*(model := task.model()).parameters(), *model.buffers()]
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path}: the model of its config.json cannot be built: {first_line(error)[:200]}"
        ) from error
    one = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    needed, room = one * (_COPIES + 2 * max(1, record.workers)), available_bytes()
    if needed > room:
        raise UserError(
            f"{path}: the model of its config.json has {format_bytes(one)} of parameters, and replaying it needs "
            f"{format_bytes(needed)}, but only {format_bytes(room)} is available; is config.json the run's own?"
        )


def _require_same_task(
    path: Path, task: Task, record: RunRecord, config: Mapping[str, Any], stage: ReplayStage
) -> None:
    """UserError names what of the task, the model or the optimizer is not as it was."""
    now = {
        "task": task.name,
        "seed": record.seed,
        "batch_size": task.batch_size,
        "samples": task.samples,
        "parameters": stage.parameters,
    }
    conflict = fingerprint(config).conflict(fingerprint(now))
    if conflict is not None:
        raise UserError(f"{path} is not a run of this task: {conflict.partition(';')[0]}")
    if layout_digest(stage.layout) != record.layout:
        raise UserError(
            f"{path} is not a run of this task: its optimizer or its trained parameters were different"
        )


def is_same(summary: Mapping[str, Any], digests: list[str]) -> bool | None:
    """Whether these are the weights that the servers left; None for a run that did not come to its end."""
    servers = summary.get("servers")
    if not isinstance(servers, list) or not all(isinstance(one, dict) for one in servers):
        return None
    recorded = {one["shard"]: one.get("sha256") for one in servers if type(one.get("shard")) is int}
    return [recorded.get(shard) for shard in range(len(digests))] == digests if recorded else None


def _environment(record: RunRecord) -> list[str]:
    """What here is not as it was, and may change bits."""
    cpu = torch.backends.cpu.get_cpu_capability()
    changed = [("torch", record.torch, torch.__version__), ("instructions", record.cpu, cpu)]
    return [
        f"the run was recorded with {what} {before}, but this is {now}: bits may differ"
        for what, before, now in changed
        if before != now
    ]
