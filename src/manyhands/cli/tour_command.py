"""`manyhands tour [LESSON]`: list the lessons, or go through one step by step."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.markdown import Markdown

from manyhands.cli.command_options import argument, fresh_directory, from_options, option
from manyhands.errors import UserError
from manyhands.lab.tour.lesson import Lesson, LessonCommand, lesson_numbered, lessons, shown_in_terminal


@dataclass(frozen=True)
class _TourOptions:
    lesson: int | None = argument(None, "Number of the lesson; without it, list all.")
    yes: bool = option(False, "Run every command without asking.", "--yes")
    exercise: Path | None = option(None, "Only write the lesson's exercise to this file.")
    solution: bool = option(False, "Show the lesson's solution.", "--solution")


@from_options
def tour_command(asked: _TourOptions) -> None:
    if asked.lesson is None:
        if asked.exercise is not None or asked.solution:
            raise UserError("tour: give the number of a lesson, such as `manyhands tour 3 --solution`")
        for one in lessons():
            typer.echo(f"{one.number}  {one.title}")
        typer.echo("\nmanyhands tour 1 starts the first lesson.")
        return
    found = lesson_numbered(asked.lesson)
    if asked.exercise is not None:
        _write(asked.exercise, found)
    elif asked.solution:
        for old, new in found.changes:
            typer.echo(f"- {old}\n+ {new}")
        typer.echo()
        _show(found.answer)
    else:
        _walk(found, asks=not asked.yes and sys.stdin.isatty())


def _walk(lesson: Lesson, *, asks: bool) -> None:
    """Show a lesson step by step; what its commands write is in a new folder, so that it can be taken again."""
    place = fresh_directory(f"tour-{lesson.number}")
    _show(f"# {lesson.number}. {lesson.title}")
    for step in lesson.steps:
        if not isinstance(step, LessonCommand):
            _show(f"{step}\n")
            continue
        typer.echo(str(step))
        if asks and not typer.confirm("run it?", default=True):
            continue
        place.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([sys.executable, "-m", "manyhands", *step.arguments], cwd=place, check=False)
        if done.returncode:
            raise typer.Exit(done.returncode)
        typer.echo()
    if place.exists():
        typer.echo(f"The commands ran in {place}, where their runs are.\n")
    _show(f"**Exercise.** {lesson.question}\n")
    typer.echo(f"manyhands tour {lesson.number} --exercise mine.py writes the file to change,")
    typer.echo(f"manyhands tour {lesson.number} --solution shows what to change in it.")


def _write(path: Path, lesson: Lesson) -> None:
    try:
        with path.open("x") as file:
            file.write(lesson.exercise)
    except FileExistsError:
        raise UserError(f"--exercise {path}: already exists; choose another file, or remove it") from None
    except OSError as error:
        raise UserError(f"--exercise {path}: cannot be written: {error.strerror}") from error
    _show(lesson.question)
    typer.echo(f"Change {path}, and run it: python {path}")


def _show(page: str) -> None:
    """Print part of a page as a terminal shows Markdown: wrapped, with headings, tables and emphasis."""
    Console(highlight=False).print(Markdown(shown_in_terminal(page)))
    typer.echo()
