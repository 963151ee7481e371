"""A plan as a file: what was predicted of every strategy, which was chosen, and what `train --plan` reads of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manyhands.errors import UserError, printable
from manyhands.foresight.plan.plan_search import RankedPlans
from manyhands.strategy import Strategy, check_count

__all__ = ["plan_record", "planned"]

_LARGEST = 1 << 24  # bytes that a plan may have


def plan_record(
    task: str,
    options: Mapping[str, str],
    plan: RankedPlans,
    chosen: str,
    tried: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    return {
        "task": task,
        "options": dict(options),
        "strategy": chosen,
        "workers": next(row.workers for row in plan.rows if str(row.strategy) == chosen),
        "plans": [
            {
                "strategy": str(row.strategy),
                "workers": row.workers,
                "step_s": row.seconds,
                "parts": None if row.predicted is None else asdict(row.predicted),
                "memory": row.memory,
                "sent_per_step": row.sent,
                "price_of_1000_steps": row.price,
                "reason": row.reason,
            }
            for row in plan.rows
        ],
        "sensitivities": list(plan.sensitivities),
        "tried": list(tried),
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
