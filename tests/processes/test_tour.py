"""The guided tour: every command of every lesson runs, and every exercise fails until it is solved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import run_command
from manyhands.lab.tour.lesson import Lesson, LessonCommand, lessons, read_lesson, shown_in_terminal

LESSONS = lessons()


def run_file(text: str, name: str) -> None:
    exec(compile(text, name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: one.title)
def test_the_commands_of_a_lesson_run(
    lesson: Lesson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [step for step in lesson.steps if isinstance(step, LessonCommand)]
    assert commands, "there is something to type"
    for command in commands:
        status = run_command(monkeypatch, *command.arguments)
        assert status == 0, f"{command}: {capfd.readouterr().err}"


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: one.title)
def test_an_exercise_fails_until_it_is_solved(
    lesson: Lesson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=r"\w") as failed:
        run_file(lesson.exercise, "exercise.py")
    assert Path(failed.traceback[-1].path).name == "exercise.py", (
        "it is the exercise that fails, and nothing below it"
    )
    run_file(lesson.solution, "solution.py")


def test_there_are_nine_in_a_row_and_each_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [lesson.number for lesson in LESSONS] == list(range(1, 10))
    assert run_command(monkeypatch, "tour") == 0
    listed = capsys.readouterr().out
    assert all(f"{lesson.number}  {lesson.title}" in listed for lesson in LESSONS)


def test_an_exercise_is_written_once_and_its_solution_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    assert run_command(monkeypatch, "tour", "6", "--exercise", mine) == 0
    assert mine.read_text() == LESSONS[5].exercise
    assert run_command(monkeypatch, "tour", "6", "--exercise", mine) == 2
    assert "already exists" in capsys.readouterr().err
    assert run_command(monkeypatch, "tour", "6", "--solution") == 0
    assert "+ microbatches = 28" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tour", "10"], "there are lessons 1 to 9"),
        (["tour", "--solution"], "give the number of a lesson"),
        (["tour", "1", "--exercise", "/nowhere/mine.py"], "cannot be written"),
    ],
)
def test_bad_input_gets_a_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, *arguments) == 2
    assert sentence in capsys.readouterr().err


def test_a_lesson_is_walked_step_by_step(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from manyhands.cli.tour_command import tour_command

    monkeypatch.chdir(tmp_path)
    tour_command(2, yes=True)
    shown = capfd.readouterr().out
    assert "$ manyhands schedule ring --workers 4" in shown
    assert "<!--" not in shown
    assert "](" not in shown
    words = " ".join(shown.split())  # which a terminal wraps
    assert "Exercise. Four workers exchange gradients" in words
    assert "Picture: A ring of four workers, round by round, in docs/figures/allreduce-ring.svg" in words


def test_a_lesson_can_be_taken_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.cli import tour_command

    places: list[Path] = []

    def run(command: list[str], *, cwd: Path, check: bool) -> SimpleNamespace:
        assert not (cwd / "tour").exists(), "the first --out of a lesson is new"
        places.append(cwd)
        return SimpleNamespace(returncode=0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tour_command, "subprocess", SimpleNamespace(run=run))
    for _ in range(2):
        tour_command.tour_command(1, yes=True)
    assert len(places) == 4
    assert len(set(places)) == 2


def test_marks_and_links_are_not_shown_in_a_terminal() -> None:
    page = "See [this](../a.md):\n\n<!-- table -->\n| a |\n<!-- /table -->\n\n![A b](../figures/c.svg)\n"
    assert shown_in_terminal(page) == "See this:\n\n| a |\n\nPicture: A b, in docs/figures/c.svg\n"


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("no title", "begins with its number"),
        ("# 1. A\n\ntext\n", "needs the parts"),
        ("# 1. A\n\n## Exercise\n\n## Solution\n", "one block of python"),
        ("# 1. A\n\n## Exercise\n```python\nx\n```\n\n## Solution\n", "one block of diff"),
        ("# 1. A\n\n## Exercise\n```python\nx\n```\n\n## Solution\n```diff\n+x\n-y\n```\n", "pairs of lines"),
    ],
)
def test_a_page_that_lacks_something_is_refused(page: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_lesson(page)
