"""`manyhands sweep TASK`: every combination of some settings, over the cores there are, as a table and a picture."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from manyhands.cli import command_options
from manyhands.cli.command_options import json_option, option, print_next, task_commands
from manyhands.cli.command_process import child_command
from manyhands.cli.runs import Resume, ended_by_signal, leave_findings, progress_line, start_own_workers
from manyhands.errors import UserError, nearest
from manyhands.lab.compare.comparison import check_separators
from manyhands.lab.sweep.trials import SweepPlan, SweepSetting, parse_values
from manyhands.workloads.builtin_task import BuiltinTask
from manyhands.workloads.task_options import Option

if TYPE_CHECKING:
    from manyhands.lab.sweep.sweep_report import SweepRow

_AROUND = (0.25, 1.0, 4.0)  # times the usual rate, where nothing was given several values


@dataclass(frozen=True, kw_only=True)
class _SweepOptions:
    strategy: str = option("single", "One or more strategies, separated by semicolons.")
    workers: str = option("1", "Workers per run; one or more numbers, separated by commas.")
    seed: str = option("0", "Fixes all randomness; one or more, separated by commas.")
    metric: str | None = option(None, "Metric to rank by.", shown="the task's first, or evaluation_loss")
    steps: int | None = option(None, "Global batches per run.")
    epochs: int | None = option(None, "Passes over the data, instead of --steps.", shown="half of train's")
    jobs: int | None = option(None, "Runs at the same time.", shown="as many as the cores allow")
    out: Path | None = option(None, "Directory for all runs.", shown="runs/sweep-TASK-TIME")
    resume: Resume = False
    json: Path | None = json_option()


def _sweep(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _SweepOptions) -> None:
    from manyhands.lab.sweep.run_sweep import open_sweep, run_sweep, usable_cores

    if common.jobs is not None and common.jobs < 1:
        raise UserError(f"--jobs {common.jobs} must be at least 1")
    plan = _plan(entry, task_options, common)
    for setting in plan.settings:
        asked = task_options.get(setting.name, ())
        if setting.name == "learning_rate" and len(setting.values) > 1 and len(asked) < 2:
            print(
                "manyhands: no option has several values, so the learning rate varies: --learning-rate "
                f"{','.join(setting.values)}; every option takes several, separated by commas",
                file=sys.stderr,
            )
    out = common.out or command_options.fresh_directory(f"sweep-{entry.name}")
    open_sweep(out, plan, resume=common.resume)
    again = command_options.command_to_resume(sys.argv, out)
    with (
        ended_by_signal(lambda: f"what is done is kept in {out}; continue with: {again}"),
        progress_line(form="{done} of {runs} done") as report,
    ):
        rows = run_sweep(plan, out, child_command, cores=usable_cores(), jobs=common.jobs, on_progress=report)
    _leave(plan, rows, out, common.json)
    if any(row.failure for row in rows):
        raise typer.Exit(1)


def _plan(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _SweepOptions) -> SweepPlan:
    """The grid, all of whose values were looked at; UserError for the first that makes no sense."""
    from manyhands.engine.request import Length
    from manyhands.strategy import Strategy

    check_separators("--strategy", common.strategy)
    strategies = [str(Strategy.parse(text)) for text in parse_values(common.strategy, ";")]
    settings = [SweepSetting(name=name, values=values) for name, values in task_options.items()]
    settings.append(SweepSetting(name="strategy", values=tuple(strategies)))
    for name, least in (("workers", 1), ("seed", 0)):
        values = parse_values(getattr(common, name), ",")
        for value in values:
            if not value.isdecimal() or int(value) < least:
                raise UserError(f"--{name} {value} must be an integer of at least {least}")
        settings.append(SweepSetting(name=name, values=values))
    if not any(len(setting.values) > 1 for setting in settings):
        settings.insert(0, _rates(entry, settings))
        settings = [
            one for place, one in enumerate(settings) if one.name not in [s.name for s in settings[:place]]
        ]
    parse = {option.name: option.parse for option in entry.options}
    task = entry.build(**{name: parse[name](values[0]) for name, values in task_options.items()})
    for text in strategies:
        for workers in next(one.values for one in settings if one.name == "workers"):
            Strategy.parse(text).check(int(workers), "cpu", compiled=task.compiled)
    Length(steps=common.steps, epochs=common.epochs).require_one()
    names = [*task.metrics, "evaluation_loss", "loss"] if task.evaluation is not None else ["loss"]
    if common.metric is not None and common.metric not in names:
        raise UserError(
            f"--metric {common.metric}: the task has no such metric; {nearest(common.metric, names)}"
        )
    return SweepPlan(
        task=entry.name,
        settings=tuple(settings),
        metric=common.metric or names[0],
        common={
            f"--{name}": str(value)
            for name, value in command_options.half_length(entry, common).items()
            if value
        },
    )


def _rates(entry: BuiltinTask[Any], settings: list[SweepSetting]) -> SweepSetting:
    """Where nothing varies: learning rates around the one that was given, or the usual one."""
    given = next((one.values[0] for one in settings if one.name == "learning_rate"), None)
    usual = next((option.default for option in entry.options if option.name == "learning_rate"), None)
    middle = given if given is not None else usual
    if middle is None:
        raise UserError("nothing varies; give an option several values, separated by commas")
    values = tuple(f"{float(middle) * factor:g}" for factor in _AROUND)
    return SweepSetting(name="learning_rate", values=values)


def _values(option: Option, text: str) -> tuple[str, ...]:
    """An option's values, each of which the option takes; a path may hold commas."""
    texts = (text,) if option.kind is Path else parse_values(text, ",")
    for one in texts:
        option.parse(one)
    return texts


def _leave(plan: SweepPlan, rows: list[SweepRow], out: Path, json_file: Path | None) -> None:
    from manyhands.lab.sweep.sweep_report import best_first, sentences, sweep_cells, sweep_page
    from manyhands.observe.draw.time_table import words_table

    ranked, found = best_first(rows, plan.metric), sentences(plan, rows)
    leave_findings(
        out,
        json_file,
        [words_table(f"{plan.task}, by {plan.metric}", *sweep_cells(plan, rows))],
        found,
        {**plan.to_dict(), "rows": [row.to_dict() for row in ranked], "told": found},
        lambda command, facts: sweep_page(plan, rows, found, command, facts),
    )
    if ranked and ranked[0].done:
        best = ranked[0].trial
        print_next(
            the_best_run_for_longer=("train", plan.task, *best.words()),
            its_page=("show", out / "runs" / best.folder),
        )


sweep_app = task_commands(
    _sweep,
    "Sweep settings of {help}; every option takes several values, separated by commas.",
    parse=_values,
    callback=start_own_workers,
)
