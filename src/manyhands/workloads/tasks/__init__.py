"""Built-in tasks that need no network: a plain dict from name to how each is made, chosen and trained."""

from __future__ import annotations

from typing import Any

from manyhands.task import Task
from manyhands.workloads.builtin_task import BuiltinTask
from manyhands.workloads.registry import TASK_NAMES, WORKLOADS, load, require_task

__all__ = ["TASKS", "build"]

TASKS: dict[str, BuiltinTask[Any]] = {name: load(WORKLOADS[name].task) for name in TASK_NAMES}


def build(name: str, /, **options: Any) -> Task:
    """The task `name`; a name or option that does not exist is a UserError with the nearest one."""
    made: Task = require_task(name).build(**options)
    return made
