"""A Task of the user's own, named on a command line: `my_module:task`, or `models/mine.py:task`.

The module is imported from where the command was typed. What is named is a Task, or a function without arguments that
makes one. Nothing of a run is executed: the module is the user's, and the run has weights only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import FunctionType, ModuleType

from manyhands.errors import UserError, first_line, nearest
from manyhands.task import Task

OWN_TASK = "MODULE:NAME"  # what help texts call it


def own_task(text: str) -> Task:
    """The Task that `text` names; UserError where there is none, with what its module raised."""
    where, _, name = text.rpartition(":")
    if not where or not name.isidentifier():
        raise UserError(f"--task {text!r}: it must be {OWN_TASK}, such as my_module:task")
    folder, module = Path.cwd(), where
    if where.endswith(".py"):
        file = Path(where).absolute()
        if not file.is_file():
            raise UserError(f"--task {text}: there is no file {where}")
        folder, module = file.parent, file.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the module is the user's, and may raise anything
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"--task {text}: module {module} cannot be imported ({why})") from error
    if where.endswith(".py") and Path(found.__file__ or "").resolve() != file.resolve():
        raise UserError(
            f"--task {text}: another module is called {module} ({found.__file__}); rename the file"
        )
    if not hasattr(found, name):
        offers = sorted(_offers(found))
        instead = nearest(name, offers) if offers else "nor any other Task, or function that makes one"
        raise UserError(f"--task {text}: {module} has no {name!r}; {instead}")
    made = getattr(found, name)
    if callable(made):
        try:
            made = made()
        except TypeError as error:
            why = f"{name} cannot be called without arguments: {first_line(error)}"
            raise UserError(f"--task {text}: {why}") from error
        except Exception as error:  # a file of its data that is not there, say
            why = f"{name} failed ({type(error).__name__}: {first_line(error)})"
            raise UserError(f"--task {text}: {why}") from error
    if not isinstance(made, Task):
        raise UserError(f"--task {text}: {name} gives a {type(made).__name__}; it must be a Task")
    return made


def _offers(module: ModuleType) -> Iterator[str]:
    """The Tasks of a module, and its own functions that can be called without arguments."""
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            needed = [one for one in signature(value).parameters.values() if one.default is one.empty]
            if not needed:
                yield name
        elif isinstance(value, Task):
            yield name
