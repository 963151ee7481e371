"""`manyhands study` lists questions about distributed training; `manyhands study NAME` answers one by an experiment."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from manyhands.cli.command_options import (
    add_workload_command,
    command_anywhere,
    command_group,
    fresh_directory,
    json_option,
    option,
)
from manyhands.cli.program import spare_the_compiler
from manyhands.lab.studies.registry import STUDIES, load_study
from manyhands.lab.studies.study import Study, StudyAnswer
from manyhands.observe.draw import paper


@dataclass(frozen=True, kw_only=True)
class _StudyOptions:
    out: Path | None = option(None, "Directory of the page and the figures.", shown="runs/study-NAME-TIME")
    json: Path | None = json_option()


def _run(study: Study[Any], given: Mapping[str, Any], common: _StudyOptions) -> None:
    from manyhands.cli.runs import ended_by_signal, leave_findings, start_own_workers, status_line
    from manyhands.data.store.atomic import require_empty
    from manyhands.observe.draw.time_table import words_table

    options = study.options_type(**given)
    out = common.out or fresh_directory(f"study-{study.name}")
    require_empty(out)
    spare_the_compiler()
    start_own_workers()
    with (
        ended_by_signal(lambda: f"start again with: {command_anywhere(sys.argv)}"),
        status_line() as say,
    ):
        answer = study.run(options, say)
    leave_findings(
        out,
        common.json,
        [words_table(table.title, table.head, table.rows) for table in answer.tables],
        answer.sentences,
        {"study": study.name, **answer.figures, "told": answer.sentences},
        partial(study_page, study.question, answer),
    )


def study_page(question: str, answer: StudyAnswer, command: str, facts: Mapping[str, str]) -> str:
    """One self-contained page: what was found, each chart, each table, and how it was made."""
    charts = [
        paper.section(f"chart-{n}", chart.title, chart.picture + _explained(chart.explained), "broad")
        for n, chart in enumerate(answer.charts)
    ]
    tables = [
        paper.section(
            f"table-{n}", table.title, paper.data_table(table.head, table.rows, title=table.title), "wide"
        )
        for n, table in enumerate(answer.tables)
    ]
    sections = [
        paper.findings_section(answer.sentences),
        *charts,
        *tables,
        paper.made_section(command, facts),
    ]
    return paper.document(question, sections)


def _explained(sentence: str) -> str:
    return paper.quiet(sentence) if sentence else ""


def _list(context: typer.Context) -> None:
    if context.invoked_subcommand is not None:
        return
    widest = max(map(len, STUDIES))
    for name in STUDIES:
        typer.echo(f"{name:<{widest}}  {load_study(name).question}")
    typer.echo(
        f"\nmanyhands study {next(iter(STUDIES))} answers the first; --help behind a name lists its options."
    )


def _made(names: Sequence[str]) -> typer.Typer:
    made = command_group(no_args_is_help=False, invoke_without_command=True, callback=_list)
    for name in names:
        study = load_study(name)
        processes = f"\n\nIt starts {', '.join(study.processes)}." if study.processes else ""
        help_text = f"{study.question}{processes}"
        add_workload_command(made, name, study.options_type, _StudyOptions, partial(_run, study), help_text)
    return made


study_app = _made(tuple(STUDIES))
