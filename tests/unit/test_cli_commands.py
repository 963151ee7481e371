"""The list of commands: it is shown without waiting for torch, and says what the commands say of themselves."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module

import pytest
import typer

from manyhands.cli.main import COMMANDS


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
