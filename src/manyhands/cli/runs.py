"""What every command that makes runs offers besides: to continue one, to look at it, and what is left of it.

What other launchers say in the environment, and that the commands which start workers themselves do not read it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from manyhands.cli.command_options import option, write_json
from manyhands.data.store.atomic import write_atomically
from manyhands.errors import ManyhandsError
from manyhands.observe.draw import paper
from manyhands.observe.draw.charts import Series, line_chart
from manyhands.places.external.specification import EVALUATOR, ClusterSpec
from manyhands.places.place import TF_CONFIG, ignore_environment
from manyhands.workloads.builtin_task import TaskTable
from manyhands.workloads.compiled_workload import TableRows

if TYPE_CHECKING:
    from manyhands.lab.compare.comparison import Progress
    from manyhands.places.local.signals import SignalEnding

Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of every command that trains."""

    out: Path | None = option(None, "Run directory.", shown="runs/TASK-TIME")
    resume: Resume = False
    checkpoint_every: int | None = option(None, "Steps between checkpoints.")
    watchdog: float = option(60.0, "Seconds without progress until the blocking process is named; 0: never.")
    dashboard: bool = option(False, "Show the run on a live page.", "--dashboard")
    dashboard_port: int = option(0, "Port of the live page on 127.0.0.1; 0: any free port.")
    tensorboard: Path | None = option(None, "Write event files for TensorBoard to this directory.")


def live_page(
    asked: RunOptions, out: Path, task: str, strategy: str, workers: int = 1
) -> AbstractContextManager[object]:
    """The run's page while it goes on, where one is asked for; it has room for so many workers from the beginning."""
    if not asked.dashboard:
        return nullcontext()
    from manyhands.cli.look_commands import serving
    from manyhands.observe.analyse.follow import coming_run
    from manyhands.serving.hosting import LOOPBACK

    farewell = f"The run has ended; manyhands show {out} opens this page again."
    return serving(coming_run(out, task, strategy, workers), LOOPBACK, asked.dashboard_port, farewell)


def live_tensorboard(asked: RunOptions, out: Path) -> AbstractContextManager[object]:
    from manyhands.observe.draw.tensorboard import LiveTensorboard

    return LiveTensorboard(out, asked.tensorboard) if asked.tensorboard is not None else nullcontext()


def leave_report(out: Path, table: TaskTable | None = None) -> None:
    """The run's report, and the picture of a task's table; a disk that takes neither fails no run that ended well."""
    from manyhands.observe.draw.page import write_report

    try:
        print(f"report  {write_report(out)}")
        if table is not None and table.curves:
            print(f"picture  {_write_picture(out, table)}")
    except ManyhandsError as error:
        print(f"manyhands: the report could not be written: {error}", file=sys.stderr)


@contextmanager
def ended_by_signal(kept: Callable[[], str] | None = None) -> Iterator[SignalEnding]:
    """While this lasts, Ctrl-C, SIGTERM and SIGHUP end the command; `kept` then says what is left, if nobody has."""
    from manyhands.places.local.signals import ending, signal_of

    try:
        with ending() as end:
            yield end
    except (KeyboardInterrupt, SystemExit) as stop:
        number = signal_of(stop)
        if number is None:
            raise
        number = end.signal or number  # the first that came
        if kept is not None:
            print(f"manyhands: ended by {number.name}; {kept()}", file=sys.stderr)
        raise typer.Exit(128 + number) from None


_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ignored_variables(environment: Mapping[str, str]) -> list[str]:
    """One sentence for each launcher whose variables are set, with what to do instead."""
    sentences = []
    if environment.get(TF_CONFIG):
        sentences.append(
            "TF_CONFIG is set and not read: workers are started on this host alone, as many as --workers says; "
            "`manyhands train` with a task such as digits, or a script that calls mh.fit(), is the role that it names"
        )
    found = [name for name in _TORCHRUN if environment.get(name)]
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE"} <= set(found):
        sentences.append(
            f"{', '.join(found) or 'TORCHELASTIC_RUN_ID'} {'are' if len(found) > 1 else 'is'} set, as by torchrun, and "
            "not read: this command starts workers of its own; to train on the processes of torchrun, have it start "
            "`manyhands train` with a task such as digits, or a script that calls mh.fit() or mh.join()"
        )
    return sentences


def leave_if_evaluator() -> None:
    """End a process that TF_CONFIG makes an evaluator, with a sentence and in peace: it takes no part in a run."""
    text = os.environ.get(TF_CONFIG, "").strip()
    if text and text != "{}" and ClusterSpec.from_tf_config(text)[1].type == "evaluator":
        print(f"manyhands: {EVALUATOR}", file=sys.stderr)
        raise typer.Exit


def start_own_workers() -> None:
    """From now on `fit` starts workers of its own, whoever started this process; say on stderr what is not read."""
    for sentence in ignored_variables(os.environ):
        print(f"manyhands: {sentence}", file=sys.stderr)
    ignore_environment()


def _write_picture(run: Path, table: TaskTable) -> Path:
    path = run / "picture.html"
    series = [Series(name=one.name, xs=one.xs, ys=one.ys, dots=one.dots) for one in table.curves]
    (middle,) = (one.ys for one in table.curves if one.name == table.against)
    apart = [
        Series(name=one.name, xs=one.xs, ys=[y - other for y, other in zip(one.ys, middle, strict=True)])
        for one in table.curves
    ]
    charts = (
        line_chart(series, title="The points of each worker, and the lines", x_label="x", y_label="y"),
        line_chart(apart, title=f"How far each line is above “{table.against}”", x_label="x", y_label="y"),
    )
    rows = paper.data_table(table.head, table.rows, title="The numbers")
    headings = ("The lines", "Differences of the lines")
    sections = [paper.section(f"chart-{n}", headings[n], chart) for n, chart in enumerate(charts)]
    page = paper.document(table.title, [*sections, paper.section("rows", "In numbers", rows, "wide")])
    write_atomically(path, [page.encode()])
    return path


_WIDTH = 110  # of a table in a file or a pipe


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Say what goes on: a line that changes on a terminal, and a line for each change elsewhere."""
    console = Console(stderr=True)
    status = console.status("starting")

    def say(line: str) -> None:
        if console.is_terminal:
            status.update(line)
        else:
            print(line, file=sys.stderr, flush=True)

    with status:
        yield say


@contextmanager
def progress_line(
    before: str = "", form: str = "run {next} of {runs}"
) -> Iterator[Callable[[Progress], None]]:
    """The same of progress: how far it is, what runs, and the time left where it is known."""
    with status_line() as say:

        def report(one: Progress) -> None:
            left = "" if one.seconds_left is None else f" · about {one.seconds_left:.0f} s left"
            how_far = form.format(done=one.done, next=one.done + 1, runs=one.runs)
            say(f"{before}{how_far} · {one.current}{left}")

        yield report


def keep_findings(
    out: Path,
    json_file: Path | None,
    figures: Mapping[str, Any],
    page: Callable[[str, Mapping[str, str]], str],
) -> Path:
    """Write report (by `page`) and figures into `out` and to `json_file`; the report's path."""
    from manyhands.lab.compare.compare_report import machine

    command, facts = shlex.join(["manyhands", *sys.argv[1:]]), machine()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.html"
    write_atomically(path, [page(command, facts).encode()])
    for file in (out / "figures.json", json_file):
        write_json(file, {**figures, "command": command, "machine": facts})
    return path


def leave_findings(
    out: Path,
    json_file: Path | None,
    tables: Sequence[Table],
    sentences: Sequence[str],
    figures: Mapping[str, Any],
    page: Callable[[str, Mapping[str, str]], str],
) -> None:
    """Write report (by `page`) and figures into `out` and to `json_file`; print the tables and what they show."""
    path = keep_findings(out, json_file, figures, page)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for table in tables:
        console.print(table, highlight=False)
    console.print(" ".join(sentences), highlight=False, markup=False)
    console.print(f"report  {path}", highlight=False, markup=False, soft_wrap=True)


def print_rows(part: str | TableRows) -> None:
    """A line, or a table; as they are, for a word may look like markup."""
    console = Console(highlight=False)
    if isinstance(part, str):
        console.print(part, markup=False, soft_wrap=True)
        return
    from manyhands.observe.draw.time_table import plain_table

    console.print(plain_table(part.head, part.rows, words=1 if part.numbers else len(part.head)))
