"""How wrong plans are: predicted beside seen for every strategy that is modelled, and what choosing by them costs.

    python benchmarks/plan.py --workers 2 --json benchmarks/results/plan-2.json

For each task, what `manyhands plan` does: the links and the task are measured, every plan is predicted, and then each
is run for some steps, interleaved, in several repeats. Nothing is fitted to these runs. Beside it two null models: a
step takes the time of `single` divided by the workers, and the choice is always `mirrored`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from manyhands.foresight.estimate import estimate, refusal
from manyhands.foresight.plan.described_cluster import DescribedCluster
from manyhands.foresight.plan.plan_search import Question, RankedPlans, make_plan
from manyhands.foresight.plan.task_profile import measure_profile
from manyhands.lab.plan.measured_host import measured_host
from manyhands.lab.plan.tried_plans import Tried, try_plans

HIDDEN = 1024


def perceptron() -> mh.Task:
    torch.manual_seed(0)
    x = torch.randn(2048, HIDDEN)

    def model() -> torch.nn.Module:
        layers = [layer for _ in range(3) for layer in (torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.ReLU())]
        return torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN, 10))

    return mh.Task(
        model=model,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        data=(x, x[:, :10].argmax(1)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=64,
    )


def tasks() -> dict[str, mh.Task]:
    return {
        "digits": mh.tasks.build("digits"),
        "language": mh.tasks.build("language"),
        "perceptron": perceptron(),
    }


def predicted(task: mh.Task, workers: int) -> RankedPlans:
    found, cores = estimate(task), len(os.sched_getaffinity(0))
    profiles = {
        per_host: measure_profile(task, found.footprint, max(1, cores // per_host)).profile
        for per_host in {1, workers}
    }
    question = Question(
        profile_of=lambda per_host: profiles[per_host],
        cluster=DescribedCluster(machines=measured_host(workers), measured=True),
        workers=workers,
        refuses=lambda strategy, count: refusal(task, strategy, count, found),
        must=(),
    )
    return make_plan(question)


def row(one: Tried, single_s: float, workers: int) -> dict[str, Any]:
    null_s = single_s if one.strategy == "single" else single_s / workers
    return {
        "strategy": one.strategy,
        "predicted_ms": round(1e3 * one.predicted_s, 3),
        "seen_ms": round(1e3 * one.seen_s, 3),
        "error": round(one.predicted_s / one.seen_s - 1, 4),
        "null_error": round(null_s / one.seen_s - 1, 4),
    }


def case(name: str, task: mh.Task, workers: int, steps: int, repeats: int) -> dict[str, Any]:
    plan = predicted(task, workers)
    rows = [one for one in plan.rows if one.predicted is not None]
    tried = try_plans(task, rows, steps=steps, repeats=repeats)
    seen = {one.strategy: one.seen_s for one in tried}
    equal = {
        str(one.strategy)
        for one in rows
        if one.strategy.facts.promises.same_numbers.answer.value == "yes" and str(one.strategy) in seen
    }
    chosen = next(str(one.strategy) for one in rows if str(one.strategy) in equal)
    best = min(seen[text] for text in equal)
    return {
        "task": name,
        "chosen": chosen,
        "regret": round(seen[chosen] / best - 1, 4),
        "regret_of_mirrored": round(seen["mirrored"] / best - 1, 4),
        "rows": [row(one, seen["single"], workers) for one in tried],
    }


def summary(cases: list[dict[str, Any]]) -> dict[str, float]:
    def errors(name: str) -> list[float]:
        return sorted(abs(one[name]) for found in cases for one in found["rows"])

    ours, null = errors("error"), errors("null_error")
    return {
        "median": statistics.median(ours),
        "p90": ours[math.ceil(0.9 * len(ours)) - 1],
        "worst": ours[-1],
        "null_median": statistics.median(null),
        "null_p90": null[math.ceil(0.9 * len(null)) - 1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/plan-2.json"))
    asked = parser.parse_args()
    cases = []
    for name, task in tasks().items():
        found = case(name, task, asked.workers, asked.steps, asked.repeats)
        cases.append(found)
        print(
            f"{name}: chosen {found['chosen']}, regret {found['regret']:+.1%}, "
            f"of mirrored {found['regret_of_mirrored']:+.1%}"
        )
        for one in found["rows"]:
            print(
                f"  {one['strategy']:<34}{one['predicted_ms']:>10.2f} ms{one['seen_ms']:>10.2f} ms seen"
                f"{one['error']:>+9.1%}{one['null_error']:>+9.1%} (null)"
            )
    told = summary(cases)
    print(", ".join(f"{name} {value:.1%}" for name, value in told.items()))
    record = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "workers": asked.workers,
        "steps": asked.steps,
        "repeats": asked.repeats,
        "summary": told,
        "cases": cases,
    }
    asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
