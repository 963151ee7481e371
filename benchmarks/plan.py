"""How wrong plans are: predicted beside seen for every plan of every task, and what choosing by them costs.

    python benchmarks/plan.py --workers 2 --json benchmarks/results/plan-2.json

For each task and number of workers, in several rounds: what `manyhands plan` does (the task is measured, every plan is
predicted), and then plans are run for a moment: in the first round all of them, later those that `plan_choices.py`
says are near the best of some choice. A prediction is held against what was seen in its own round. What was seen of
tasks on which the planner was developed corrects the predictions of those after them, as it does for a user who
verifies plans; nothing else is fitted. Beside the predictions stands a null model: a step takes the time of `single`
divided by the workers.

Each round also chooses under many constraints: by its prediction alone; by the prediction and a trial of the best few,
as `auto` and `--verify` do; by a trial of every plan, whose regret is the machine's own unrest; and by two rules,
always `mirrored` and always `single`. What was chosen by a trial is judged by the other rounds.

Where time is limited, `--minutes` ends the measurement between two trials with what there is, and `--known FILES`
goes on with the cases that other files lack.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from manyhands.errors import ManyhandsError, UserError, first_line
from manyhands.foresight.plan.machine_record import MachineRecord
from manyhands.foresight.plan.plan_search import PlanRow
from manyhands.foresight.plan.planning import PlanRequirements, TaskPlan, plan
from manyhands.foresight.plan.step_costs import try_steps
from manyhands.foresight.plan.track_record import SeenStep, cost_class
from manyhands.strategy import Strategy
from plan_choices import LIKELY, WAYS, again, choices, regret_of
from plan_tasks import HELD_OUT, SEEN


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class OutOfTime(Exception):
    """No trial begins after the limit of `--minutes`."""


@dataclass(frozen=True)
class Round:
    """One plan, and what its rows took right after it."""

    found: TaskPlan
    seen: dict[str, float]

    @property
    def rows(self) -> dict[str, PlanRow]:
        return {str(row.strategy): row for row in self.found.ranked.rows if row.predicted and row.is_open}


def planned(task: mh.Task, workers: int, asked: argparse.Namespace) -> TaskPlan:
    required = PlanRequirements(must="none")
    if asked.strategies:
        texts = tuple(text.strip() for text in asked.strategies.split(";") if text.strip())
        required = replace(required, strategies=texts)
    return plan(task, workers=workers, required=required, device=asked.device)


def tried(
    task: mh.Task, one: Round, texts: Sequence[str], asked: argparse.Namespace, seen: dict[str, float]
) -> None:
    """Run each of these plans for a moment: a machine is not as fast a minute later."""
    for text in texts:
        in_time(asked)
        row = one.rows[text]
        try:
            took_s = try_steps(task, row.strategy, row.workers, asked.seconds, row.seconds, asked.device)
        except ManyhandsError as error:
            say(f"  {row.strategy} failed: {first_line(error)}")
            continue
        if took_s is not None:
            seen[text] = took_s


def in_time(asked: argparse.Namespace) -> None:
    if time.monotonic() > asked.until:
        raise OutOfTime


def rounds_of(task: mh.Task, workers: int, asked: argparse.Namespace) -> Iterator[list[Round]]:
    """The rounds so far, after each of them; a later one that the time ended stands with what it has seen."""
    rounds: list[Round] = []
    for _ in range(asked.rounds):
        in_time(asked)
        one = Round(planned(task, workers, asked), {})
        texts: Sequence[str] = list(one.rows)
        if rounds:
            first = rounds[0].seen
            texts = again([told_of(row) for text, row in one.rows.items() if text in first], first)
        try:
            tried(task, one, texts, asked, one.seen)
        except OutOfTime:
            if rounds:
                yield [*rounds, one]
            raise
        rounds.append(one)
        yield rounds


def told_of(row: PlanRow) -> dict[str, Any]:
    return {
        "strategy": str(row.strategy), "workers": row.workers, "memory": row.memory, "predicted": row.seconds or 0.0
    }  # fmt: skip


def case(name: str, workers: int, rounds: Sequence[Round]) -> dict[str, Any]:
    texts = [text for text in rounds[0].seen if all(text in one.rows for one in rounds)]
    told = [row_of(rounds, text) for text in texts]
    return {
        "task": name,
        "workers": workers,
        "rounds": len(rounds),
        "rows": told,
        "choices": choices(told) if len(rounds) > 1 else [],
    }


def row_of(rounds: Sequence[Round], text: str) -> dict[str, Any]:
    """Predictions beside what was seen in the same round; the medians over the rounds in which it ran."""
    ran = [one for one in rounds if text in one.seen]
    rows, seen = [one.rows[text] for one in ran], [one.seen[text] for one in ran]
    alone = [one.seen.get("single", rounds[0].seen["single"]) for one in ran]
    count = rows[0].workers

    def median_error(predicted: Sequence[float]) -> float:
        return round(statistics.median(p / s - 1 for p, s in zip(predicted, seen, strict=True)), 4)

    return {
        "strategy": text,
        "workers": count,
        "memory": rows[0].memory,
        "predicted_ms": round(1e3 * statistics.median(row.seconds or 0.0 for row in rows), 4),
        "predicted_rounds_ms": [round(1e3 * (one.rows[text].seconds or 0.0), 4) for one in rounds],
        "parts_ms": {name: round(1e3 * took, 4) for name, took in rows[0].predicted.parts.items()},
        "uncorrected_ms": round(1e3 * statistics.median(row.uncorrected_s for row in rows), 4),
        "seen_ms": round(1e3 * statistics.median(seen), 4),
        "seen_rounds_ms": [round(1e3 * one.seen[text], 4) if text in one.seen else None for one in rounds],
        "spread": round(max(seen) / min(seen) - 1, 4),
        "error": median_error([row.seconds or 0.0 for row in rows]),
        "said_error": round(rows[0].error, 4),
        "null_error": median_error([one / count for one in alone]),
    }


def remember(found: dict[str, Any]) -> None:
    pairs = [
        SeenStep(
            kind=cost_class(Strategy.parse(one["strategy"])),
            predicted_s=one["uncorrected_ms"] / 1e3,
            seen_s=one["seen_ms"] / 1e3,
        )
        for one in found["rows"]
    ]
    MachineRecord.of_this_machine().add_pairs(found["workers"], pairs)


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [one for found in cases for one in found["rows"]]
    picks = [one for found in cases for one in found["choices"]]

    def errors(name: str) -> dict[str, float]:
        found = sorted(abs(one[name]) for one in rows)
        return {
            "median": statistics.median(found),
            "p90": found[math.ceil(0.9 * len(found)) - 1],
            "worst": found[-1],
        }

    # A plan beside itself: how far one round is from another one, in the median.
    apart = [
        abs(math.log(one / other))
        for row in rows
        for one, other in combinations(filter(None, row["seen_rounds_ms"]), 2)
    ]
    noise = math.expm1(statistics.median(apart)) if apart else 0.0
    return {
        "predictions": len(rows),
        "error": errors("error"),
        "null": errors("null_error"),
        "covered": statistics.mean(abs(one["error"]) <= one["said_error"] for one in rows),
        "repeat_noise": round(noise, 4),
        "cases": sum(len({one["constraint"] for one in found["choices"]}) for found in cases),
        "choices": len(picks),
        "regret": {way: regret_of(picks, way, noise) for way in WAYS} if picks else None,
    }


def show(found: dict[str, Any]) -> None:
    print(f"{found['task']} on {found['workers']} workers")
    for one in found["rows"]:
        print(
            f"  {one['strategy']:<34}{one['predicted_ms']:>10.2f} ms{one['seen_ms']:>10.2f} ms seen"
            f"{one['error']:>+9.1%}{one['null_error']:>+9.1%} (null)"
        )
    for one in found["choices"]:
        taken, regret = one["taken"], one["regret"]
        print(
            f"  {one['constraint']}, round {one['round']}: {taken['predicted']} ({regret['predicted']:+.1%}), tried "
            f"{taken['tried']} ({regret['tried']:+.1%}), best {one['best']}"
        )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", default="2", help="numbers, separated by commas")
    parser.add_argument("--tasks", default=",".join((*SEEN, *HELD_OUT)))
    parser.add_argument(
        "--strategies", help="separated by semicolons, with single and mirrored; default: all"
    )
    parser.add_argument("--seconds", type=float, default=0.6, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/plan-2.json"))
    parser.add_argument(
        "--known",
        type=Path,
        nargs="+",
        default=[],
        help="files whose whole cases are kept, not measured again",
    )
    parser.add_argument("--cache", type=Path, help="what the machine remembers; without it, nothing yet")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no trial begins")
    asked = parser.parse_args()
    if asked.rounds < 2:
        parser.error("--rounds: a choice of one round is judged by the others; give at least 2")
    asked.until = time.monotonic() + 60 * asked.minutes
    cases = list(known(asked.known, asked.rounds).values())
    with tempfile.TemporaryDirectory(prefix="manyhands-plan-") as folder:
        remember_in(asked.cache.resolve() if asked.cache else Path(folder))
        measure_all(asked, cases)
    if not cases:
        parser.exit(1, "no case was measured\n")
    told = keep(cases, asked)
    print(json.dumps({name: told[name] for name in ("held_out", "all")}, indent=1))


def known(files: Sequence[Path], rounds: int) -> dict[tuple[str, int], dict[str, Any]]:
    """By task and workers; of several the later one. A case that the time ended is measured again."""
    every = [one for path in files for one in json.loads(path.read_text())["cases"]]
    return {(one["task"], one["workers"]): one for one in every if one["rounds"] >= rounds}


def remember_in(folder: Path) -> None:
    """Keep what this machine learns of plans in a folder of its own; compiled kernels are those there are."""
    known = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manyhands" / "kernels"
    if known.is_dir():
        shutil.copytree(known, folder / "manyhands" / "kernels", dirs_exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder)


def measure_all(asked: argparse.Namespace, cases: list[dict[str, Any]]) -> None:
    """Add a case for each number of workers and task that is not there, as far as the time allows."""
    built, there = {**SEEN, **HELD_OUT}, {(one["task"], one["workers"]) for one in cases}
    for workers, name in product(map(int, asked.workers.split(",")), asked.tasks.split(",")):
        if (name, workers) in there:
            continue
        began, before = time.monotonic(), list(cases)
        try:
            for rounds in rounds_of(built[name](), workers, asked):
                cases[:] = [*before, case(name, workers, rounds)]
                keep(cases, asked)
        except UserError as error:
            say(f"{name}: {error}")
            continue
        except OutOfTime:
            say(f"{name} on {workers}: the time is over")
            return
        say(f"{name} on {workers}: {time.monotonic() - began:.0f} s")
        show(cases[-1])
        if name in SEEN:  # as `--verify` does: what was seen corrects what is predicted next
            remember(cases[-1])


def keep(cases: list[dict[str, Any]], asked: argparse.Namespace) -> dict[str, Any]:
    """Write what was found so far."""
    held_out = [found for found in cases if found["task"] in HELD_OUT]
    record = {
        "cores": len(os.sched_getaffinity(0)),
        "of_cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "device": asked.device,
        "seconds": asked.seconds,
        "rounds": asked.rounds,
        "tried": f"{LIKELY} plans, the best of each kind first, as `--verify {LIKELY}` and `auto` make it",
        "held_out": summary(held_out) if held_out else None,
        "all": summary(cases),
        "cases": cases,
    }
    asked.json.write_text(json.dumps(record, indent=1) + "\n")
    return record


if __name__ == "__main__":
    main()
