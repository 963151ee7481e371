"""What the benchmark of the workbench asks for exists, and it sees how a command ended."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manyhands.cli.main import app

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARKS / "workbench.py"))


def test_every_command_of_it_is_one_of_the_command_line(benchmark: dict[str, Any]) -> None:
    for command in benchmark["COMMANDS"].values():
        words = shlex.split(command.words)
        options = [word for word in words if word.startswith("--")]
        first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
        asked = CliRunner().invoke(app, [*words[:first], "--help"], env={"COLUMNS": "200"})
        assert asked.exit_code == 0, asked.output
        shown = re.sub(r"[^\w-]+", " ", asked.output)
        for option in options:
            assert option in shown.split(), (command.words, option)
        assert set(command.needs) <= set(benchmark["PREPARATIONS"])


@pytest.mark.parametrize(
    ("shown", "lines", "tells"),
    [
        ("report  a\r\nnext\r\n  manyhands watch a   # its page\r\n", 3, True),
        ("\x1b[1mmodel\x1b[0m  a\r\nnext  manyhands serve a\r\n", 2, True),
        ("manyhands: done; manyhands serve a starts it again\n", 1, True),
        ("10 %\r55 %\r100 %\r\nreport  a\n", 2, False),
        ("manyhands: the server has ended\n", 1, False),
        ("next  manyhands serve a\n" + "more\n" * 8, 9, False),
        ("", 0, False),
    ],
)
def test_it_sees_whether_a_command_said_what_to_do_next(
    benchmark: dict[str, Any], shown: str, lines: int, tells: bool
) -> None:
    cleaned = benchmark["cleaned"](shown)
    assert len(cleaned) == lines
    assert benchmark["ends_with_next"](cleaned) is tells


def test_a_bar_that_was_written_over_shows_as_its_end(benchmark: dict[str, Any]) -> None:
    assert benchmark["cleaned"]("10 %\r55 %\r100 %\r\n") == ["100 %"]
