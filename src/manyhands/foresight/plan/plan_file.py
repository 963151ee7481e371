"""A plan as a file: what was predicted of every strategy, which was chosen, and what `train --plan` reads of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.errors import UserError, printable
from manyhands.strategy import Strategy, check_count

if TYPE_CHECKING:
    from manyhands.foresight.plan.plan_search import PlanRow
    from manyhands.foresight.plan.planning import TaskPlan

__all__ = ["plan_record", "planned"]

_LARGEST = 1 << 24  # bytes that a plan may have


def plan_record(task: str, options: Mapping[str, str], plan: TaskPlan) -> dict[str, Any]:
    """All that was predicted, seen and chosen; times in seconds, sizes in bytes."""
    machines = plan.cluster.machines
    return {
        "task": task,
        "options": dict(options),
        "strategy": str(plan.strategy),
        "workers": plan.workers,
        "steps": plan.steps,
        "device": plan.device,
        "machines": {
            "measured": plan.cluster.measured,
            "hosts": machines.hosts,
            "workers_per_host": machines.per_host,
        },
        "plans": [_row_record(row) for row in plan.ranked.rows],
        "sensitivities": list(plan.ranked.sensitivities),
        "tried": [
            {
                "strategy": str(one.row.strategy),
                "workers": one.row.workers,
                "predicted_s": one.row.seconds,
                "seen_s": one.seen_s,
            }
            for one in plan.tried
        ],
        "notes": list(plan.notes),
    }


def _row_record(row: PlanRow) -> dict[str, Any]:
    return {
        "strategy": str(row.strategy),
        "workers": row.workers,
        "step_s": row.seconds,
        "error": row.error if row.seconds is not None else None,
        "parts": None if row.predicted is None else row.predicted.parts,
        "total_s": row.total_s,
        "memory": row.memory,
        "sent_per_step": row.sent,
        "price": row.price,
        "may_be_chosen": row.is_open,
        "reason": row.reason,
    }


def planned(path: Path, task: str, options: Mapping[str, str]) -> tuple[str, int]:
    """The strategy and the workers that a plan chose for this task; UserError for a file that is no plan of it.

    A plan of the task with other `options` is of another batch or model.
    """
    wrong = f"--plan {path} is not a plan; `manyhands plan {task} --json {path}` writes one"
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_LARGEST))
        of, text, workers = record["task"], record["strategy"], record["workers"]
        its_options = dict(record["options"])
    except OSError as error:
        raise UserError(f"--plan {path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(wrong) from error
    if of != task:
        raise UserError(f"--plan {path} is a plan for {of!r:.50}, not for {task}")
    if its_options != dict(options):
        given = printable(" ".join(f"--{name}={value}" for name, value in its_options.items()))
        raise UserError(f"--plan {path} is for {task} with {given or 'no options'}; give the same ones")
    if not isinstance(text, str) or isinstance(workers, bool):
        raise UserError(wrong)
    check_count("workers", workers)
    return str(Strategy.parse(text)), workers
