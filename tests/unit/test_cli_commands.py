"""The list of commands: it is shown without waiting for torch, and says what the commands say of themselves."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module

import pytest
import typer
from typer.testing import CliRunner

from manyhands.cli.later import forks_workers
from manyhands.cli.main import COMMANDS, app


def test_the_list_of_commands_waits_for_nothing_heavy() -> None:
    code = "import sys, manyhands.cli.main; print([name for name in sys.argv[1:] if name in sys.modules])"
    heavy = ["torch", "numpy", "numba", "sklearn", "starlette", "multiprocessing"]
    done = subprocess.run(
        [sys.executable, "-c", code, *heavy, "typer"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "['typer']\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says_of_itself(name: str) -> None:
    module, _, attribute = COMMANDS[name].home.partition(":")
    found = getattr(import_module(module), attribute)
    own = found.info.help if isinstance(found, typer.Typer) else inspect.getdoc(found)
    assert own
    assert COMMANDS[name].help == own.partition("\n")[0]


@pytest.mark.parametrize(
    "words", [["train", "digits"], ["train", "glove"], ["bench", "step"], ["compare", "digits"]]
)
def test_help_shows_flags_as_flags(words: list[str]) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"], terminal_width=120).output.lower()
    assert "--allow-overload" in shown
    assert "bool" not in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("digits", True),
        ("digits --workers 2 --strategy ps", True),
        ("digits --strategy=single", False),
        ("digits --strategy no-such", False),
        ("digits --strategy", False),
        ("digits --help", False),
        ("digits --cluster=ray", False),
        ("", False),
        ("glove", False),
        ("glove --strategy hogwild", False),
        ("glove --strategy allreduce", True),
        ("logreg --train f --strategy ps", True),
        ("gbdt --train f", False),
        ("gbdt --train f --strategy allreduce", True),
    ],
)
def test_a_template_is_started_early_only_where_workers_are_forked_from_it(
    words: str, expected: bool
) -> None:
    assert forks_workers(words.split()) is expected


def test_hands_that_are_processes_are_forked() -> None:
    assert forks_workers(["glove", "--strategy", "hogwild hands=processes"])
    assert forks_workers(["digits", "--strategy", "hogwild"])
