"""`manyhands train TASK`: one command per task, its own options beside the common ones.

A workload with a training of its own says what is trained and printed: see `workloads/compiled_workload.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from manyhands.cli import command_options, runs
from manyhands.cli.command_options import AllowOverload, Seed, json_option, option, task_commands, write_json
from manyhands.cli.lazy_commands import usual_workers
from manyhands.cli.runs import RunOptions
from manyhands.errors import ManyhandsError, UserError, format_bytes, num_of
from manyhands.places.place import find_place
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy
from manyhands.workloads.builtin_task import BuiltinTask, TaskEnd, TaskTable
from manyhands.workloads.compiled_workload import CompiledWorkload
from manyhands.workloads.registry import offered
from manyhands.workloads.task_options import chosen

if TYPE_CHECKING:
    from manyhands.engine.options import Options
    from manyhands.engine.run import Run
    from manyhands.engine.training import Keeping
    from manyhands.task import Task


@dataclass(frozen=True, kw_only=True)
class _TrainOptions(RunOptions):
    strategy: str = option("mirrored", f"{', '.join(STRATEGIES)}; with settings, such as 'ps servers=2'.")
    workers: int | None = option(
        None, "Processes on this host, or those of torchrun.", shown="2, or what the strategy needs"
    )
    plan: Path | None = option(
        None, "Train as `manyhands plan` chose: the file of its --json.", metavar="FILE", shown=False
    )
    cluster: str | None = option(
        None, "Start the processes with Ray: ray (a new cluster), auto, ray://HOST:PORT or HOST:PORT."
    )
    min_workers: int | None = option(
        None, "Fewest workers to continue with; for 'allreduce elastic=yes', or ps with --cluster."
    )
    max_workers: int | None = option(None, "With --cluster and ps: most workers to grow to.")
    steps: int | None = option(None, "Global batches to train.")
    epochs: int | None = option(None, "Passes over the data, instead of --steps.")
    rounds: int | None = option(None, "Rounds to train, for strategies that count rounds.")
    seed: Seed = 0
    device: str = option("cpu", "cpu or cuda; with cuda, workers take the GPUs in order.")
    autocast: bool = option(False, "Compute in bfloat16 where it is safe.", "--autocast")
    float16: bool = option(False, "Compute in float16 where it is safe, with a scaled loss.", "--float16")
    fp8: bool = option(False, "As --autocast, and multiply in 8 bits in the layers of blocks.", "--fp8")
    compile_model: bool | None = option(
        None, "Use torch.compile; by default, on a GPU.", "--compile/--no-compile"
    )
    recompute: bool = option(
        False, "Compute activations again in backward, to need less memory.", "--recompute"
    )
    evaluate_every: int | None = option(None, "Steps between evaluations.")
    restore_best: bool = option(
        False, "End with the weights of the best evaluation, not of the last step.", "--restore-best"
    )
    log: str = option(
        "", "Log these of each step: lr,grad_norm, or one of them.", metavar="NAMES", shown=False
    )
    profile: Path | None = option(
        None, "Trace three steps of each worker into this folder, with torch.profiler.", metavar="DIR"
    )
    allow_overload: AllowOverload = False
    slow: str | None = option(None, "Slow down a worker: worker=1,factor=5[,probability=0.1][,from=400].")
    progress: str = option("auto", "bar, lines or none; auto: a bar in a terminal, lines elsewhere.")
    tls: Path | None = option(
        None,
        "Between hosts: this host's folder from `manyhands certificates`; or MANYHANDS_TLS.",
        metavar="DIR",
    )
    insecure: bool = option(
        False, "Between hosts: send everything unencrypted, on a trusted network.", "--insecure"
    )
    json_file: Path | None = option(None, "Write the summary to this file.", "--json")
    csv_file: Path | None = option(None, "Write steps and evaluations to this file.", "--csv")


def _train(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _TrainOptions) -> None:
    from manyhands.engine.fitting import fit

    common = _as_planned(entry.name, task_options, common)
    task, place = entry.build(**task_options), find_place()
    leads = place.leads  # the run directory, the page and what is printed at the end are its
    usual = usual_workers(Strategy.parse(common.strategy))
    workers = common.workers if common.workers is not None or place.world is not None else usual
    out = common.out or (
        command_options.fresh_directory(entry.name) if leads else Path("runs")
    )  # the leader's to keep
    if leads:
        command_options.check_writable(common.json_file)
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
        options=_fit_options(common, out, leads),
    )
    if not leads:
        with runs.ended_by_signal():
            fit_here()
        return
    try:
        page = runs.live_page(common, out, entry.name, common.strategy, workers or place.world or usual)
        # without a word of its own, for fit has said what is kept, and how to continue
        with runs.ended_by_signal(), page, runs.live_tensorboard(common, out):
            run = fit_here()
    except UserError:
        raise
    except ManyhandsError:
        runs.leave_report(out)  # it shows what went wrong, and to whom
        raise
    end_run(run, out, common.json_file, task_table(entry, task, run))
    if run.path is not None:
        command_options.print_next(
            where_the_time_goes=("explain", out),
            the_page_of_the_run=("show", out),
            the_model_over_HTTP=("serve", out),
        )


def _as_planned(task: str, task_options: Mapping[str, Any], common: _TrainOptions) -> _TrainOptions:
    """What was asked for, with the strategy and the workers of --plan where that is given."""
    if common.plan is None:
        return common
    from manyhands.foresight.plan.plan_file import planned
    from manyhands.lab.sweep.trials import flag

    if common.strategy != "mirrored" or common.workers is not None:
        raise UserError("--plan says the strategy and the workers; leave out --strategy and --workers")
    given = {flag(name).removeprefix("--"): str(value) for name, value in task_options.items()}
    strategy, workers = planned(common.plan, task, given)
    return replace(common, strategy=strategy, workers=workers)


def _fit_options(common: _TrainOptions, out: Path, leads: bool) -> Options:
    from manyhands.engine.callbacks import Callback
    from manyhands.engine.loggers import CsvLogger
    from manyhands.engine.options import Options, Slowdown
    from manyhands.engine.profiler import TorchProfiler

    callbacks: list[Callback] = []
    if common.csv_file is not None and leads:
        callbacks.append(CsvLogger(common.csv_file))
    if common.profile is not None:
        callbacks.append(TorchProfiler(common.profile))
    return Options(
        evaluate_every=common.evaluate_every,
        checkpoint_every=common.checkpoint_every,
        allow_overload=common.allow_overload,
        resume_command=command_options.command_to_resume(sys.argv, out),
        watchdog_s=common.watchdog,
        slow=Slowdown.parse(common.slow) if common.slow is not None else None,
        autocast=_autocast(common),
        restore_best=common.restore_best,
        log=[name.strip() for name in common.log.split(",")] if common.log else (),
        compile=common.compile_model,
        recompute=common.recompute,
        progress=common.progress,
        tls=common.tls,
        insecure=common.insecure,
        min_workers=common.min_workers,
        max_workers=common.max_workers,
        callbacks=callbacks,
    )


def _autocast(common: _TrainOptions) -> bool | str:
    from manyhands.engine.options import FP8, HALF

    if common.float16 and common.fp8:
        raise UserError("--float16 and --fp8 were both given; leave out one")
    return HALF if common.float16 else FP8 if common.fp8 else common.autocast


def _length(entry: BuiltinTask[Any], common: _TrainOptions) -> dict[str, int | None]:
    asked = {"steps": common.steps, "epochs": common.epochs, "rounds": common.rounds}
    if any(value is not None for value in asked.values()):
        return asked
    if Strategy.parse(common.strategy).facts.counts_rounds:
        return {}
    return {"steps": entry.steps, "epochs": entry.epochs}


def task_table(entry: BuiltinTask[Any], task: Task, run: Run) -> TaskTable | None:
    """What the task itself shows at the end of a run; None where it has nothing to show of one like this."""
    if entry.table is None or Strategy.parse(run.summary["strategy"]).facts.counts_rounds:
        return None
    return entry.table(task, TaskEnd(model=run.model, workers=run.summary["workers"]))


def end_run(run: Run, out: Path, json_file: Path | None, table: TaskTable | None = None) -> None:
    from manyhands.observe.draw.time_table import end_table, words_table

    for note in run.summary["notes"]:
        print(f"manyhands: {note}", file=sys.stderr)
    _print_end(run.summary, run.path, end_table(run.summary))
    summary = dict(run.summary)
    if table is not None:
        Console().print(words_table(table.title, table.head, table.rows))
        summary["table"] = {"title": table.title, "head": table.head, "rows": table.rows}
    if run.path is not None:  # else a node of a cluster has it
        runs.leave_report(out, table)
    write_json(json_file, summary)  # last, for a disk that does not take it must not hide the rest


def _print_end(summary: Mapping[str, Any], path: Path | None, table: Any) -> None:
    from manyhands.observe.analyse.remarks import speed_words

    out = Console(highlight=False)
    final = "  ".join(f"{name} {value:.4f}" for name, value in summary["final"].items())
    workers, steps = num_of(summary["workers"], "worker"), num_of(summary["steps"], "step")
    out.print(
        f"{summary['task']} · {summary['strategy']} · {workers} · {steps} in "
        f"{summary['seconds']:.1f} s · {summary['samples_per_s']:,.0f} samples/s"
    )
    if speed := speed_words(summary):
        out.print(f"speed  {speed}", soft_wrap=True)
    out.print(f"final  {final}")
    out.print(table)
    if summary["bytes_sent"]:
        parts = summary["sent"].items()
        said = "  ".join(f"{name} {format_bytes(sent['bytes_sent'])}" for name, sent in parts)
        out.print(f"sent  {said}")
    recoveries = summary.get("recoveries") or []
    took = f", in {max(one['seconds'] for one in recoveries):.1f} s at most" if recoveries else ""
    recovered = f"recoveries  {len(recoveries)}{took}"
    if summary.get("membership", {}).get("changes"):
        counted = summary["membership"]
        out.print(
            f"workers  lost {counted['lost']}  joined {counted['joined']}   {recovered}   "
            f"steps computed twice  {counted['steps_computed_twice']}"
        )
    if "staleness" in summary:
        stale = summary["staleness"]
        out.print(f"staleness  mean {stale['mean']:.2f}  max {stale['max']}   {recovered}")
    if path is not None:
        out.print(f"run directory  {path}", soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class _KeptRun(RunOptions):
    out: Path | None = option(None, "Directory of the run.", metavar="DIR", shown="runs/TASK-TIME")
    allow_overload: AllowOverload = False
    json_file: Path | None = json_option("Write the summary to this file.")


def _train_workload(workload: CompiledWorkload[Any], given: dict[str, Any], asked: _KeptRun) -> None:
    runs.start_own_workers()
    from manyhands.data.store.atomic import write_json as write_file
    from manyhands.data.store.rundir import RunDirectory
    from manyhands.observe.draw.bars import Bars

    options = chosen(workload.name, workload.options_type, given)
    out = asked.out or command_options.fresh_directory(workload.name)
    keep, model = _keeping(asked, out, workload.files), out / workload.files[0]

    def kept() -> str:
        result = f"the partial result is in {model}" if model.exists() else "there is no result yet"
        again = f"start again with: {command_options.own_command(sys.argv)}"
        how = f"continue with: {keep.options.resume_command}" if RunDirectory.is_one(out) else again
        return f"{result}; {how}"

    with (
        runs.ended_by_signal(kept) as end,
        runs.live_page(asked, out, workload.name, options.strategy, options.workers),
        runs.live_tensorboard(asked, out),
        Bars() as bars,
    ):
        ended = workload.train(options, keep, bars)
    if ended.is_summary_of_run and not ended.interrupted:
        write_file(out / "summary.json", ended.summary)
    write_json(asked.json_file, ended.summary)
    for part in ended.shown:
        runs.print_rows(part)
    for note in ended.notes:
        print(f"manyhands: {note}", file=sys.stderr)
    if ended.interrupted:
        how = f"continue with: {keep.options.resume_command}"
        print(f"manyhands: ended by {end.name}; {ended.interrupted}; {how}", file=sys.stderr)
        raise typer.Exit(end.status)
    runs.leave_report(out)
    command_options.print_next(**ended.next)


def _keeping(asked: _KeptRun, out: Path, own_files: tuple[str, ...]) -> Keeping:
    """Where the run is kept; UserError where it cannot be, before anything is read."""
    from manyhands.data.store.rundir import ON_COMMAND_LINE, RunDirectory, require_free
    from manyhands.engine.options import Options
    from manyhands.engine.training import Keeping

    if asked.resume:
        RunDirectory.open(out, lock=False)
    else:
        require_free(out, frozenset(own_files), ON_COMMAND_LINE)
    options = Options(
        checkpoint_every=asked.checkpoint_every,
        watchdog_s=asked.watchdog,
        resume_command=command_options.command_to_resume(sys.argv, out),
        tells_interruption=False,  # this command does, and says what there is of a result
        own_files=frozenset(own_files),
    )
    return Keeping(out=out, resume=asked.resume, options=options)


train_app = task_commands(_train, "Train {help}.", callback=runs.leave_if_evaluator)
for _workload in offered("training"):
    _run = partial(_train_workload, _workload)
    command_options.add_workload_command(
        train_app, _workload.name, _workload.options_type, _KeptRun, _run, _workload.help
    )
