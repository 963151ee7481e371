"""`manyhands train TASK`: one command per built-in task, its own options beside the common ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from manyhands.cli.command_options import (
    AllowOverload,
    add_task_command,
    check_writable,
    command_to_resume,
    fresh_directory,
    print_next,
    write_json,
)
from manyhands.cli.lazy_commands import usual_workers
from manyhands.cli.program import spare_the_compiler
from manyhands.cli.runs import (
    CheckpointEvery,
    Dashboard,
    DashboardPort,
    Insecure,
    Resume,
    Tensorboard,
    Tls,
    Watchdog,
    ended_by_signal,
    leave_if_evaluator,
    leave_report,
    live_page,
    live_tensorboard,
)
from manyhands.cli.workload_command import add_trainings
from manyhands.errors import format_bytes
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy
from manyhands.workloads.registry import offered
from manyhands.workloads.tasks.builtin import BuiltinTask, TaskEnd, TaskTable

if TYPE_CHECKING:
    from manyhands.engine.run import Run
    from manyhands.task import Task

__all__ = ["end_run", "task_table", "train_app"]

train_app = typer.Typer(help="Train a built-in task.", no_args_is_help=True, callback=leave_if_evaluator)


@dataclass(frozen=True, kw_only=True)
class _Common:
    """The options that every task has."""

    strategy: Annotated[
        str,
        typer.Option(
            help=f"How: {', '.join(STRATEGIES)}; with settings: 'ps servers=2', 'pipeline stages=2'."
        ),
    ] = "mirrored"
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes on this host; under torchrun, the processes it started.",
            show_default="2, or what the strategy takes",
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Have Ray start the processes: ray (one of this run's own), auto, ray://HOST:PORT or HOST:PORT."
        ),
    ] = None
    min_workers: Annotated[
        int | None,
        typer.Option(help="Go on with so few, or end: 'allreduce elastic=yes'; ps with --cluster."),
    ] = None
    max_workers: Annotated[
        int | None, typer.Option(help="With --cluster and ps: up to so many as it grows.")
    ] = None
    steps: Annotated[int | None, typer.Option(help="Global batches to train.")] = None
    epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead of --steps.")] = None
    rounds: Annotated[int | None, typer.Option(help="Rounds to train, of a strategy that counts them.")] = (
        None
    )
    seed: Annotated[int, typer.Option(help="Fixes weights, data order and everything random.")] = 0
    out: Annotated[Path | None, typer.Option(help="Run directory.", show_default="runs/TASK-TIME")] = None
    resume: Resume = False
    device: Annotated[str, typer.Option(help="cpu, or cuda: one GPU per worker in turn.")] = "cpu"
    autocast: Annotated[bool, typer.Option("--autocast", help="Compute in bfloat16 where safe.")] = False
    compile_model: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between evaluations.")] = None
    checkpoint_every: CheckpointEvery = None
    allow_overload: AllowOverload = False
    watchdog: Watchdog = 60.0
    slow: Annotated[
        str | None,
        typer.Option(help="Slow a worker on purpose: worker=1,factor=5[,probability=0.1][,from=400]."),
    ] = None
    progress: Annotated[
        str,
        typer.Option(
            help="bar, lines (one every few seconds) or none; auto: a bar in a terminal, lines elsewhere."
        ),
    ] = "auto"
    tls: Tls = None
    insecure: Insecure = False
    dashboard: Dashboard = False
    dashboard_port: DashboardPort = 0
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the summary to this file.")] = None
    tensorboard: Tensorboard = None
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write steps and evaluations to this file.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a command asks for, where it stands."""

    task: Task
    fit: Callable[[], Run]
    out: Path
    leads: bool
    """Whether the run directory, the page and what is printed at the end are this process's."""

    count: int
    """How many processes there are, as the page shows them before the run has said so."""


def _train(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _Common) -> None:
    # Imported here so that help texts do not wait for torch.
    from manyhands.errors import ManyhandsError, UserError

    if common.resume and common.out is None:
        raise UserError("--resume needs --out, the directory of the run to go on with")
    spare_the_compiler()
    asked = _asked(entry, task_options, common)
    try:
        if not asked.leads:
            with ended_by_signal():
                asked.fit()
            return
        shown = (asked.out, entry.name, common.strategy, common.dashboard_port, asked.count)
        page = live_page(common.dashboard, *shown)
        # without a word of its own, for fit has said what is kept, and how to go on
        with ended_by_signal(), page, live_tensorboard(asked.out, common.tensorboard):
            run = asked.fit()
    except UserError:
        raise
    except ManyhandsError:
        if asked.leads:
            leave_report(asked.out)  # it shows what went wrong, and to whom
        raise
    end_run(run, asked.out, common.json_file, task_table(entry, asked.task, run))
    if run.path is not None:
        print_next(
            where_the_time_goes=("explain", asked.out),
            the_page_of_the_run=("watch", asked.out),
            the_model_over_HTTP=("serve", asked.out),
        )


def _asked(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _Common) -> _Asked:
    """The task with its options, and the call of `fit`; UserError for what makes no sense before anything starts."""
    from manyhands.engine.fitting import fit
    from manyhands.engine.loggers import CsvLogger
    from manyhands.engine.options import Options, Slowdown
    from manyhands.places.place import find_place

    task = entry.build(**task_options)
    place = find_place()
    leads = place.leads
    usual = usual_workers(Strategy.parse(common.strategy))
    workers = common.workers if common.workers is not None or place.world is not None else usual
    out = common.out or (fresh_directory(entry.name) if leads else Path("runs"))  # the leader's to keep
    if leads:
        check_writable(common.json_file)
    fit_here = partial(
        fit,
        task,
        common.strategy,
        workers=workers,
        **_length(entry, common),
        seed=common.seed,
        device=common.device,
        out=out,
        resume=common.resume,
        cluster=common.cluster,
        options=Options(
            evaluate_every=common.evaluate_every,
            checkpoint_every=common.checkpoint_every,
            allow_overload=common.allow_overload,
            resume_command=command_to_resume(sys.argv, out),
            watchdog_s=common.watchdog,
            slow=Slowdown.parse(common.slow) if common.slow is not None else None,
            autocast=common.autocast,
            compile=common.compile_model,
            progress=common.progress,
            tls=common.tls,
            insecure=common.insecure,
            min_workers=common.min_workers,
            max_workers=common.max_workers,
            callbacks=[CsvLogger(common.csv_file)] if common.csv_file is not None and leads else [],
        ),
    )
    count = workers if workers is not None else place.world
    return _Asked(task=task, fit=fit_here, out=out, leads=leads, count=count or usual)


def task_table(entry: BuiltinTask[Any], task: Task, run: Run) -> TaskTable | None:
    """What the task itself shows at the end of a run; None where it has nothing to show of one like this."""
    if entry.table is None or Strategy.parse(run.summary["strategy"]).facts.counts_rounds:
        return None
    return entry.table(task, TaskEnd(model=run.model, workers=run.summary["workers"]))


def end_run(run: Run, out: Path, json_file: Path | None, table: TaskTable | None = None) -> None:
    """Print what came out, leave the report, and write the summary where one was asked for."""
    from manyhands.observe.draw.time_table import end_table, words_table

    for note in run.summary["notes"]:
        print(f"manyhands: {note}", file=sys.stderr)
    _print_end(run.summary, run.path, end_table(run.summary))
    summary = dict(run.summary)
    if table is not None:
        Console().print(words_table(table.title, table.head, table.rows))
        summary["table"] = {"title": table.title, "head": table.head, "rows": table.rows}
    if run.path is not None:  # else a node of a cluster has it
        leave_report(out, table)
    write_json(json_file, summary)  # last, for a disk that does not take it must not hide the rest


def _length(entry: BuiltinTask[Any], common: _Common) -> dict[str, int | None]:
    """Steps, epochs or rounds as asked for, or what the task itself would have."""
    asked = {"steps": common.steps, "epochs": common.epochs, "rounds": common.rounds}
    if any(value is not None for value in asked.values()):
        return asked
    if Strategy.parse(common.strategy).facts.counts_rounds:
        return {}
    return {"steps": entry.steps, "epochs": entry.epochs}


def _print_end(summary: dict[str, Any], path: Path | None, table: Any) -> None:
    out = Console()
    final = "  ".join(f"{name} {value:.4f}" for name, value in summary["final"].items())
    out.print(
        f"{summary['task']} · {summary['strategy']} · {summary['workers']} workers · {summary['steps']} steps in "
        f"{summary['seconds']:.1f} s · {summary['samples_per_s']:,.0f} samples/s",
        highlight=False,
    )
    out.print(f"final  {final}", highlight=False)
    out.print(table)
    if summary["bytes_sent"]:
        parts = summary["sent"].items()
        said = "  ".join(f"{name} {format_bytes(sent['bytes_sent'])}" for name, sent in parts)
        out.print(f"sent  {said}", highlight=False)
    if summary.get("membership", {}).get("changes"):
        counted, recoveries = summary["membership"], summary["recoveries"]
        took = f", in {max(one['seconds'] for one in recoveries):.1f} s at most" if recoveries else ""
        out.print(
            f"workers  lost {counted['lost']}  joined {counted['joined']}   recoveries  {len(recoveries)}{took}   "
            f"steps computed twice  {counted['steps_computed_twice']}",
            highlight=False,
        )
    if "staleness" in summary:
        stale, recoveries = summary["staleness"], summary["recoveries"]
        took = f", in {max(one['seconds'] for one in recoveries):.1f} s at most" if recoveries else ""
        out.print(
            f"staleness  mean {stale['mean']:.2f}  max {stale['max']}   recoveries  {len(recoveries)}{took}",
            highlight=False,
        )
    if path is not None:
        out.print(f"run directory  {path}", highlight=False, soft_wrap=True)


for _entry in offered("task"):
    add_task_command(train_app, _entry, _Common, _train, f"Train {_entry.help}.")
add_trainings(train_app)
