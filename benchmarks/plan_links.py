"""How wrong plans are between hosts: predicted beside seen, over cables of several rates; needs root.

    python benchmarks/plan_links.py --json benchmarks/results/plan-links.json

Two network namespaces stand for hosts, and a token bucket at each end of the cable for its rate. The task is measured
on as many workers as run, at once, on this machine; the rate is given, as in a cluster file. Nothing is fitted to these
runs. Beside the predictions stands a null model: a step takes the time of one process divided by the workers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from cables import cores_of, inside, places, run_ranks, two_namespaces
from manyhands.facts import LinkRate, Machines
from manyhands.foresight.estimate import estimate
from manyhands.foresight.plan.step_costs import usual_costs
from manyhands.foresight.plan.task_profile import TaskProfiles
from manyhands.foresight.plan.track_record import cost_class
from manyhands.strategy import Strategy
from plan_tasks import HELD_OUT, SEEN

ADDRESS, LIMIT_S, WARM, HOSTS = "10.231.81.", 240.0, 3, 2
WAYS = (
    "allreduce algorithm=ring",
    "allreduce algorithm=hierarchical",
    "allreduce algorithm=butterfly",
    "local",
    "sharded",
    "central",
)
RATES = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}
CABLE = LinkRate(latency_s=1e-4, bytes_per_s=math.inf)  # of a message by Python, before its bytes
LOOPBACK = LinkRate(latency_s=1e-4, bytes_per_s=1.5e9)


def work(task: str, strategy: str, steps: int, result: Path) -> None:
    """One of the processes, on the cores of its host: a run divides all that it may use among a host's workers."""
    host = int(os.environ["RANK"]) * HOSTS // int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, cores_of(host, HOSTS))
    options = mh.Options(insecure=True, progress="none", check_every=0)
    run = mh.fit({**SEEN, **HELD_OUT}[task](), strategy, steps=steps, options=options)
    if os.environ["RANK"] == "0":
        at = sorted(row["at_s"] for row in run.history.steps)
        result.write_text(json.dumps([late - early for early, late in pairwise(at)][WARM:]))


def strategy_text(text: str, per_host: int) -> str:
    return f"{text} group={per_host}" if "hierarchical" in text and per_host > 1 else text


def seen_s(task: str, text: str, names: list[str], world: int, steps: int, port: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "took"
        own = [sys.executable, "-W", "ignore", __file__, "--work", task, text, str(steps), str(result)]
        commands = [[*inside(names[rank * HOSTS // world]), *own] for rank in range(world)]
        run_ranks(commands, [places(ADDRESS, port, rank, world) for rank in range(world)], LIMIT_S)
        return statistics.mean(json.loads(result.read_text()))


def rows_of(name: str, per_host: int, rate: str, ways: list[str], port: int) -> list[dict[str, Any]]:
    task, world = {**SEEN, **HELD_OUT}[name](), HOSTS * per_host
    found = estimate(task)
    profiles, rows = TaskProfiles(task, found), []
    alone = Strategy.parse("single").predict(profiles.of(1, 1), Machines())
    assert alone is not None, "one process is modelled"
    between = LinkRate(latency_s=CABLE.latency_s, bytes_per_s=RATES[rate] / 8)
    machines = Machines(hosts=HOSTS, per_host=per_host, inside=LOOPBACK, between=between)
    with two_namespaces(ADDRESS, rate, ["burst", "256kb", "latency", "100ms"]) as names:
        for way in ways:
            text = strategy_text(way, per_host)
            strategy = Strategy.parse(text)
            step = strategy.predict(profiles.of(world, world), machines)
            traffic = strategy.sends(found.footprint, world) or ()
            if step is None:
                continue
            costs = usual_costs(machines).get(cost_class(strategy))
            beside = 0.0
            if costs is not None:
                messages = max((one.messages for one in traffic), default=0.0)
                beside = costs.seconds(messages, max((one.num_bytes for one in traffic), default=0.0))
            predicted = step.seconds + beside
            steps = WARM + 1 + 8 * max(2, min(8, round(0.25 / predicted)))  # whole rounds of `local`
            port += 1
            took = seen_s(name, text, names, world, steps, port)
            rows.append(
                {
                    "task": name, "rate": rate, "per_host": per_host, "strategy": text,
                    "predicted_ms": round(1e3 * predicted, 3), "seen_ms": round(1e3 * took, 3),
                    "error": round(predicted / took - 1, 4),
                    "null_error": round(alone.seconds / world / took - 1, 4),
                }
            )  # fmt: skip
            print(
                f"{name:<12}{rate:>8} 2 x {per_host} {text:<42}{1e3 * predicted:>9.2f} ms"
                f"{1e3 * took:>9.2f} seen{rows[-1]['error']:>+8.1%}{rows[-1]['null_error']:>+8.1%} (null)",
                flush=True,
            )
    return rows


def errors(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    found = sorted(abs(one[name]) for one in rows)
    return {
        "median": statistics.median(found),
        "p90": found[math.ceil(0.9 * len(found)) - 1],
        "worst": found[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", default="perceptron,uneven,transformer")
    parser.add_argument("--rates", default=",".join(RATES))
    parser.add_argument("--per-host", default="1")
    parser.add_argument("--ways", default=";".join(WAYS))
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/plan-links.json"))
    parser.add_argument("--add", action="store_true", help="keep what the file has of other cases")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        task, strategy, steps, result = asked.work
        work(task, strategy, int(steps), Path(result))
        return
    rows: list[dict[str, Any]] = []
    if asked.add and asked.json.exists():
        rows = json.loads(asked.json.read_text())["rows"]
    for per_host in map(int, asked.per_host.split(",")):
        for name, rate in product(asked.tasks.split(","), asked.rates.split(",")):
            found = rows_of(name, per_host, rate, asked.ways.split(";"), 29600 + 8 * len(rows))
            keys = ("task", "rate", "per_host", "strategy")
            cases = [[one[key] for key in keys] for one in found]
            rows = [*(one for one in rows if [one[key] for key in keys] not in cases), *found]
            keep(rows, asked.json)


def keep(rows: list[dict[str, Any]], path: Path) -> None:
    """Write what was found so far."""
    record = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "hosts": HOSTS,
        "error": errors(rows, "error"),
        "null": errors(rows, "null_error"),
        "rows": rows,
    }
    print(json.dumps({name: record[name] for name in ("error", "null")}))
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
