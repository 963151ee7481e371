"""`manyhands tour [LESSON]`: list the lessons, or go through one step by step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.errors import UserError

if TYPE_CHECKING:
    from manyhands.lab.tour.lesson import Lesson

__all__ = ["tour_command"]


def tour_command(
    lesson: Annotated[int | None, typer.Argument(help="Its number; without one, all are listed.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Run every command without asking, as where nobody can answer.")
    ] = False,
    exercise: Annotated[
        Path | None, typer.Option(help="Write the lesson's exercise to this file, and do nothing else.")
    ] = None,
    solution: Annotated[bool, typer.Option("--solution", help="Show the lesson's solution.")] = False,
) -> None:
    """Nine short lessons, from one process to federated parties: list them, or run one step by step."""
    from manyhands.lab.tour.lesson import lesson_numbered, lessons

    if lesson is None:
        if exercise is not None or solution:
            raise UserError("tour: say which lesson, as in `manyhands tour 3 --solution`")
        for one in lessons():
            typer.echo(f"{one.number}  {one.title}")
        typer.echo("\nmanyhands tour 1 begins with the first.")
        return
    found = lesson_numbered(lesson)
    if exercise is not None:
        _write(exercise, found)
    elif solution:
        _show_solution(found)
    else:
        _walk(found, asks=not yes and sys.stdin.isatty())


def _walk(lesson: Lesson, *, asks: bool) -> None:
    """Show a lesson step by step; what its commands write is in a new folder, so that it can be taken again."""
    from manyhands.cli.command_options import fresh_directory
    from manyhands.lab.tour.lesson import LessonCommand

    place = fresh_directory(f"tour-{lesson.number}")
    typer.echo(f"{lesson.number}. {lesson.title}\n")
    for step in lesson.steps:
        if not isinstance(step, LessonCommand):
            typer.echo(f"{_plain(step.text)}\n")
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
    typer.echo(f"Exercise: {_plain(lesson.question)}\n")
    typer.echo(f"manyhands tour {lesson.number} --exercise mine.py writes the file to change,")
    typer.echo(f"manyhands tour {lesson.number} --solution shows what to change in it.")


def _write(path: Path, lesson: Lesson) -> None:
    try:
        with path.open("x") as file:
            file.write(lesson.exercise)
    except FileExistsError:
        raise UserError(f"--exercise {path}: is there already; name another file, or remove it") from None
    except OSError as error:
        raise UserError(f"--exercise {path}: cannot be written: {error.strerror}") from error
    typer.echo(f"{_plain(lesson.question)}\n\nChange {path}, and run it: python {path}")


def _show_solution(lesson: Lesson) -> None:
    for leaving, coming in lesson.changes:
        typer.echo(f"- {leaving}\n+ {coming}")
    typer.echo(f"\n{_plain(lesson.answer)}")


def _plain(text: str) -> str:
    from manyhands.lab.tour.lesson import shown_in_terminal

    return shown_in_terminal(text)
