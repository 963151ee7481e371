"""`manyhands sweep TASK`: every combination of some settings, over the cores there are, as a table and a picture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.command_options import (
    add_task_command,
    check_writable,
    command_to_resume,
    fresh_directory,
    half,
    print_next,
)
from manyhands.cli.command_process import child_command
from manyhands.cli.leaving import Findings, leave_findings, status_line, time_left
from manyhands.cli.program import spare_the_compiler
from manyhands.cli.runs import Resume, ended_by_signal, start_own_workers
from manyhands.errors import UserError, nearest
from manyhands.lab.compare.comparison import check_separators
from manyhands.lab.sweep.trials import SweepPlan, SweepSetting, parse_values
from manyhands.workloads.registry import offered
from manyhands.workloads.task_options import Option
from manyhands.workloads.tasks.builtin import BuiltinTask

if TYPE_CHECKING:
    from manyhands.lab.sweep.run_sweep import SweepProgress
    from manyhands.lab.sweep.sweep_report import SweepRow
    from manyhands.task import Task

__all__ = ["sweep_app"]

sweep_app = typer.Typer(
    help="Train a built-in task with every combination of some settings, over the cores there are.",
    no_args_is_help=True,
    callback=start_own_workers,
)

_AROUND = (0.25, 1.0, 4.0)  # times the usual rate, where nothing was given several values


@dataclass(frozen=True, kw_only=True)
class _Common:
    """The options of every sweep."""

    strategy: Annotated[str, typer.Option(help="One or several, separated by semicolons.")] = "single"
    workers: Annotated[str, typer.Option(help="Workers of each run; several, separated by commas.")] = "1"
    seed: Annotated[str, typer.Option(help="Fixes everything random; several, separated by commas.")] = "0"
    metric: Annotated[
        str | None,
        typer.Option(
            help="What the runs are judged by.", show_default="the task's first, or evaluation_loss"
        ),
    ] = None
    steps: Annotated[int | None, typer.Option(help="Global batches of each run.")] = None
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the data, instead of --steps.", show_default="half of train's"),
    ] = None
    jobs: Annotated[
        int | None, typer.Option(help="Runs at once.", show_default="as many as there are cores for")
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Directory of all runs.", show_default="runs/sweep-TASK-TIME")
    ] = None
    resume: Resume = False
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None


def _sweep(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _Common) -> None:
    # Imported here so that help texts do not wait for torch.
    from manyhands.lab.sweep.run_sweep import open_sweep, run_sweep, usable_cores

    spare_the_compiler()
    check_writable(common.json)
    if common.resume and common.out is None:
        raise UserError("--resume needs --out, the directory of the sweep to go on with")
    if common.jobs is not None and common.jobs < 1:
        raise UserError(f"--jobs {common.jobs} must be at least 1")
    plan = _plan(entry, task_options, common)
    _tell_chosen(plan, task_options)
    out = common.out or fresh_directory(f"sweep-{entry.name}")
    open_sweep(out, plan, resume=common.resume)
    go_on = command_to_resume(sys.argv, out)
    with (
        ended_by_signal(lambda: f"what is done is kept in {out}; go on with: {go_on}"),
        _progress() as tell,
    ):
        rows = run_sweep(plan, out, child_command, cores=usable_cores(), jobs=common.jobs, tell=tell)
    _leave(plan, rows, out, common.json)
    if any(row.failure for row in rows):
        raise typer.Exit(1)


def _plan(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _Common) -> SweepPlan:
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
    first = {name: _typed(entry, name, values[0]) for name, values in task_options.items()}
    task = entry.build(**first)
    for text in strategies:
        for workers in next(one.values for one in settings if one.name == "workers"):
            Strategy.parse(text).check(int(workers), "cpu", compiled=task.compiled)
    Length(steps=common.steps, epochs=common.epochs).require_one()
    length = {"steps": common.steps, "epochs": common.epochs}
    if common.steps is None and common.epochs is None:
        length = {"steps": half(entry.steps), "epochs": half(entry.epochs)}
    return SweepPlan(
        task=entry.name,
        settings=tuple(settings),
        metric=_metric(task, common.metric),
        common={f"--{name}": str(value) for name, value in length.items() if value},
    )


def _tell_chosen(plan: SweepPlan, asked: Mapping[str, Sequence[str]]) -> None:
    """Where nobody said what varies: say what was chosen, and how to choose."""
    for setting in plan.settings:
        if (
            len(setting.values) > 1
            and setting.name == "learning_rate"
            and len(asked.get(setting.name, ())) < 2
        ):
            text = ",".join(setting.values)
            print(
                f"manyhands: no option has several values, so the learning rate takes some: --learning-rate {text}; "
                "every option takes several, separated by commas",
                file=sys.stderr,
            )


def _typed(entry: BuiltinTask[Any], name: str, text: str) -> Any:
    return next(option for option in entry.options if option.name == name).parse(text)


def _rates(entry: BuiltinTask[Any], settings: list[SweepSetting]) -> SweepSetting:
    """Where nothing varies: learning rates around the one that was given, or the usual one."""
    given = next((one.values[0] for one in settings if one.name == "learning_rate"), None)
    usual = next((option.default for option in entry.options if option.name == "learning_rate"), None)
    middle = given if given is not None else usual
    if middle is None:
        raise UserError("nothing varies; give an option several values, separated by commas")
    return SweepSetting(
        name="learning_rate", values=tuple(f"{float(middle) * factor:g}" for factor in _AROUND)
    )


def _metric(task: Task, asked: str | None) -> str:
    measured = [*task.metrics, "evaluation_loss"] if task.evaluation is not None else []
    names = [*measured, "loss"]
    if asked is not None and asked not in names:
        raise UserError(f"--metric {asked}: the task measures no such metric; {nearest(asked, names)}")
    return asked or names[0]


def _values(option: Option, text: str) -> tuple[str, ...]:
    """An option's values, each of which the option takes; a path may hold commas."""
    texts = (text,) if option.kind is Path else parse_values(text, ",")
    for one in texts:
        option.parse(one)
    return texts


def _leave(plan: SweepPlan, rows: list[SweepRow], out: Path, json_file: Path | None) -> None:
    from manyhands.lab.sweep.sweep_report import best_first, sentences, sweep_cells, sweep_page

    ranked, findings = best_first(rows, plan.metric), sentences(plan, rows)
    head, cells = sweep_cells(plan, rows)
    found = Findings(
        title=f"{plan.task}, by {plan.metric}",
        head=head,
        cells=cells,
        findings=findings,
        figures={**plan.to_dict(), "rows": [row.to_dict() for row in ranked]},
        page=lambda command, facts: sweep_page(plan, rows, findings, command, facts),
    )
    leave_findings(found, out, json_file)
    if ranked and ranked[0].done:
        best = ranked[0].trial
        print_next(
            the_best_run_for_longer=("train", plan.task, *best.words()),
            its_page=("watch", out / "runs" / best.folder),
        )


@contextmanager
def _progress() -> Iterator[Callable[[SweepProgress], None]]:
    with status_line() as say:

        def tell(progress: SweepProgress) -> None:
            far = f"{progress.done} of {progress.trials} done · {progress.running} under way"
            say(f"{far}{time_left(progress.seconds_left)}")

        yield tell


for _entry in offered("task"):
    add_task_command(
        sweep_app,
        _entry,
        _Common,
        _sweep,
        f"Sweep settings of {_entry.help}; every option takes several values, separated by commas.",
        parse=_values,
    )
