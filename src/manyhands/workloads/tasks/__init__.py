"""Built-in tasks that need no network: a plain dict from name to how each is made, chosen and trained."""

from __future__ import annotations

from typing import Any

from manyhands.errors import UserError, nearest
from manyhands.task import Task
from manyhands.workloads.tasks.builtin import BuiltinTask
from manyhands.workloads.tasks.digits import DIGITS
from manyhands.workloads.tasks.language import LANGUAGE
from manyhands.workloads.tasks.line import LINE
from manyhands.workloads.tasks.mnist import MNIST
from manyhands.workloads.tasks.recurrent import RECURRENT

__all__ = ["TASKS", "build"]

TASKS: dict[str, BuiltinTask[Any]] = {
    entry.name: entry for entry in (DIGITS, MNIST, LANGUAGE, RECURRENT, LINE)
}


def build(name: str, /, **options: Any) -> Task:
    """The built-in task `name`; a name or option that does not exist is a UserError with the nearest one."""
    if name not in TASKS:
        raise UserError(f"there is no built-in task {name!r}; {nearest(name, TASKS)}")
    return TASKS[name].build(**options)
