"""`auto` beside the best strategy by hand: whole runs of a minute and more, planning and trials included.

    python benchmarks/auto.py --json benchmarks/results/auto-2.json

Each strategy that keeps the numbers of one process is tried for some seconds. The two fastest, `mirrored` and `auto`
then train the same number of steps, so many that the fastest takes `--seconds`; the time is that of the whole `fit`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import manyhands as mh
from manyhands.errors import UserError
from manyhands.foresight.plan.step_costs import try_steps
from manyhands.lab.bench.harness import host_facts
from manyhands.strategy import Strategy
from plan_tasks import HELD_OUT, SEEN

BY_HAND = ("mirrored", "central", "single", "ps", "ps servers=2", "sharded", "pipeline")


def whole_run(task: mh.Task, strategy: str, workers: int, steps: int) -> tuple[float, dict[str, Any]]:
    count = 1 if strategy == "single" else workers
    options = mh.Options(progress="none", check_every=0, allow_overload=True, resume_command="")
    began = time.perf_counter()
    run = mh.fit(task, strategy, workers=count, steps=steps, options=options)
    return time.perf_counter() - began, dict(run.summary.get("auto", {}))


def case(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    task = {**SEEN, **HELD_OUT}[name]()
    tried: dict[str, float] = {}
    for strategy in BY_HAND:
        count = 1 if strategy == "single" else asked.workers
        try:
            seen_s = try_steps(task, Strategy.parse(strategy), count, 2.0, 0.01)
        except UserError as error:
            print(f"{name}: {strategy}: {error}", file=sys.stderr)
            continue
        if seen_s is not None:
            tried[strategy] = seen_s
    ranked = sorted(tried, key=lambda text: tried[text])
    steps = round(asked.seconds / tried[ranked[0]])
    contenders = list(dict.fromkeys((*ranked[:2], "mirrored", "auto")))
    took: dict[str, list[float]] = {text: [] for text in contenders}
    told: dict[str, Any] = {}
    for _ in range(asked.repeats):
        for text in contenders:
            seconds, facts = whole_run(task, text, asked.workers, steps)
            took[text].append(seconds)
            told = facts or told
            print(f"{name}: {text}: {seconds:.1f} s {facts.get('strategy', '')}", flush=True)
    middle = {text: statistics.median(times) for text, times in took.items()}
    by_hand = min((text for text in middle if text != "auto"), key=lambda text: middle[text])
    return {
        "task": name,
        "steps": steps,
        "seconds": {text: [round(one, 2) for one in times] for text, times in took.items()},
        "best": by_hand,
        "auto": told.get("strategy"),
        "auto_speed": round(middle[by_hand] / middle["auto"], 4),
        "mirrored_speed": round(middle[by_hand] / middle["mirrored"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tasks", default="digits,images,uneven")
    parser.add_argument("--seconds", type=float, default=65.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/auto-2.json"))
    asked = parser.parse_args()
    facts = host_facts()
    cases = [case(name, asked) for name in asked.tasks.split(",")]
    for one in cases:
        print(f"{one['task']}: auto chose {one['auto']}: {one['auto_speed']:.2f} of {one['best']}'s speed")
    record = {**facts, "workers": asked.workers, "cases": cases}
    asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
